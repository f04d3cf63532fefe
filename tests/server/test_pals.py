"""`pals_weights`: closed forms, laws, the search for an ESS, bad input."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from fedshift.server.pals import PalsWeights, effective_sample_size, ess_curve, pals_weights
from support.label_counts import task

COUNTS = np.array([[40, 0, 10], [0, 300, 20], [5, 5, 0], [1000, 900, 100], [0, 0, 7]])
TARGET = np.array([0.2, 0.5, 0.3])


# ---------------------------------------------------------------- closed forms and laws


@pytest.mark.parametrize("lam", [0.0, 1e-6, 0.5, 1.0, 37.0, 1e4])
@pytest.mark.parametrize("delta", [0.0, 0.25, 0.5, 1.0])
def test_two_client_closed_form(lam: float, delta: float) -> None:
    """n = (40, 18), S = [.5 .5 0; .5 0 .5]: a_1 = 1/2 + 11 lam / (360 + 58 lam) for every delta.

    T_delta moves mass delta/2 from the first label to the other two, orthogonally to S_1 - S_2, so
    that only the distance, d^2 = 0.375 delta^2, depends on delta.
    """
    counts = [[20, 20, 0], [9, 0, 9]]
    target = np.array([0.5, 0.25, 0.25]) + delta * np.array([-0.5, 0.25, 0.25])
    solved = pals_weights(counts, target, lam=lam)
    assert solved.weights[0] == pytest.approx(0.5 + 11 * lam / (360 + 58 * lam), abs=1e-12)
    assert solved.distance**2 == pytest.approx(0.375 * delta**2, abs=1e-14)
    assert solved.certified


def test_infinite_lambda_is_fedavg_exactly() -> None:
    solved = pals_weights(COUNTS, TARGET, lam=math.inf)
    n = COUNTS.sum(axis=1)
    np.testing.assert_array_equal(solved.weights, n / n.sum())
    assert solved.ess_fraction == pytest.approx(1.0, abs=1e-15)
    assert (solved.gap, solved.l1_bound, solved.certified) == (pytest.approx(0, abs=1e-18), 0, True)


def test_large_lambda_tends_to_fedavg() -> None:
    n = COUNTS.sum(axis=1)
    solved = pals_weights(COUNTS, TARGET, lam=1e12)
    np.testing.assert_allclose(solved.weights, n / n.sum(), atol=1e-10)
    control = pals_weights(COUNTS, TARGET, lam=1e3)
    assert np.abs(control.weights - n / n.sum()).max() > 1e-3


@pytest.mark.parametrize("lam", [0.0, 1e-9, 1e-3, 1.0, 1e5, 1e12, math.inf])
@pytest.mark.parametrize("fidelity", ["squared", "norm"])
def test_target_equal_to_the_aggregate_gives_fedavg(lam: float, fidelity: str) -> None:
    n = COUNTS.sum(axis=1)
    target = COUNTS.sum(axis=0) / n.sum()
    solved = pals_weights(COUNTS, target, lam=lam, fidelity=fidelity)
    np.testing.assert_allclose(solved.weights, n / n.sum(), atol=1e-11)
    assert solved.distance <= 1e-15
    assert pals_weights(COUNTS, target, ess=1.0, fidelity=fidelity).lam == 0.0


@pytest.mark.parametrize("lam", [0.0, 1e-3, 10.0, 1e4])
def test_equal_rows_share_in_proportion_to_size_and_merging_changes_no_total(lam: float) -> None:
    counts, target = task(1)
    copies = np.vstack([counts, counts[3] * 2, counts[3] * 7])
    group = [3, 30, 31]
    split = pals_weights(copies, target, lam=lam).weights
    merged_counts = counts.copy()
    merged_counts[3] *= 10
    merged = pals_weights(merged_counts, target, lam=lam).weights
    n = copies.sum(axis=1)[group]
    np.testing.assert_allclose(split[group], merged[3] * n / n.sum(), rtol=1e-13)
    np.testing.assert_allclose(np.delete(split, group), np.delete(merged, 3), atol=1e-13)


@pytest.mark.parametrize("cap", [None, 0.08])
@pytest.mark.parametrize("lam", [0.0, 1.0, 1e3])
def test_order_of_clients_and_of_classes_does_not_matter(lam: float, cap: float | None) -> None:
    counts, target = task(2)
    rng = np.random.default_rng(0)
    clients, classes = rng.permutation(len(counts)), rng.permutation(target.size)
    plain = pals_weights(counts, target, lam=lam, cap=cap)
    moved = pals_weights(counts[clients], target, lam=lam, cap=cap)
    np.testing.assert_array_equal(moved.weights, plain.weights[clients])
    renamed = pals_weights(counts[:, classes], target[classes], lam=lam, cap=cap)
    np.testing.assert_allclose(renamed.weights, plain.weights, atol=1e-10)
    np.testing.assert_allclose(renamed.residual, plain.residual[classes], atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("cap", [None, 0.1])
@pytest.mark.parametrize("fidelity", ["squared", "norm"])
def test_ess_and_residual_grow_with_lambda(inside: bool, cap: float | None, fidelity: str) -> None:
    counts, target = task(3, inside=inside)
    grid = [0.0, *np.logspace(-4, 7, 23), math.inf]
    solved = [pals_weights(counts, target, lam=x, cap=cap, fidelity=fidelity) for x in grid]
    assert (np.diff([s.ess for s in solved]) >= -1e-9 * solved[-1].ess).all()
    assert (np.diff([np.linalg.norm(s.residual) for s in solved]) >= -1e-12).all()
    assert len({round(s.distance, 12) for s in solved}) == 1
    assert np.linalg.norm(solved[0].residual) == pytest.approx(solved[0].distance, abs=1e-12)


def test_empty_clients_get_zero_and_change_nothing() -> None:
    counts, target = task(4)
    has_examples = counts.sum(axis=1) > 0
    padded = np.insert(counts, [0, 7], 0, axis=0)
    plain, with_empty = (pals_weights(c, target, lam=5.0) for c in (counts[has_examples], padded))
    empty = padded.sum(axis=1) == 0
    assert (with_empty.weights[empty] == 0.0).all()
    np.testing.assert_array_equal(with_empty.weights[~empty], plain.weights)


def test_result_is_read_only_and_describes_itself() -> None:
    solved = pals_weights(COUNTS, TARGET, lam=3.0)
    n = COUNTS.sum(axis=1)
    shares = COUNTS / n[:, None]
    assert isinstance(solved, PalsWeights)
    with pytest.raises(ValueError, match="read-only"):
        solved.weights[0] = 1.0
    with pytest.raises(dataclasses.FrozenInstanceError):
        solved.lam = 0.0
    np.testing.assert_allclose(solved.residual, TARGET - shares.T @ solved.weights, atol=1e-15)
    assert solved.ess == pytest.approx(1 / np.sum(solved.weights**2 / n), rel=1e-12)
    assert solved.ess == pytest.approx(effective_sample_size(solved.weights, n), rel=1e-12)
    assert solved.ess_fraction == pytest.approx(solved.ess / n.sum(), rel=1e-12)
    assert solved.l1_bound == pytest.approx(math.sqrt(n.sum() * solved.gap / 3.0), rel=1e-12)
    assert pals_weights(COUNTS, TARGET, lam=0).l1_bound == math.inf


def test_a_label_without_a_client_is_reported_not_refused() -> None:
    counts = np.column_stack([COUNTS, np.zeros(5, dtype=int)])
    target = np.append(TARGET * 0.9, 0.1)
    solved = pals_weights(counts, target, lam=1.0)
    assert solved.certified
    assert solved.residual[3] == pytest.approx(0.1)
    assert solved.distance > 0.1 - 1e-12


def test_clients_that_are_all_alike() -> None:
    """Five clients of one row: the problem merges to a single client."""
    counts = np.outer(np.arange(1, 6), [3, 1])
    for lam in (0.0, 1.0):
        solved = pals_weights(counts, [0.5, 0.5], lam=lam)
        np.testing.assert_allclose(solved.weights, np.arange(1, 6) / 15, rtol=1e-14)
        assert solved.certified


def test_single_client() -> None:
    for chosen in ({"lam": 0.0}, {"lam": 2.0}, {"lam": math.inf}, {"ess": 0.3}, {"ess": 1.0}):
        for fidelity in ("squared", "norm"):
            solved = pals_weights([[3, 1]], [0.5, 0.5], **chosen, fidelity=fidelity)
            np.testing.assert_array_equal(solved.weights, [1.0])
            assert solved.certified


def test_effective_sample_size_at_its_ends() -> None:
    n = COUNTS.sum(axis=1)
    assert effective_sample_size(n / n.sum(), n) == pytest.approx(n.sum())
    assert effective_sample_size([0, 1, 0, 0, 0], n) == n[1]
    assert effective_sample_size([0.5, 0.5, 0], [10, 10, 0]) == pytest.approx(20)


# ---------------------------------------------------------------- ESS and cap


@pytest.mark.few(1)
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("cap", [None, 0.1])
@pytest.mark.parametrize("fidelity", ["squared", "norm"])
def test_ess_search_finds_the_smallest_lambda(
    inside: bool, cap: float | None, fidelity: str
) -> None:
    counts, target = task(5, inside=inside)
    options = {"cap": cap, "fidelity": fidelity}
    floor = pals_weights(counts, target, lam=0, **options).ess_fraction
    top = pals_weights(counts, target, lam=math.inf, **options).ess_fraction
    for fraction in (0.5 * floor, floor, *np.linspace(floor, top, 6)[1:-1], top):
        solved = pals_weights(counts, target, ess=fraction, **options)
        assert solved.certified
        if fraction <= floor:
            assert solved.lam == 0.0
        elif fraction == top:
            assert solved.lam == math.inf
        else:
            assert solved.ess_fraction == pytest.approx(fraction, rel=1e-10)
            again = pals_weights(counts, target, lam=solved.lam, **options)
            assert again.ess_fraction == pytest.approx(fraction, rel=1e-8)
            less = pals_weights(counts, target, lam=solved.lam * 0.99, **options)
            assert less.ess_fraction < fraction


def test_ess_curve_is_the_searches_in_the_order_given() -> None:
    fractions = (1.0, 0.2, 0.9, 0.6)
    curve = ess_curve(COUNTS, TARGET, fractions)
    for fraction, point in zip(fractions, curve, strict=True):
        alone = pals_weights(COUNTS, TARGET, ess=fraction)
        np.testing.assert_array_equal(point.weights, alone.weights)
    assert curve[0].lam == math.inf


@pytest.mark.slow
def test_cap_holds_and_binds() -> None:
    for seed in range(10):
        counts, target = task(seed)
        for lam in (0.0, 1e-3, 10.0, 1e4, math.inf):
            solved = pals_weights(counts, target, lam=lam, cap=0.05)
            assert solved.certified
            assert solved.weights.max() == 0.05
            assert abs(solved.weights.sum() - 1) <= 1e-12


def test_cap_that_does_not_bind_changes_nothing() -> None:
    counts, target = task(6)
    free = pals_weights(counts, target, lam=1e3)
    for cap in (1.0, float(free.weights.max()) + 1e-6):
        capped = pals_weights(counts, target, lam=1e3, cap=cap)
        np.testing.assert_allclose(capped.weights, free.weights, atol=1e-10)


def test_cap_with_equal_rows_fills_small_clients_in_proportion_and_large_ones_to_the_cap() -> None:
    """One group of n = 1, 1, 8: a is proportional to n until 8 meets the cap."""
    counts = [[1, 1], [1, 1], [8, 8]]
    solved = pals_weights(counts, [0.5, 0.5], lam=1.0, cap=0.6)
    np.testing.assert_allclose(solved.weights, [0.2, 0.2, 0.6], atol=1e-14)
    uncapped = pals_weights(counts, [0.5, 0.5], lam=1.0)
    np.testing.assert_allclose(uncapped.weights, [0.1, 0.1, 0.8], atol=1e-14)


def test_tightest_cap_leaves_equal_weights() -> None:
    for fidelity in ("squared", "norm"):
        for chosen in ({"lam": 0.0}, {"lam": 3.0}, {"lam": math.inf}, {"ess": 0.01}):
            solved = pals_weights(COUNTS, TARGET, cap=0.2, fidelity=fidelity, **chosen)
            np.testing.assert_allclose(solved.weights, np.full(5, 0.2), rtol=1e-14)
            assert solved.certified


# ---------------------------------------------------------------- input


def test_target_is_rescaled_only_on_request() -> None:
    rescaled = pals_weights(COUNTS, TARGET * 350, lam=1.0, normalise_target=True)
    plain = pals_weights(COUNTS, TARGET, lam=1.0)
    np.testing.assert_allclose(rescaled.weights, plain.weights, atol=1e-14)
    rounded = TARGET.astype(np.float32)
    assert pals_weights(COUNTS, rounded, lam=1.0).certified


def test_counts_that_may_sum_to_one_are_taken() -> None:
    """Controls of the refusal of shares: one example each, and weighted examples."""
    for counts in ([[1, 0], [0, 1]], [[0.3, 0.7], [0.8, 1.2]]):
        assert pals_weights(counts, [0.5, 0.5], lam=1.0).weights.sum() == pytest.approx(1.0)
