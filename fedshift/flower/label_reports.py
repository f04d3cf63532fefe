"""The label counts of Flower nodes: given to the server, or reported with the first reply."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from flwr.app import RecordDict
from numpy.typing import NDArray

from fedshift.errors import InputError
from fedshift.real import described, numbers

LOG = logging.getLogger("fedshift.flower")
Floats = NDArray[np.float64]
COUNTS, PARTITION = "label-counts", "partition-id"
# Counts may be fractions (noise for privacy); beyond these limits sums and quotients overflow.
LEAST, MOST = 1e-9, 1e15


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
        by_reply = self.given is None
        row = self._row_from_reply(metrics) if by_reply else self._row_from_table(name, metrics)
        # The label shares of such a client would be 0 / 0.
        if not row.any():
            raise InputError("it has no examples: all its label counts are 0")
        # Keep the first report for the whole run: with a later one a client could gain weight.
        first = self.rows.setdefault(node, row)
        if PARTITION in metrics:
            self.partitions.setdefault(node, _whole(metrics[PARTITION]))
        if not np.array_equal(first, row):
            LOG.warning("node %d reports other label counts than at first; the first stay", node)

    def order(self, node: int) -> tuple[int, int]:
        """A key that sorts nodes by partition, if it is known, so that sums are reproducible."""
        return self.partitions.get(node, -1), node

    def sharing_partitions(self, nodes: Iterable[int]) -> dict[int, str]:
        """Nodes that claim the same partition, with the reason to refuse all of them."""
        by_partition: dict[int, list[int]] = {}
        for node in nodes:
            if node in self.partitions:
                by_partition.setdefault(self.partitions[node], []).append(node)
        return {
            node: f'{len(sharing)} nodes have "{PARTITION}" {client}; give each one of its own'
            for client, sharing in by_partition.items()
            if len(sharing) > 1
            for node in sharing
        }

    def _row_from_reply(self, metrics: Mapping[str, Any]) -> Floats:
        """The label counts that a client reports with its reply."""
        if COUNTS not in metrics:
            raise InputError(
                f'its reply has no "{COUNTS}"; put the {self.classes} numbers of examples by label '
                "into the MetricRecord of train replies, or give FedPALS(label_counts=...)"
            )
        return self._row(metrics[COUNTS], f'"{COUNTS}"')

    def _row_from_table(self, name: str | None, metrics: Mapping[str, Any]) -> Floats:
        """The label counts that were given to the server, by the node's name or its partition."""
        assert self.given is not None
        if name is not None and name in self.given:
            return self.given[name]
        if PARTITION not in metrics:
            raise InputError(
                f'label_counts has no row of the name "{name or ""}", and its reply has no '
                f'"{PARTITION}"; put context.node_config["{PARTITION}"] into the MetricRecord of '
                "train replies"
            )
        client = _whole(metrics[PARTITION])
        if client not in self.given:
            raise InputError(f"label_counts has no row for partition {client}")
        return self.given[client]

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
