"""The unsquared form of the FedPALS weights, behind the paper's printed lambda grid for PACS."""

from __future__ import annotations

import numpy as np
import pytest

from fedshift.server.pals import pals_weights
from support.label_counts import task
from support.other_solvers import conic


@pytest.mark.parametrize("inside", [False, True])
def test_norm_form_is_the_squared_form_at_twice_the_residual(inside: bool) -> None:
    counts, target = task(7, inside=inside)
    for lam in (1e-3, 1.0, 12.0, 42.0, 93.0, 1e4):
        norm = pals_weights(counts, target, lam=lam, fidelity="norm")
        assert norm.certified
        r = float(np.linalg.norm(norm.residual))
        squared = pals_weights(counts, target, lam=2 * r * lam if r > 1e-12 else 0.0)
        np.testing.assert_allclose(norm.weights, squared.weights, atol=1e-8)


def norm_objective(counts: np.ndarray, target: np.ndarray, lam: float, a: np.ndarray) -> float:
    n = counts.sum(axis=1)
    return float(np.linalg.norm(target - a @ (counts / n[:, None])) + lam * np.sum(a**2 / n))


@pytest.mark.few(1)
@pytest.mark.parametrize("inside", [False, True])
def test_norm_form_agrees_with_a_cone_solver(inside: bool) -> None:
    for seed in range(5):
        counts, target = task(10 + seed, inside=inside)
        counts = counts[counts.sum(axis=1) > 0]
        for lam in (5.0, 100.0, 1e4):
            solved = pals_weights(counts, target, lam=lam, fidelity="norm")
            assert solved.certified
            n = counts.sum(axis=1)
            ours, theirs = solved.weights, conic(counts / n[:, None], target, lam / n, norm=True)
            excess = norm_objective(counts, target, lam, theirs)
            excess -= norm_objective(counts, target, lam, ours)
            assert -1e-12 <= excess <= 1e-6
            # Strong convexity: how far the other answer's excess lets the two be apart.
            assert (
                np.abs(ours - theirs).sum() <= np.sqrt(counts.sum() * max(excess, 0) / lam) + 1e-6
            )


def test_norm_is_an_exact_penalty_inside_the_hull() -> None:
    """For small lam the residual is zero, not just small, and the max-ESS weights are optimal."""
    counts, target = task(8, inside=True)
    limit = pals_weights(counts, target, lam=0.0)
    small = pals_weights(counts, target, lam=1e-4, fidelity="norm")
    assert small.certified
    assert np.linalg.norm(small.residual) <= 1e-14
    np.testing.assert_array_equal(small.weights, limit.weights)
    squared = pals_weights(counts, target, lam=1e-4)
    assert np.linalg.norm(squared.residual) > 1e-12
    large = pals_weights(counts, target, lam=1e4, fidelity="norm")
    assert np.linalg.norm(large.residual) > 1e-3


def test_norm_ess_gives_the_same_weights_as_squared_at_another_lambda() -> None:
    counts, target = task(9)
    norm, squared = (pals_weights(counts, target, ess=0.5, fidelity=f) for f in ("norm", "squared"))
    np.testing.assert_allclose(norm.weights, squared.weights, atol=1e-10)
    r = np.linalg.norm(squared.residual)
    assert norm.lam == pytest.approx(squared.lam / (2 * r), rel=1e-9)
