"""Divide each client's rows into training and test rows."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fedshift.errors import InputError
from fedshift.seeds import numpy_generator

Rows = NDArray[np.int64]


def hold_out(
    parts: Sequence[Rows], share: float, seed: int
) -> tuple[tuple[Rows, ...], tuple[Rows, ...]]:
    """(training rows, test rows) of each client: floor((1 - share) n) of its n rows, and the rest.

    A client's rows are permuted by a generator of (seed, client), so its division depends on its
    own rows alone. Rows come out ascending. With several labels per client nothing is stratified.

    Source: Wang et al. 2026 (FedDRM), arXiv 2509.23049, Section 4, whose share is 0.3. The authors'
    code computes int(0.7 n) in floats, one row fewer for some n (62 of 90), from one stream for all
    clients.

    Raises InputError for a client that would have nothing to train on or to be tested on.
    """
    pairs = [_divide(part, share, seed, i) for i, part in enumerate(parts)]
    return tuple(train for train, _ in pairs), tuple(test for _, test in pairs)


def hold_out_by_label(
    y: Rows, parts: Sequence[Rows], share: float, seed: int, purpose: str = "validation"
) -> tuple[list[Rows], list[Rows]]:
    """(rows kept, rows held out) of each client: share * count of each label are held out.

    What rounding down leaves is carried to the next client with that label, so that small clients
    together hold out their share too; a client keeps at least one example of each of its labels.
    Rows come out ascending; draws are keyed by (seed, purpose, client).
    """
    kept, holdouts = [], []
    carried: dict[int, float] = {}
    for client, part in enumerate(parts):
        order = numpy_generator(seed, purpose, client).permutation(part)
        labels = y[order]
        is_held_out = np.zeros(len(order), dtype=bool)
        for label in np.unique(labels):
            rows = np.flatnonzero(labels == label)
            owed = carried.get(label, 0.0) + share * len(rows)
            taken = min(math.floor(owed + 1e-9), len(rows) - 1)
            carried[label] = owed - taken
            is_held_out[rows[:taken]] = True
        kept.append(np.sort(order[~is_held_out]))
        holdouts.append(np.sort(order[is_held_out]))
    return kept, holdouts


def _divide(part: Rows, share: float, seed: int, client: int) -> tuple[Rows, Rows]:
    # 1e-9 keeps whole numbers whole: 0.7 * 90 is 62.99999999999999 in floating point.
    training = math.floor((1.0 - share) * len(part) + 1e-9)
    if not 0 < training < len(part):
        raise InputError(
            f"client {client} has {len(part)} examples: a test share of {share} leaves {training} "
            "of them for training; it needs at least one to train and one to test. Use fewer "
            "clients, a larger min_size or another share in (0, 1)"
        )
    # A generator per client: adding a client must not change the division of the others.
    order = numpy_generator(seed, "held out", client).permutation(part)
    return np.sort(order[:training]), np.sort(order[training:])
