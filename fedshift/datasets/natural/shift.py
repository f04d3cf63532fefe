"""The distance of clients' label shares from those of all rows, and how much of it is chance."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedshift.errors import InputError
from fedshift.real import described, numbers
from fedshift.seeds import numpy_generator

DRAWS = 200


class LabelShift(NamedTuple):
    """Total variation TV_i = sum_k |s_ik - s_k| / 2 between shares of client i and of all rows.

    mean    over clients, each weighing the same
    most    of the client that is furthest away
    chance  mean TV of tables without shift: each client's labels drawn from the shares of all rows
    """

    mean: float
    most: float
    chance: float


def label_shift(counts: ArrayLike, draws: int = DRAWS, seed: int = 0) -> LabelShift:
    """The shift of counts [clients, classes]; chance is the mean of `draws` tables.

    Raises InputError for other than whole numbers, or a client without rows.

    >>> from fedshift.datasets.natural.shift import label_shift
    >>> label_shift([[50, 50], [100, 0]])
    LabelShift(mean=0.25, most=0.25, chance=0.02...)
    """
    table = _checked(counts)
    source = numpy_generator(seed, "label-shift")
    shares = table.sum(0) / table.sum()
    without = source.multinomial(table.sum(1), shares, size=(draws, len(table)))
    distances = _variation(table)
    return LabelShift(
        float(distances.mean()), float(distances.max()), float(_variation(without).mean())
    )


def _checked(counts: ArrayLike) -> NDArray[np.int64]:
    try:
        given = numbers(counts)
    except ValueError as error:
        raise InputError(f"counts: {error}") from error
    whole = np.isfinite(given) & (given >= 0) & (given == np.floor(given))
    if given.ndim != 2 or not whole.all():
        raise InputError(
            f"counts must be whole numbers, 0 or more: [clients, classes]; got {described(counts)}"
        )
    if empty := np.flatnonzero(given.sum(1) == 0).tolist():
        raise InputError(f"client {empty[0]} of counts has no rows; leave it out")
    return given.astype(np.int64)


def _variation(tables: NDArray[np.int64]) -> NDArray[np.float64]:
    """TV of every client: [..., clients, classes] to [..., clients]."""
    shares = tables / tables.sum(-1, keepdims=True)
    pooled = tables.sum(-2, keepdims=True) / tables.sum((-2, -1), keepdims=True)
    return np.asarray(np.abs(shares - pooled).sum(-1) / 2)
