"""Divide each client's rows into training and test rows."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fedshift.arguments import called, check_number
from fedshift.errors import InputError
from fedshift.seeds import numpy_generator

Rows = NDArray[np.int64]


def hold_out(
    parts: Sequence[Rows], share: float, seed: int
) -> tuple[tuple[Rows, ...], tuple[Rows, ...]]:
    """(training rows, test rows) of each client: floor((1 - share) n) of its n rows, and the rest.

    A client's rows are permuted by a generator of (seed, client), so its division depends on its
    own rows alone. Rows are returned in ascending order. Labels are not stratified.

    Source: Wang et al. 2026 (FedDRM), arXiv 2509.23049, Section 4, where the share is 0.3. The
    authors' code computes int(0.7 n) in floats, which for some n is one row fewer (62 of 90), and
    draws from one stream for all clients.

    Raises InputError for rows that are not numbers of rows, or are given twice, a share that is not
    between 0 and 1, and a client that would have no training or no test row.
    """
    check_number("share", share)
    if not 0.0 <= share <= 1.0:
        raise InputError(f"share must be between 0 and 1, as 0.3 for 30 %, got {share}")
    for client, part in enumerate(parts):
        _check_rows(part, client)
    pairs = [_divide(part, share, seed, i) for i, part in enumerate(parts)]
    return tuple(train for train, _ in pairs), tuple(test for _, test in pairs)


def hold_out_by_label(
    y: Rows, parts: Sequence[Rows], share: float, seed: int, purpose: str = "validation"
) -> tuple[list[Rows], list[Rows]]:
    """(rows kept, rows held out) of each client: share * count of each label are held out.

    The fraction that rounding down leaves is carried to the next client with that label, so that
    many small clients together hold out their share. A client keeps at least one example of each of
    its labels. Rows are in ascending order; draws are keyed by (seed, purpose, client).
    """
    labels = max((int(y[part].max()) for part in parts if len(part)), default=-1) + 1
    counts = np.stack([np.bincount(y[part], minlength=labels) for part in parts])
    pairs = [
        hold_out_counts(y, part, taken, seed, purpose, client)
        for client, (part, taken) in enumerate(
            zip(parts, held_out_counts(counts, share), strict=True)
        )
    ]
    return [kept for kept, _ in pairs], [held_out for _, held_out in pairs]


def held_out_counts(counts: Rows, share: float) -> Rows:
    """How many examples of each label [M, K] are held out, from the clients' counts [M, K].

    >>> import numpy as np
    >>> from fedshift.holdout import held_out_counts
    >>> held_out_counts(np.array([[7, 1], [4, 9]]), 0.2).tolist()
    [[1, 0], [1, 2]]
    """
    taken, carried = np.zeros_like(counts), np.zeros(counts.shape[1])
    for row, out in zip(counts, taken, strict=True):
        # Due to be held out so far, less what was; 1e-9 as in `_divide`.
        owed = carried + share * row
        out[:] = np.where(row > 0, np.minimum(np.floor(owed + 1e-9), row - 1), 0)
        carried = np.where(row > 0, owed - out, carried)
    return taken


def hold_out_counts(
    y: Rows, part: Rows, taken: Rows, seed: int, purpose: str, client: int
) -> tuple[Rows, Rows]:
    """(rows kept, rows held out) of one client's rows `part`: hold out taken [K] of each label."""
    order = numpy_generator(seed, purpose, client).permutation(part)
    labels, is_held_out = y[order], np.zeros(len(order), dtype=bool)
    for label in np.flatnonzero(taken):
        is_held_out[np.flatnonzero(labels == label)[: taken[label]]] = True
    return np.sort(order[~is_held_out]), np.sort(order[is_held_out])


def _check_rows(part: Rows, client: int) -> None:
    rows = np.asarray(part)
    if rows.ndim != 1 or (len(rows) and rows.dtype.kind not in "iu"):
        raise InputError(
            f"the rows of client {client} are {called(part)} of {rows.dtype} {rows.shape}; give a "
            "list of row numbers for each client"
        )
    numbers, counts = np.unique(rows, return_counts=True)
    if (counts > 1).any():  # one of the two could train, and the other test
        raise InputError(
            f"client {client} has row {numbers[counts > 1][0]} more than once; give each row once"
        )


def _divide(part: Rows, share: float, seed: int, client: int) -> tuple[Rows, Rows]:
    # 1e-9, because in floating point 0.7 * 90 is 62.99999999999999, and its floor must be 63.
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
