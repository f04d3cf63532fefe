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

    like: the model that was sent. Raises InputError for other names, shapes or types than its, for
    numbers that are not finite, and for arrays that are not NumPy's.
    """
    try:
        found = {name: _read(array) for name, array in record.items()}
    except Exception as e:
        # Bytes from elsewhere: whatever they make NumPy raise is the reason.
        raise InputError(f"its arrays cannot be read: {str(e) or type(e).__name__}") from None
    if like is None:
        return found
    if found.keys() != like.keys():
        odd = sorted(found.keys() ^ like.keys())
        raise InputError(f"its model has other arrays than the one that was sent: {odd[:5]}")
    for name, sent in like.items():
        v = found[name]
        if v.shape != sent.shape or v.dtype != sent.dtype:
            raise InputError(
                f'its "{name}" is {v.dtype} {v.shape}, and what was sent {sent.dtype} {sent.shape}'
            )
        if np.issubdtype(v.dtype, np.inexact) and not np.isfinite(v).all():
            raise InputError(f'its "{name}" holds numbers that are not finite: training diverged')
    return {name: found[name] for name in like}


def _read(array: Array) -> NDArray[Any]:
    found = array.numpy()
    if not isinstance(found, np.ndarray):  # what NumPy makes of a zip file
        raise TypeError("an archive in the place of an array")
    return found


def to_arrays(arrays: Arrays) -> ArrayRecord:
    """The arrays as a record."""
    return ArrayRecord({name: Array(np.asarray(v)) for name, v in arrays.items()})


def mean_arrays(many: Sequence[Arrays], weights: NDArray[np.float64]) -> Arrays:
    """sum_i a_i v_i, in float64 in the given order, cast once; of integers, the largest.

    Clients of weight exactly 0 are left out.
    """
    used = [(one, a) for one, a in zip(many, weights, strict=True) if a > 0]

    def total(name: str) -> NDArray[Any]:
        first = used[0][0][name]
        if not np.issubdtype(first.dtype, np.inexact):
            return np.asarray(np.max(np.stack([one[name] for one, _ in used]), axis=0))
        out = np.zeros(first.shape, dtype=np.float64)
        for one, a in used:
            out += one[name].astype(np.float64) * a
        return out.astype(first.dtype)

    return {name: total(name) for name in many[0]}


def mean_metrics(
    contents: Sequence[RecordDict], weights: NDArray[np.float64], but: Collection[str]
) -> dict[str, float | list[float]]:
    """Metrics that all replies of weight have, averaged by it; those in `but` are left out."""
    used = weights > 0  # 0 * NaN is NaN
    told = [
        {k: v for r in c.metric_records.values() for k, v in r.items()}
        for c, a in zip(contents, used, strict=True)
        if a
    ]
    common = [k for k in told[0] if k not in but and all(k in one for one in told)]
    found: dict[str, float | list[float]] = {}
    for key in common:
        values = [np.asarray(one[key], dtype=np.float64) for one in told]
        if all(v.shape == values[0].shape for v in values):
            mean = np.tensordot(weights[used], np.stack(values), axes=1)
            found[key] = mean.tolist()
    return found
