"""`pals_weights` with costs and rows that are embeddings: laws, and another solver."""

from __future__ import annotations

import numpy as np
import pytest

from fedshift.server.pals import pals_weights
from support.other_solvers import conic

COUNTS = np.array([[90, 10, 0], [20, 70, 10], [5, 5, 290], [40, 40, 40]])
TARGET = np.array([0.3, 0.3, 0.4])
SIZES = COUNTS.sum(axis=1).astype(float)


def draw(seed: int) -> dict:
    """A random programme: shares or embeddings of some scale, with any of cost and cap."""
    rng = np.random.default_rng(seed)
    clients, width = int(rng.integers(2, 30)), int(rng.integers(2, 12))
    sizes = np.maximum(1.0, (10 ** rng.uniform(0, 4, clients)).round())
    if rng.random() < 0.5:
        rows = rng.dirichlet(np.full(width, 0.3), size=clients)
        target = rng.dirichlet(np.full(width, 0.5))
    else:
        rows = rng.normal(size=(clients, width)) * 10 ** rng.uniform(-2, 2)
        target = rng.normal(size=width) * np.abs(rows).max()
    scale = float(np.abs(rows).max() ** 2)
    costed = rng.random() < 0.6
    return {
        "n": sizes,
        "T": target,
        "rows": rows,
        "lam": 0.0 if costed and rng.random() < 0.5 else float(10 ** rng.uniform(-3, 4)) * scale,
        "cost": 10 ** rng.uniform(-5, 1, clients) * scale if costed else None,
        "cap": min(1.0, float(rng.uniform(1.1, 4)) / clients) if rng.random() < 0.4 else None,
    }


@pytest.mark.parametrize("seed", range(40))
def test_random_programmes_are_solved_as_by_another_solver(seed: int) -> None:
    given = draw(seed)
    sizes, target, rows = given.pop("n"), given.pop("T"), given["rows"]
    solved = pals_weights(sizes, target, **given)
    cost = given["lam"] / sizes + (0.0 if given["cost"] is None else given["cost"])
    other = conic(rows, target, cost, given["cap"])

    def f(a: np.ndarray) -> float:
        return float(np.sum((target - rows.T @ a) ** 2) + cost @ a**2)

    assert f(solved.weights) <= f(other) + 1e-11 * max(1.0, abs(f(other)))
    # Both values are within the other solver's tolerance, and f is strongly convex.
    apart = np.sum(cost * (solved.weights - other) ** 2)
    assert apart <= abs(f(other) - f(solved.weights)) + 1e-9 * abs(f(other))
    assert solved.certified
    assert solved.gap <= 1e-9 * max(1.0, abs(f(other)))
    np.testing.assert_allclose(
        solved.residual,
        target - rows.T @ solved.weights,
        atol=1e-9 * cost.size * np.abs(rows).max(),
    )
    assert solved.ess == pytest.approx(1.0 / np.sum(solved.weights**2 / sizes))


@pytest.mark.parametrize("lam", [0.3, 7.0, 1e3])
@pytest.mark.parametrize("cap", [None, 0.4])
def test_cost_lam_over_n_is_that_lam(lam: float, cap: float | None) -> None:
    plain = pals_weights(COUNTS, TARGET, lam=lam, cap=cap)
    costed = pals_weights(COUNTS, TARGET, cost=lam / SIZES, cap=cap)
    np.testing.assert_allclose(costed.weights, plain.weights, atol=1e-12)
    assert costed.certified
    other = pals_weights(COUNTS, TARGET, cost=np.sqrt(lam / SIZES), cap=cap)
    assert np.abs(other.weights - plain.weights).max() > 1e-6  # the control


def test_any_cost_is_a_size_of_one_over_it_at_lam_1() -> None:
    cost = np.array([1e-3, 0.2, 0.01, 3.0])
    shares = COUNTS / SIZES[:, None]
    sized = pals_weights(shares / cost[:, None], TARGET, lam=1.0)
    solved = pals_weights(COUNTS, TARGET, cost=cost)
    np.testing.assert_allclose(solved.weights, sized.weights, atol=1e-13)
    assert solved.certified
    assert solved.ess == pytest.approx(1 / np.sum(solved.weights**2 / SIZES))


def test_cost_adds_to_lam() -> None:
    both = pals_weights(COUNTS, TARGET, lam=3.0, cost=5.0 / SIZES)
    np.testing.assert_allclose(both.weights, pals_weights(COUNTS, TARGET, lam=8.0).weights)
    assert both.lam == 3.0


@pytest.mark.parametrize("more", [{"cost": [0.01, 0.02, 0.03, 0.04]}, {"cap": 0.6}])
@pytest.mark.parametrize("ess", [0.7, 0.95, 1.0])
def test_ess_is_reached_by_the_smallest_lam(more: dict, ess: float) -> None:
    solved = pals_weights(COUNTS, TARGET, ess=ess, **more)
    assert solved.ess_fraction == pytest.approx(ess, rel=1e-9) or solved.lam == 0.0
    assert solved.ess_fraction >= ess * (1 - 1e-9)
    if 0.0 < solved.lam < np.inf:
        again = pals_weights(COUNTS, TARGET, lam=solved.lam, **more)
        np.testing.assert_allclose(again.weights, solved.weights, atol=1e-9)
        less = pals_weights(COUNTS, TARGET, lam=0.9 * solved.lam, **more)
        assert less.ess_fraction < ess
    np.testing.assert_allclose(
        pals_weights(COUNTS, TARGET, lam=np.inf, **more).weights, SIZES / SIZES.sum()
    )


def test_an_ess_below_that_of_the_costs_alone_says_so() -> None:
    solved = pals_weights(COUNTS, TARGET, ess=0.1, cost=[0.5, 0.5, 0.5, 0.5])
    assert solved.lam == 0.0
    assert solved.note.startswith("ess=0.1 changes nothing")


@pytest.mark.parametrize("setting", [{"lam": 0.0}, {"lam": 5.0}, {"ess": 0.8}, {"lam": np.inf}])
@pytest.mark.parametrize("scale", [1.0, 2.0**20, 2.0**-20])
def test_rows_of_shares_equal_counts(setting: dict, scale: float) -> None:
    plain = pals_weights(COUNTS, TARGET, **setting)
    rows, target = scale * COUNTS / SIZES[:, None], scale * TARGET
    if setting.get("lam") == 5.0:
        setting = {"lam": 5.0 * scale**2}
    solved = pals_weights(SIZES, target, rows=rows, **setting)
    np.testing.assert_allclose(solved.weights, plain.weights, atol=1e-12)
    assert solved.certified
    assert solved.ess == pytest.approx(plain.ess)
    assert solved.distance == pytest.approx(scale * plain.distance, abs=1e-12 * scale)
    assert solved.lam == pytest.approx(plain.lam * scale**2)


def test_rows_that_cancel_reach_a_target_of_zero() -> None:
    solved = pals_weights([10, 30], [0.0, 0.0], rows=[[1, -1], [-1, 1]], lam=0.0)
    assert solved.weights.tolist() == [0.5, 0.5]
    assert solved.distance == pytest.approx(0, abs=1e-15)


@pytest.mark.few(6)
@pytest.mark.parametrize("seed", range(20))
def test_certificates_hold_at_all_ends(seed: int) -> None:
    rng = np.random.default_rng([7, seed])
    clients, classes = int(rng.integers(2, 60)), int(rng.integers(2, 12))
    sizes = np.maximum(1, 10 ** rng.uniform(0, 4, clients)).astype(int)
    counts = np.stack([rng.multinomial(n, rng.dirichlet(np.full(classes, 0.3))) for n in sizes])
    target = rng.dirichlet(np.full(classes, 0.5))
    cost = rng.uniform(1e-6, 1e-1, clients)
    for setting in ({"cost": cost}, {"ess": 0.5, "cost": cost}, {"lam": np.inf, "cost": cost}):
        assert pals_weights(counts, target, **setting).certified
