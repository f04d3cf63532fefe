"""The 70/30 division, and the partitions of the FedDRM paper made from the library's shifts."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from fedshift.datasets import cifar100
from fedshift.errors import InputError
from fedshift.holdout import hold_out
from fedshift.shifts import (
    DirichletPerClass,
    Shards,
    check_partition,
    label_counts,
)
from support.partitions import rng

# Training and test images together, as the paper deals them.
CIFAR_10 = np.repeat(np.arange(10), 6000)
CIFAR_100 = np.repeat(np.arange(100), 600)


# ------------------------------------------------------------------------------------------ 70/30


def test_seven_tenths_rounded_down_are_for_training() -> None:
    sizes = (2, 3, 9, 10, 11, 90, 170, 1001)
    ends = np.cumsum((0, *sizes))
    parts = [np.arange(a, b) for a, b in pairwise(ends)]
    train, test = hold_out(parts, 0.3, 0)
    assert [len(t) for t in train] == [1, 2, 6, 7, 7, 63, 119, 700]
    # Control: floating point says otherwise.
    assert (int(0.7 * 90), int(0.7 * 170)) == (62, 118)
    check_partition([*train, *test], int(ends[-1]), 2 * len(sizes), whole=True)
    for part, a, b in zip(parts, train, test, strict=True):
        assert np.array_equal(np.union1d(a, b), part)


def test_a_client_is_divided_by_its_own_rows_and_the_seed() -> None:
    parts = [np.arange(100), np.arange(100, 300)]
    (first, second), _ = hold_out(parts, 0.3, 1)
    assert np.array_equal(hold_out(parts, 0.3, 1)[0][1], second)
    assert np.array_equal(hold_out([parts[0], np.arange(900, 950)], 0.3, 1)[0][0], first)
    assert not np.array_equal(hold_out(parts, 0.3, 2)[0][0], first)
    # Clients draw apart from each other: equal rows would be divided differently.
    again = hold_out([parts[0], parts[0]], 0.3, 1)[0]
    assert not np.array_equal(again[0], again[1])


def test_every_row_is_as_likely_to_train() -> None:
    times = np.zeros(10)
    for seed in range(2000):
        times[hold_out([np.arange(10)], 0.3, seed)[0][0]] += 1
    assert (abs(times - 1400) < 5 * np.sqrt(2000 * 0.7 * 0.3)).all()


def test_a_client_too_small_to_divide() -> None:
    with pytest.raises(
        InputError, match="client 1 has 1 examples: a test share of 0.3 leaves 0 of them"
    ):
        hold_out([np.arange(5), np.array([7])], 0.3, 0)


# ------------------------------------------------------------------------------------- partitions


def fedlab(labels: np.ndarray, classes: int, clients: int, beta: float, seed: int) -> np.ndarray:
    """The cited procedure, one class at a time, on the proportions that our shift draws.

    The last cumulated proportion is made exactly 1: theirs may round below, and then the last
    client gets a sample although it is full.
    """
    generator = rng(seed)
    while True:
        piles: list[list[int]] = [[] for _ in range(clients)]
        for y, q in enumerate(generator.dirichlet(np.full(clients, beta), size=classes)):
            rows = np.flatnonzero(labels == y)
            room = [len(h) < len(labels) / clients for h in piles]
            q = q * room
            upto = np.cumsum(q)
            cuts = (upto / upto[-1] * len(rows)).astype(int)[:-1]
            for h, more in zip(piles, np.split(rows, cuts), strict=True):
                h.extend(more)
        if min(map(len, piles)) >= classes:
            return np.array([np.bincount(labels[h], minlength=classes) for h in piles])


@pytest.mark.few(4)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("labels", "classes", "clients"), [(CIFAR_10, 10, 8), (CIFAR_100, 100, 8), (CIFAR_10, 10, 32)]
)
def test_dir_03_is_the_cited_procedure(
    labels: np.ndarray, classes: int, clients: int, seed: int
) -> None:
    shift = DirichletPerClass(0.3, min_size=classes, capacity=True)
    parts = shift(labels, classes, clients, rng(seed))
    check_partition(parts, 60_000, clients, whole=True, min_size=classes)
    counts = label_counts(labels, parts, classes)
    assert np.array_equal(counts, fedlab(labels, classes, clients, 0.3, seed))
    # Control: without the capacity it is another partition.
    free = DirichletPerClass(0.3, min_size=classes)(labels, classes, clients, rng(seed))
    assert not np.array_equal(counts, label_counts(labels, free, classes))


@pytest.mark.parametrize(
    ("labels", "classes", "per_client", "shard"),
    [(CIFAR_10, 10, 5, 1500), (CIFAR_100, 100, 25, 300)],
)
def test_s_spc_gives_equal_clients_of_whole_shards(
    labels: np.ndarray, classes: int, per_client: int, shard: int
) -> None:
    parts = Shards(per_client)(labels, classes, 8, rng(3))
    counts = label_counts(labels, parts, classes)
    assert (counts.sum(axis=1) == 7500).all()
    assert (counts % shard == 0).all()
    assert (counts.sum(axis=0) == len(labels) // classes).all()
    assert ((counts > 0).sum(axis=1) <= per_client).all()
    assert all(len(train) == 5250 for train in hold_out(parts, 0.3, 0)[0])


def test_cifar_20_is_dealt_by_fine_labels() -> None:
    """25 fine labels restrict a client a lot, and hardly at all on the level of the 20 groups."""
    parts = Shards(25)(CIFAR_100, 100, 8, rng(0))
    groups = cifar100.coarse(torch.from_numpy(CIFAR_100)).numpy()
    fine = (label_counts(CIFAR_100, parts, 100) > 0).sum(axis=1)
    coarse = (label_counts(groups, parts, 20) > 0).sum(axis=1)
    assert fine.max() <= 25
    assert coarse.min() >= 12
    # Control: shards of the groups themselves do restrict.
    direct = Shards(5)(groups, 20, 8, rng(0))
    assert (label_counts(groups, direct, 20) > 0).sum(axis=1).max() <= 5
