"""The solver behind the FedPALS weights: optimality, proofs of error, independent references."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from fedshift.server.dual import (
    NO_CAP,
    Problem,
    Solution,
    allocate,
    linear_gap,
    linear_minimiser,
    optimum,
    pivots,
)
from fedshift.server.hull import project
from fedshift.server.pals import pals_weights
from support.other_solvers import conic, off_exact


@dataclass(frozen=True)
class Case:
    """A random task: counts [M, K], target [K], lam and cap."""

    counts: np.ndarray
    target: np.ndarray
    lam: float
    cap: float | None

    @property
    def sizes(self) -> np.ndarray:
        return self.counts.sum(axis=1).astype(float)

    @property
    def shares(self) -> np.ndarray:
        return self.counts / self.sizes[:, None]

    def solve(self, **changes):
        chosen = {"lam": self.lam, "cap": self.cap} | changes
        return pals_weights(self.counts, self.target, **chosen)


def draw(rng, clients, classes, lam=None, capped=False, inside=None) -> Case:
    """Sizes from 1 to 1e5, rows from near one-hot to dense, the target inside the hull or not."""
    sizes = np.maximum(1, np.round(10 ** rng.uniform(0, 5, clients))).astype(int)
    spread = rng.choice([0.05, 0.3, 2.0])
    shares = rng.dirichlet(np.full(classes, spread) + 1e-3, size=clients)
    counts = np.stack([rng.multinomial(n, p) for n, p in zip(sizes, shares, strict=True)])
    inside = rng.random() < 0.5 if inside is None else inside
    if inside:
        mix = rng.dirichlet(np.full(clients, 0.3) + 1e-3)
        target = mix @ (counts / sizes[:, None])
    else:
        target = rng.dirichlet(np.full(classes, 0.3))
    if lam is None:
        lam = 0.0 if rng.random() < 0.15 else float(10 ** rng.uniform(-4, 6))
    cap = float(min(1.0, rng.uniform(1.01, 4.0) / clients)) if capped else None
    return Case(counts, target / target.sum(), lam, cap)


def satisfies_kkt(case: Case, a: np.ndarray, tolerance: float = 1e-10) -> bool:
    """g = mu on free weights, >= mu at zero, <= mu at the cap, with g the gradient of f."""
    g = -2 * case.shares @ (case.target - case.shares.T @ a) + 2 * case.lam * a / case.sizes
    tolerance *= max(1.0, np.abs(g).max())
    upper = NO_CAP if case.cap is None else case.cap
    lowest_used = g[a < upper].min(initial=np.inf)  # these could take weight
    highest_used = g[a > 0].max()  # these could give it
    feasible = abs(a.sum() - 1) <= 1e-12 and a.min() >= 0 and a.max() <= upper
    return bool(feasible and highest_used - lowest_used <= tolerance)


@pytest.mark.slow
def test_kkt_conditions_hold_on_1000_random_problems() -> None:
    rng = np.random.default_rng(0)
    uncertified = 0
    for trial in range(1000):
        clients, classes = int(rng.integers(1, 201)), int(rng.integers(2, 51))
        case = draw(rng, clients, classes, capped=trial % 4 == 0)
        solved = case.solve()
        assert satisfies_kkt(case, solved.weights), (trial, case.lam, case.cap)
        assert solved.gap <= 1e-12 * max(1.0, case.lam), (trial, case.lam)
        uncertified += not solved.certified
    assert uncertified <= 5


def test_kkt_checker_rejects_perturbed_answers() -> None:
    rng = np.random.default_rng(1)
    for _ in range(50):
        case = draw(rng, 30, 8, lam=float(10 ** rng.uniform(0, 4)))
        a = case.solve().weights.copy()
        giver, taker = np.argmax(a), np.argmin(a)
        a[giver], a[taker] = a[giver] - 1e-4, a[taker] + 1e-4
        assert not satisfies_kkt(case, a)


# ---------------------------------------------------------------- exact rational reference


def test_certified_answers_agree_with_rational_arithmetic_and_bounds_hold() -> None:
    rng = np.random.default_rng(2)
    certified = 0
    for _ in range(60):
        case = draw(rng, int(rng.integers(2, 10)), int(rng.integers(2, 6)))
        case = Case(case.counts, case.target, float(10 ** rng.uniform(-7, 5)), None)
        solved = case.solve()
        error = off_exact(case.counts, case.target, case.lam, solved.weights)
        assert error <= solved.l1_bound + 1e-12
        if solved.certified:
            certified += 1
            assert error <= 1e-8
    assert certified >= 50


def test_lambda_zero_is_the_limit_in_rational_arithmetic() -> None:
    rng = np.random.default_rng(3)
    for _ in range(40):
        case = draw(rng, int(rng.integers(2, 10)), int(rng.integers(2, 6)), lam=0.0)
        solved = case.solve()
        assert solved.certified
        assert off_exact(case.counts, case.target, 0.0, solved.weights) <= 1e-8


def problem_of(case: Case) -> Problem:
    rows = case.shares - case.target
    return Problem(rows, case.sizes, np.full(len(rows), NO_CAP))


def test_a_wrong_start_is_repaired_and_the_error_of_a_wrong_answer_is_bounded() -> None:
    rng = np.random.default_rng(4)
    for _ in range(20):
        case = draw(rng, 30, 5, lam=float(10 ** rng.uniform(-1, 4)))
        problem = problem_of(case)
        best = optimum(problem, case.lam)
        assert best.error <= 1e-7
        wrong = Solution(rng.dirichlet(np.ones(30)), rng.normal(size=5), 0.0, np.inf)
        repaired = optimum(problem, case.lam, wrong)
        np.testing.assert_allclose(repaired.weights, best.weights, atol=1e-9)
        ridge = case.lam / case.sizes.sum()
        moved = allocate(
            (best.weights + rng.uniform(0, 1e-3, 30)) / case.sizes, case.sizes, problem.upper
        )
        guess = Solution(moved, best.w, best.theta, np.inf)
        exact = pivots(problem, ridge, guess)
        assert np.abs(exact.weights - best.weights).sum() <= exact.error + 1e-9
        fall = case_objective(case, moved) - case_objective(case, best.weights)
        gap = frank_wolfe_gap(case, moved)
        assert fall <= gap + 1e-15
        error = np.abs(moved - best.weights).sum()
        assert error <= np.sqrt(case.sizes.sum() * gap / case.lam) + 1e-12


# ---------------------------------------------------------------- an independent solver


@pytest.mark.few(1)
@pytest.mark.parametrize("capped", [False, True])
def test_agrees_with_clarabel(capped: bool) -> None:
    rng = np.random.default_rng(5)
    for _ in range(25):
        lam = float(10 ** rng.uniform(-3, 5))
        clients, classes = int(rng.integers(5, 101)), int(rng.integers(2, 30))
        case = draw(rng, clients, classes, lam=lam, capped=capped)
        solved = case.solve()
        other = conic(case.shares, case.target, lam / case.sizes, case.cap)
        bound = np.sqrt(case.sizes.sum() * frank_wolfe_gap(case, other) / lam)
        # 1e-6, or what the other solver's own gap allows it to be wrong by.
        assert np.abs(solved.weights - other).sum() <= max(1e-6, bound)
        assert case_objective(case, solved.weights) <= case_objective(case, other) * (1 + 1e-9)


def case_objective(case: Case, a: np.ndarray) -> float:
    r = case.target - case.shares.T @ a
    return float(r @ r + case.lam * np.sum(a**2 / case.sizes))


def frank_wolfe_gap(case: Case, a: np.ndarray) -> float:
    g = -2 * case.shares @ (case.target - case.shares.T @ a) + 2 * case.lam * a / case.sizes
    upper = np.full(a.shape, NO_CAP if case.cap is None else case.cap)
    return float(g @ (a - linear_minimiser(g, upper)))


@pytest.mark.few(1)
@pytest.mark.parametrize("capped", [False, True])
def test_lambda_zero_maximises_ess_as_a_two_stage_solve_does(capped: bool) -> None:
    rng = np.random.default_rng(6)
    for _ in range(8):
        case = draw(rng, 40, 6, lam=0.0, capped=capped, inside=True)
        solved = case.solve()
        assert solved.certified
        scale = case.sizes.sum()
        other = conic(case.shares, case.target, scale / case.sizes, case.cap, fixed=solved.residual)
        ours, theirs = (np.sum(a**2 / case.sizes) * scale for a in (solved.weights, other))
        assert ours <= theirs * (1 + 1e-6)
        assert np.abs(solved.weights - other).sum() <= 1e-3
        # Negative control: other minimisers of the distance exist and have a smaller ESS.
        vertex = project(case.shares - case.target)
        spread = np.sum(vertex**2 / case.sizes) * scale
        assert capped or spread > ours * 1.01


# ---------------------------------------------------------------- parts


def test_allocate_is_the_projection() -> None:
    rng = np.random.default_rng(7)
    for _ in range(100):
        sizes = 10 ** rng.uniform(0, 5, 20)
        upper = np.full(20, rng.uniform(0.051, 1.0))
        scores = rng.normal(size=20) * rng.choice([1e-6, 1e-3, 1.0])
        a = allocate(scores, sizes, upper)
        assert abs(a.sum() - 1) <= 1e-12
        slopes = 2 * a / sizes - 2 * scores
        assert linear_gap(slopes, a, upper) <= 1e-12 * max(1.0, np.abs(slopes).max())


def test_linear_minimiser_fills_the_cheapest_first() -> None:
    filled = linear_minimiser(np.array([3.0, 1.0, 2.0]), np.full(3, 0.4))
    np.testing.assert_allclose(filled, [0.2, 0.4, 0.4], atol=1e-15)
    assert linear_gap(np.array([3.0, 1.0, 2.0]), np.full(3, 1 / 3), np.full(3, 0.4)) > 0


@pytest.mark.few(1)
@pytest.mark.parametrize("clients", [10, 100, 1000])
@pytest.mark.parametrize("classes", [10, 182])
@pytest.mark.parametrize("inside", [False, True])
def test_gap_at_the_sizes_of_real_tasks(clients: int, classes: int, inside: bool) -> None:
    rng = np.random.default_rng(8)
    case = draw(rng, clients, classes, lam=0.0, inside=inside)
    for lam in (0.0, 1e-6, 1e-3, 10.0, 1000.0):
        assert case.solve(lam=lam).gap <= 1e-12


@pytest.mark.few(1)
@pytest.mark.parametrize("clients", [200, 400])
def test_lambda_zero_with_barely_more_clients_than_classes(clients: int) -> None:
    """Weights far below the small lam's resolution: the last resorts of the limit are needed."""
    case = draw(np.random.default_rng(12), clients, 182, lam=0.0, inside=True)
    solved = case.solve()
    assert solved.certified
    assert solved.distance <= 1e-14
    assert np.linalg.norm(solved.residual) <= 1e-12
