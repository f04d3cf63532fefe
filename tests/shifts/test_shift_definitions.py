"""Shifts: each definition recomputed from its own random stream, rounding, and the target."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedshift.errors import InputError
from fedshift.shifts import (
    DirichletPerClass,
    DirichletPerClient,
    Iid,
    QuantitySkew,
    Shards,
    Sparsity,
    check_partition,
    dirichlet_marginal,
    label_counts,
    marginals,
    resample_to,
    sparse_marginal,
)
from fedshift.shifts.base import largest_remainder, round_within
from fedshift.shifts.label import cut, cut_with_capacity, fill
from fedshift.shifts.target import check_marginal
from support.partitions import rng, table

EVEN = np.repeat(np.arange(10), 500)


# --- Iid, QuantitySkew, Shards -------------------------------------------------------------------


def test_iid_sizes_and_marginals() -> None:
    parts = Iid()(EVEN, 10, 7, rng(0))
    assert [p.size for p in parts] == [5000 // 7 + (i < 5000 % 7) for i in range(7)]
    assert abs(marginals(label_counts(EVEN, parts, 10)) - 0.1).max() < 0.05


@pytest.mark.parametrize("least", [0, 20])
@pytest.mark.parametrize("beta", [0.05, 1, 100])
def test_quantity_sizes_follow_q(beta: float, least: int) -> None:
    q = rng(3).dirichlet(np.full(9, beta))
    sizes = np.array([p.size for p in QuantitySkew(beta, least)(EVEN, 10, 9, rng(3))])
    assert (abs(sizes - (least + q * (5000 - 9 * least))) < 1).all()
    assert sizes.sum() == 5000


@pytest.mark.parametrize("s", [1, 2, 5])
def test_shards(s: int) -> None:
    labels = rng(0).permutation(EVEN)
    aligned = table(Shards(s), labels, 10, 1)
    # 10 s shards of 10 equal labels: no border inside a shard.
    assert set(np.unique(aligned % (500 // s))) == {0}
    assert ((aligned > 0).sum(axis=1) <= s).all()
    uneven = table(Shards(s), labels[:4999], 7, 1)
    assert (uneven > 0).sum() <= 7 * s + 10 - 1
    assert uneven.sum() == 4999
    assert np.ptp(uneven.sum(axis=1)) <= s
    shards = table(Shards(1), labels[:4999], 7, 1).sum(axis=1)
    assert sorted(shards) == sorted(4999 // 7 + (j < 4999 % 7) for j in range(7))


# --- Sparsity ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "clients"), [(1, 3), (2, 10), (3, 10), (10, 4)])
def test_sparsity_is_uniform_on_c_labels_and_as_large_as_possible(size: int, clients: int) -> None:
    labels = np.repeat(np.arange(10), np.arange(500, 600, 10))
    supply = np.bincount(labels)
    for seed in range(20):
        counts = table(Sparsity(size), labels, clients, seed)
        assert ((counts > 0).sum(axis=1) == size).all()
        each, holders = counts.max(), (counts > 0).sum(axis=0)
        assert set(np.unique(counts)) <= {0, each}
        present = holders > 0
        assert each == min(supply[present] // holders[present])
        assert (holders * (each + 1) > supply)[present].any()
        np.testing.assert_array_equal(
            np.unique(marginals(counts)), [0, 1 / size][-(1 + (size < 10)) :]
        )


def test_sparsity_draws_every_label_equally_often() -> None:
    counts = table(Sparsity(3), np.repeat(np.arange(10), 50_000), 10_000, 0)
    holders = (counts > 0).sum(axis=0)
    assert (abs(holders - 3000) < 5 * np.sqrt(10_000 * 0.3 * 0.7)).all()


def test_the_target_is_one_more_client() -> None:
    *clients, target = Sparsity(3)(EVEN, 10, 9 + 1, rng(0))
    assert {part.size for part in clients} == {target.size}
    assert np.unique(EVEN[target]).size == 3


# --- DirichletPerClient --------------------------------------------------------------------------


def deviation(shift: DirichletPerClient, labels: np.ndarray, clients: int, seed: int) -> np.ndarray:
    """n_iy - n_i p_iy, with p drawn again from the same stream."""
    p = rng(seed).dirichlet(np.full(10, shift.beta), size=clients)
    counts = table(shift, labels, clients, seed)
    return counts - counts.sum(axis=1, keepdims=True) * p


@pytest.mark.few(5)
@pytest.mark.parametrize("beta", [0.1, 0.2, 1, 100])
@pytest.mark.parametrize("clients", [1, 10, 60])
def test_exact_dirichlet_follows_p_at_the_largest_size(beta: float, clients: int) -> None:
    labels = np.repeat(np.arange(10), np.arange(400, 900, 50))
    supply, shift = np.bincount(labels), DirichletPerClient(beta)
    for seed in range(10):
        sizes = table(shift, labels, clients, seed).sum(axis=1)
        demand = rng(seed).dirichlet(np.full(10, beta), size=clients).sum(axis=0)
        assert set(sizes) == {int(min(supply / demand * (1 + 1e-12)))}
        assert ((sizes[0] + 1) * demand > supply).any()
        assert (abs(deviation(shift, labels, clients, seed)) < 1).all()


@pytest.mark.slow
def test_table_1_split_has_sensible_sizes() -> None:
    labels = np.repeat(np.arange(10), 5000)
    sizes = [DirichletPerClient(0.1)(labels, 10, 10, rng(s))[9].size for s in range(100)]
    assert min(sizes) > 0.2 * 5000
    assert 0.4 * 5000 < np.median(sizes) < 0.6 * 5000


def test_fill_uses_all_data_and_pays_with_the_marginals() -> None:
    shift = DirichletPerClient(0.1, rule="fill")
    assert set(table(shift, EVEN, 7, 0).sum(axis=1)) == {5000 // 7, 5000 // 7 + 1}
    assert abs(deviation(shift, EVEN, 10, 0)).max() > 50
    assert abs(deviation(DirichletPerClient(0.1), EVEN, 10, 0)).max() < 1


def test_fill_is_multinomial_until_a_label_runs_out() -> None:
    p = rng(1).dirichlet(np.ones(4), size=3)
    sizes = np.array([50, 60, 70])
    want = rng(2).multinomial(sizes, p)
    np.testing.assert_array_equal(fill(p, want.sum(axis=0), sizes, rng(2)), want)
    # Both want label 0 alone: 5 requests are met, the other 5 served from what is left, 1:4.
    only = np.array([[1.0, 0, 0], [1.0, 0, 0]])
    counts = fill(only, np.array([5, 1, 4]), np.array([5, 5]), rng(0))
    np.testing.assert_array_equal(counts.sum(axis=0), [5, 1, 4])
    np.testing.assert_array_equal(counts.sum(axis=1), [5, 5])


def test_labels_without_samples_get_no_mass() -> None:
    labels = np.repeat([0, 2, 5], 300)
    p = rng(4).dirichlet(np.full(10, 0.5), size=6)[:, [0, 2, 5]]
    p /= p.sum(axis=1, keepdims=True)
    counts = table(DirichletPerClient(0.5), labels, 6, 4)[:, [0, 2, 5]]
    assert (abs(counts - counts.sum(axis=1, keepdims=True) * p) < 1).all()


# --- DirichletPerClass ---------------------------------------------------------------------------


def yurochkin(q: np.ndarray, supply: np.ndarray, capacity: bool) -> list[list[int]]:
    """The published procedure, one client and one class at a time, on given proportions."""
    clients = q.shape[1]
    counts = [[0] * len(supply) for _ in range(clients)]
    for y, n_y in enumerate(supply):
        full = [capacity and sum(row) >= sum(supply) / clients for row in counts]
        mass = [0.0 if stop else share for share, stop in zip(q[y], full, strict=True)]
        upto = np.cumsum(mass) / np.cumsum(mass)[-1]
        cuts = [0, *(int(np.floor(c * n_y)) for c in upto)]
        for client, (low, high) in enumerate(pairwise(cuts)):
            counts[client][y] = high - low
    return counts


@pytest.mark.parametrize("capacity", [False, True])
@pytest.mark.parametrize("beta", [0.1, 0.5, 10])
def test_per_class_is_the_published_procedure(beta: float, capacity: bool) -> None:
    labels = np.repeat(np.arange(10), np.arange(400, 900, 50))
    for seed in range(10):
        q = rng(seed).dirichlet(np.full(8, beta), size=10)
        counts = table(DirichletPerClass(beta, 0, capacity), labels, 8, seed)
        np.testing.assert_array_equal(counts, yurochkin(q, np.bincount(labels), capacity))
        if not capacity:
            upto = np.cumsum(q, axis=1).T
            assert (abs(np.cumsum(counts, axis=0) - upto * np.bincount(labels)) < 1 + 1e-9).all()


def test_capacity_without_mass_left_shares_equally() -> None:
    q = np.array([[1.0, 0, 0], [1.0, 0, 0]])
    np.testing.assert_array_equal(cut_with_capacity(q, np.array([6, 6])), [[6, 0], [0, 3], [0, 3]])
    # Holding exactly n/M is full.
    np.testing.assert_array_equal(cut_with_capacity(q[:, :2], np.array([6, 6])), [[6, 0], [0, 6]])
    np.testing.assert_array_equal(cut(q, np.array([6, 6])), [[6, 6], [0, 0], [0, 0]])


def test_minimum_size_is_drawn_again_until_reached() -> None:
    first = [table(DirichletPerClass(0.3, 0), EVEN, 10, s).sum(axis=1).min() for s in range(20)]
    again = [table(DirichletPerClass(0.3, 100), EVEN, 10, s).sum(axis=1).min() for s in range(20)]
    assert min(first) < 100 <= min(again)


# --- rounding ------------------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 12), st.integers(1, 8), st.integers(0, 40))
def test_rounding_within_capacity(seed: int, rows: int, columns: int, size: int) -> None:
    quota = size * rng(seed).dirichlet(np.full(columns, 0.5), size=rows)
    capacity = np.ceil(quota.sum(axis=0) - 1e-9).astype(np.int64)
    for counts in (round_within(quota, capacity), largest_remainder(quota)):
        assert (abs(counts - quota) < 1).all()
        assert (counts >= 0).all()
        assert (counts.sum(axis=1) == size).all()
    assert (round_within(quota, capacity).sum(axis=0) <= capacity).all()
    np.testing.assert_array_equal(
        round_within(quota, np.full(columns, 10**6)), largest_remainder(quota)
    )


def test_plain_rounding_would_overfill() -> None:
    quota = np.array([[0.9, 0.1], [0.6, 0.4], [0.6, 0.4], [0.9, 0.1]])
    np.testing.assert_array_equal(largest_remainder(quota).sum(axis=0), [4, 0])
    counts = round_within(quota, np.array([3, 2]))
    np.testing.assert_array_equal(counts.sum(axis=0), [3, 1])
    # The row that gives way is one of the two with the smallest fraction.
    np.testing.assert_array_equal(counts[[0, 3]], [[1, 0], [1, 0]])


# --- target --------------------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 12), st.floats(0.05, 50))
def test_resampling_follows_the_marginal_and_is_maximal(
    seed: int, classes: int, beta: float
) -> None:
    draw = rng(seed)
    supply = draw.integers(1, 200, classes)
    labels = draw.permutation(np.repeat(np.arange(classes), supply))
    marginal = draw.dirichlet(np.full(classes, beta))
    chosen = resample_to(labels, marginal, classes, rng(seed))
    check_partition([chosen], labels.size, 1)
    counts = np.bincount(labels[chosen], minlength=classes)
    assert (abs(counts - chosen.size * marginal) < 1).all()
    assert ((chosen.size + 1) * marginal > supply).any()
    half = resample_to(labels, marginal, classes, rng(seed), size=(chosen.size + 1) // 2)
    assert half.size == (chosen.size + 1) // 2
    with pytest.raises(InputError, match=f"from 1 to {chosen.size}. Label "):
        resample_to(labels, marginal, classes, rng(seed), size=chosen.size + 1)
    resampled = resample_to(labels, supply / supply.sum(), classes, rng(seed))
    np.testing.assert_array_equal(resampled, np.arange(labels.size))


def test_resampling_draws_at_random_and_only_labels_with_mass() -> None:
    labels = np.repeat(np.arange(3), 100)
    first = resample_to(labels, [0.5, 0, 0.5], 3, rng(0), size=20)
    assert np.bincount(labels[first], minlength=3).tolist() == [10, 0, 10]
    assert not np.array_equal(first, resample_to(labels, [0.5, 0, 0.5], 3, rng(1), size=20))


def test_a_marginal_within_tolerance_is_made_to_sum_to_one() -> None:
    assert check_marginal([0.5000004, 0.5000004], 2).tolist() == [0.5, 0.5]


def test_target_marginals() -> None:
    sparse = sparse_marginal(10, 3, rng(0))
    assert sorted(sparse) == [0] * 7 + [1 / 3] * 3
    np.testing.assert_array_equal(
        dirichlet_marginal(10, 0.1, rng(0)), rng(0).dirichlet(np.full(10, 0.1))
    )


def test_label_counts_and_marginals() -> None:
    labels = np.array([0, 1, 1, 2, 2, 2])
    parts = [np.array([0, 1]), np.array([], np.int64), np.array([2, 4, 5])]
    counts = label_counts(labels, parts, 4)
    assert counts.dtype == np.int64
    assert counts.tolist() == [[1, 1, 0, 0], [0, 0, 0, 0], [0, 1, 2, 0]]
    assert marginals(counts)[1].tolist() == [0, 0, 0, 0]
    np.testing.assert_array_equal(marginals(counts)[2], [0, 1 / 3, 2 / 3, 0])
    assert label_counts(labels, [], 4).shape == (0, 4)
