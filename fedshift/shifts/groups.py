"""Clients made of whole groups of samples, such as all the images of a camera."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from fedshift.errors import InputError
from fedshift.shifts.base import Ints, Partition, check_count


def whole_groups(groups: ArrayLike, clients: int) -> Partition:
    """Each group goes whole to the client that is smallest so far, the largest group first.

    `groups` [n] numbers each sample's group, from 0; the result is M index arrays, ascending,
    without overlap, which hold every sample. Nothing is random. Of groups equally large the higher
    number goes first, of clients equally small the lower number gets it (chosen: the source sorts
    with numpy's unstable argsort).

    Source: NonIIDSplitter with heterogeneity 0 and more groups than clients, Bai et al. 2024,
    "Benchmarking algorithms for federated domain generalization", and the FedPALS authors' copy of
    it; there, samples of a client come in random order, which a training run draws anyway.

    Raises InputError for group numbers that are not whole and >= 0, or fewer groups than clients.
    """
    array, sizes = _checked(groups, clients)
    owner, totals = np.full(len(sizes), -1), np.zeros(clients, np.int64)
    # Largest first: the small ones then level out what the large ones left uneven.
    for group in np.argsort(sizes, kind="stable")[::-1][: np.count_nonzero(sizes)]:
        owner[group] = totals.argmin()
        totals[owner[group]] += sizes[group]
    return _rows(owner[array], clients)


def group_shares(groups: ArrayLike, clients: int, rng: np.random.Generator) -> Partition:
    """Each client gets as many whole groups as the others, drawn at random, or one more.

    `groups` [n] numbers each sample's group, from 0; the result is M index arrays, ascending,
    without overlap, which hold every sample. Of W groups that occur, in random order, the first
    W mod M clients get floor(W / M) + 1 and the others floor(W / M). The clients' sizes
    follow from the groups: with writers of some 100 samples each they are nearly equal.

    Source: the MADE/MOON report, whose 30 clients have N_w / 30 of the N_w writers each.

    Raises InputError as `whole_groups`.
    """
    array, sizes = _checked(groups, clients)
    order = rng.permutation(np.flatnonzero(sizes))
    owner = np.full(len(sizes), -1)
    for client, share in enumerate(np.array_split(order, clients)):
        owner[share] = client
    return _rows(owner[array], clients)


def _rows(owner: Ints, clients: int) -> Partition:
    return tuple(np.flatnonzero(owner == client) for client in range(clients))


def _checked(groups: ArrayLike, clients: int) -> tuple[Ints, Ints]:
    """(group of each sample, samples of each group)."""
    array = np.asarray(groups)
    check_count("clients", clients, 1)
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer) or (array < 0).any():
        raise InputError(
            f"groups of type {array.dtype} and shape {array.shape}; allowed: one whole number >= 0 "
            "for each sample"
        )
    sizes: Ints = np.bincount(array).astype(np.int64)
    # Numbers may have gaps: only groups that occur can be given to a client.
    filled = np.count_nonzero(sizes)
    if filled < clients:
        raise InputError(
            f"clients={clients}, but there are {filled} groups, and groups stay whole; "
            f"ask for at most {filled} clients."
        )
    return array, sizes
