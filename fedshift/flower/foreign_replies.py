"""What FedPALS reads of replies of foreign apps: arrays of any framework, and label counts."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, RecordDict
from numpy.typing import NDArray

from fedshift.errors import InputError
from fedshift.real import described, numbers

LOG = logging.getLogger("fedshift.flower")
COUNTS, PARTITION = "label-counts", "partition-id"
# Counts may be fractions (noise for privacy); beyond these limits sums and quotients overflow.
LEAST, MOST = 1e-9, 1e15
Floats = NDArray[np.float64]
Arrays = dict[str, NDArray[Any]]


def arrays_of(record: ArrayRecord, like: Mapping[str, NDArray[Any]] | None = None) -> Arrays:
    """The arrays of a record.

    like: the model that was sent. Raises InputError if names, shapes or types differ from it, for
    numbers that are not finite, and for arrays that are not NumPy's.
    """
    try:
        arrays = {name: array.numpy() for name, array in record.items()}
        # np.load turns a zip file into an archive object.
        if not all(isinstance(v, np.ndarray) for v in arrays.values()):
            raise TypeError("an archive in the place of an array")
    except Exception as e:
        # The bytes come from another machine: any exception of NumPy means that they are invalid.
        raise InputError(f"its arrays cannot be read: {str(e) or type(e).__name__}") from None
    if like is None:
        return arrays
    # Check here: a mean over different models would broadcast, or fail far from the cause.
    if arrays.keys() != like.keys():
        differing = sorted(arrays.keys() ^ like.keys())
        raise InputError(f"its model has other arrays than the one that was sent: {differing[:5]}")
    for name, sent in like.items():
        v = arrays[name]
        if v.shape != sent.shape or v.dtype != sent.dtype:
            raise InputError(
                f'its "{name}" is {v.dtype} {v.shape}, and what was sent {sent.dtype} {sent.shape}'
            )
        if np.issubdtype(v.dtype, np.inexact) and not np.isfinite(v).all():
            raise InputError(f'its "{name}" holds numbers that are not finite: training diverged')
    return {name: arrays[name] for name in like}


def to_arrays(arrays: Arrays) -> ArrayRecord:
    """The arrays as a record."""
    return ArrayRecord({name: Array(np.asarray(v)) for name, v in arrays.items()})


def mean_arrays(many: Sequence[Arrays], weights: NDArray[np.float64]) -> Arrays:
    """sum_i a_i v_i, in float64 in the given order, cast once; for integers the largest value.

    Clients of weight exactly 0 are left out.
    """
    used = [(arrays, a) for arrays, a in zip(many, weights, strict=True) if a > 0]

    def total(name: str) -> NDArray[Any]:
        first = used[0][0][name]
        # Integers are counters, such as BatchNorm's number of batches; their mean has no meaning.
        if not np.issubdtype(first.dtype, np.inexact):
            return np.asarray(np.max(np.stack([arrays[name] for arrays, _ in used]), axis=0))
        out = np.zeros(first.shape, dtype=np.float64)
        for arrays, a in used:
            out += arrays[name].astype(np.float64) * a
        return out.astype(first.dtype)

    return {name: total(name) for name in many[0]}


def mean_metrics(
    contents: Sequence[RecordDict], weights: NDArray[np.float64], but: Collection[str]
) -> dict[str, float | list[float]]:
    """The weighted mean of each metric, except those in `but`, over replies of positive weight."""
    used = weights > 0  # 0 * NaN is NaN
    metrics = [
        {k: v for r in c.metric_records.values() for k, v in r.items()}
        for c, a in zip(contents, used, strict=True)
        if a
    ]
    # Leave out a metric that some replies lack: it has no mean over all of them.
    common = [k for k in metrics[0] if k not in but and all(k in reported for reported in metrics)]
    means: dict[str, float | list[float]] = {}
    for key in common:
        values = [np.asarray(reported[key], dtype=np.float64) for reported in metrics]
        # Lists of different lengths cannot be averaged, and are left out.
        if all(v.shape == values[0].shape for v in values):
            mean = np.tensordot(weights[used], np.stack(values), axes=1)
            means[key] = mean.tolist()
    return means


class LabelTable:
    """Label counts [K] by node; a node's first row stays valid for the whole run.

    given: rows by partition id (a sequence, or a mapping with whole numbers) or by node name; None
    if clients report their own.
    """

    def __init__(
        self,
        classes: int,
        given: Mapping[int | str, Sequence[float]] | Sequence[Sequence[float]] | None,
    ) -> None:
        self.classes = classes
        self.rows: dict[int, Floats] = {}
        self.partitions: dict[int, int] = {}
        self.given: dict[int | str, Floats] | None = None
        if given is not None:
            pairs = given.items() if isinstance(given, Mapping) else enumerate(given)
            self.given = {k: self._row(row, f"label_counts[{k!r}]") for k, row in pairs}

    def learn(self, node: int, name: str | None, content: RecordDict) -> None:
        """Look up a node's row, or take the one that it reports.

        Raises InputError without one, and for a client that has no example.
        """
        metrics = {k: v for record in content.metric_records.values() for k, v in record.items()}
        partition = _whole(metrics[PARTITION]) if PARTITION in metrics else None
        if self.given is None:
            if COUNTS not in metrics:
                raise InputError(
                    f'its reply has no "{COUNTS}"; put the {self.classes} numbers of examples by '
                    "label into the MetricRecord of train replies, or give "
                    "FedPALS(label_counts=...)"
                )
            row = self._row(metrics[COUNTS], f'"{COUNTS}"')
        else:
            key: int | str | None = name if name in self.given else partition
            if key is None:
                raise InputError(
                    f'label_counts has no row of the name "{name or ""}", and its reply has no '
                    f'"{PARTITION}"; put context.node_config["{PARTITION}"] into the MetricRecord '
                    "of train replies"
                )
            if key not in self.given:
                raise InputError(f"label_counts has no row for partition {key}")
            row = self.given[key]
        # The label shares of such a client would be 0 / 0.
        if not row.any():
            raise InputError("it has no examples: all its label counts are 0")
        # Keep the first report for the whole run: with a later one a client could gain weight.
        first = self.rows.setdefault(node, row)
        if partition is not None:
            self.partitions.setdefault(node, partition)
        if not np.array_equal(first, row):
            LOG.warning("node %d reports other label counts than at first; the first stay", node)

    def order(self, node: int) -> tuple[int, int]:
        """A key that sorts nodes by partition, if it is known, so that sums are reproducible."""
        return self.partitions.get(node, -1), node

    def sharing_partitions(self, nodes: Iterable[int]) -> dict[int, str]:
        """Nodes that claim the same partition, with the reason to refuse all of them."""
        claimed = {n: self.partitions[n] for n in nodes if n in self.partitions}
        times = Counter(claimed.values())
        return {
            n: f'{times[i]} nodes have "{PARTITION}" {i}; give each one of its own'
            for n, i in claimed.items()
            if times[i] > 1
        }

    def _row(self, counts: Any, what: str) -> Floats:
        """Label counts [K]. Raises InputError unless they are K counts of 0 or more."""
        try:
            row = numbers(counts)
        except ValueError:
            raise InputError(
                f"{what} = {described(counts)}: must be {self.classes} numbers"
            ) from None
        if row.shape != (self.classes,):
            raise InputError(
                f"{what} has {row.size} numbers, and the target {self.classes} labels; give one "
                "count per label, 0 for labels that a client does not hold"
            )
        if not ((row == 0) | ((row >= LEAST) & (row <= MOST))).all():
            raise InputError(f"{what} = {row.tolist()}: counts are 0 or more, up to {MOST:g}")
        return row


def _whole(value: Any) -> int:
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return int(value)
    raise InputError(f'"{PARTITION}" = {value!r}: must be a whole number')
