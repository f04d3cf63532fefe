"""Weighted means of array records of any framework, on NumPy."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, RecordDict
from numpy.typing import NDArray

from fedshift.errors import InputError

Arrays = dict[str, NDArray[Any]]


def arrays_of(record: ArrayRecord, like: Mapping[str, NDArray[Any]] | None = None) -> Arrays:
    """The arrays of a record.

    like: the model that was sent. Raises InputError if names, shapes or types differ from it, for
    numbers that are not finite, and for arrays that are not NumPy's.
    """
    try:
        arrays = {name: _read(array) for name, array in record.items()}
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


def _read(array: Array) -> NDArray[Any]:
    values = array.numpy()
    if not isinstance(values, np.ndarray):  # np.load turns a zip file into an archive object
        raise TypeError("an archive in the place of an array")
    return values


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
