"""Convex quadratic programs on the capped simplex, the numerical core of the FedPALS weights.

    minimise   f(a) = ||T - S^T a||^2 + lam * sum_i a_i^2 / n_i + price . a
    subject to sum_i a_i = 1,  0 <= a_i <= u_i

`interior_point` (Mehrotra 1992, predictor-corrector) guesses which weights are zero, free or at
their cap. `fedshift.server.active_set.polish` solves exactly for that guess, repairs it and proves
a bound on the error. Beyond `MAX_WORK` a projected gradient method replaces both.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy.linalg

from fedshift.server.active_set import error_bound, polish
from fedshift.server.simplex import (
    AT_CAP,
    AT_ZERO,
    FREE,
    Codes,
    Flags,
    Floats,
    Problem,
    Solution,
    allocate,
    gradient,
    linear_gap,
    objective,
    residual,
)

# Most multiply-adds of a Newton system, M K min(M, K): about 20 s of one core.
MAX_WORK = 4e11
# A lam / N below this is treated as lam -> 0+: the regulariser would be lost in the rounding of the
# residual.
LEAST_LAM = 1e-12
# The lam / N that replaces lam -> 0+ in the search for the active set.
SMALL_LAM = 1e-10
# A warm start with a proven L1 error below this is good enough.
GOAL = 1e-9
# A weight or slack below this is at its bound; further steps would only underflow.
VANISHED = 1e-100


# --------------------------------------------------------------------------- interior point


@dataclass(frozen=True)
class _Iterate:
    """A primal-dual point: a, s = u - a, multipliers z of a >= 0, v of a <= u, y of sum a = 1.

    s is stored, because near the cap u - a would cancel to zero.
    """

    a: Floats
    s: Floats
    z: Floats
    v: Floats
    y: float

    def moved(self, step: _Iterate, t: float) -> _Iterate:
        """This point plus t times a step."""
        return _Iterate(
            self.a + t * step.a,
            self.s + t * step.s,
            self.z + t * step.z,
            self.v + t * step.v,
            self.y + t * step.y,
        )

    @property
    def complementarity(self) -> float:
        """a.z + s.v, the duality gap at a feasible point."""
        return float(self.a @ self.z + self.s @ self.v)

    def length(self, step: _Iterate) -> float:
        """The longest part of a step, at most 1, that keeps a, s, z and v positive."""
        return min(
            _longest_step(self.a, step.a),
            _longest_step(self.s, step.s),
            _longest_step(self.z, step.z),
            _longest_step(self.v, step.v),
        )


class _Newton:
    """Solves (D + 2 R R^T) x = b with D diagonal: Woodbury, one K x K Cholesky, one refinement."""

    def __init__(self, rows: Floats, diagonal: Floats) -> None:
        self._rows, self._diagonal, self._inverse = rows, diagonal, 1.0 / diagonal
        # K x K instead of M x M: there are usually far more clients than labels.
        scaled = rows * np.sqrt(self._inverse)[:, None]
        inner = scaled.T @ scaled
        inner[np.diag_indices_from(inner)] += 0.5
        self._factor = scipy.linalg.cho_factor(inner, overwrite_a=True, check_finite=False)

    def _solve_once(self, b: Floats) -> Floats:
        t = self._inverse * b
        inner = scipy.linalg.cho_solve(self._factor, t @ self._rows, check_finite=False)
        x: Floats = t - self._inverse * (self._rows @ inner)
        return x

    def __call__(self, b: Floats) -> Floats:
        x = self._solve_once(b)
        return x + self._solve_once(
            b - (2.0 * (self._rows @ (x @ self._rows)) + self._diagonal * x)
        )


def _start(problem: Problem, lam: float) -> _Iterate:
    a = problem.upper / problem.upper.sum()
    g = gradient(problem, lam, a)
    # Start with multipliers well above 0, or the first steps would be very short.
    push = max(1e-2 * float(np.abs(g).max()), 1e-12)
    z, v = g - g.min() + push, np.full_like(a, push)
    return _Iterate(a, problem.upper - a, z, v, float(g.min()))


def _longest_step(x: Floats, dx: Floats) -> float:
    """The longest step t <= 1 with x + t dx > 0."""
    falling = dx < 0.0
    # Stop just short of the bound: the next Newton system divides by the distance to it.
    return min(1.0, 0.9995 * float(np.min(-x[falling] / dx[falling]))) if falling.any() else 1.0


def _mehrotra_step(problem: Problem, lam: float, point: _Iterate) -> _Iterate:
    """One predictor-corrector iteration (Mehrotra 1992, SIAM J. Optim. 2(4), 575-601)."""
    a, slack, z, v = point.a, point.s, point.z, point.v
    # The residuals of stationarity and of sum a = 1.
    dual = gradient(problem, lam, a) - point.y - z + v
    short = a.sum() - 1.0
    solve = _Newton(problem.rows, 2.0 * lam / problem.sizes + z / a + v / slack)
    ones = solve(np.ones_like(a))

    def direction(low: Floats, high: Floats) -> _Iterate:
        x = solve(-dual - low / a + high / slack)
        dy = (-short - x.sum()) / ones.sum()
        da = x + dy * ones
        return _Iterate(da, -da, (-low - z * da) / a, (-high + v * da) / slack, float(dy))

    # Predictor: aim at complementarity 0. The less of that it achieves, the larger the value that
    # the corrector aims at (Mehrotra's cube).
    predictor = direction(a * z, slack * v)
    gap = point.complementarity
    predicted = point.moved(predictor, point.length(predictor)).complementarity
    target = (predicted / gap) ** 3 * gap / (2 * a.size)
    corrector = direction(
        a * z + predictor.a * predictor.z - target,
        slack * v - predictor.a * predictor.v - target,
    )
    return point.moved(corrector, point.length(corrector))


def interior_point(problem: Problem, lam: float, rounds: int = 80) -> Solution:
    """Weights near the optimum and the status (zero, free, at cap) that they suggest, [M] each.

    Stops when the complementarity a.z + (u-a).v is 1e-8 of the regulariser's least value lam/N,
    or when rounding keeps it from falling further.
    """
    point = _start(problem, lam)
    goal = 1e-8 * lam / problem.total
    for _ in range(rounds):
        before = point.complementarity
        try:
            following = _mehrotra_step(problem, lam, point)
        except scipy.linalg.LinAlgError:
            break
        after = following.complementarity
        if not np.isfinite(after) or after > 10.0 * before:
            break  # rounding has taken over: keep the point before
        point = following
        stalled = after > 0.9 * before and after < 1e-11
        if after <= goal or stalled or min(point.a.min(), point.s.min()) < VANISHED:
            break
    weights = allocate(point.a / problem.sizes, problem.sizes, problem.upper)
    w = residual(problem, weights) / lam
    theta = point.y / (2.0 * lam)
    error = error_bound(problem, lam, weights, w, theta)
    return Solution(weights, _guess_status(problem, lam, point), w, theta, error)


def _guess_status(problem: Problem, lam: float, point: _Iterate) -> Codes:
    """The status [M] after one semismooth Newton step: at a bound where n h is outside [0, u]."""
    pull = 2.0 * lam / problem.sizes
    status = np.full(point.a.shape, FREE)
    status[point.z > pull * point.a] = AT_ZERO
    status[point.v > pull * point.s] = AT_CAP
    return status


# --------------------------------------------------------------------------- solvers


def minimise(problem: Problem, lam: float, start: Codes | None = None) -> Solution:
    """argmin f for lam > 0, with its proven L1 error; `start` is the status [M] at a nearby lam."""
    kept = affordable(problem, lam)
    if not kept.all():
        begin = None if start is None else start[kept]
        return among(kept, minimise(only(problem, kept), lam, begin))
    # A large lam pulls all weights towards n / N, where all are free.
    if start is None and lam >= problem.total:
        start = np.full(problem.sizes.shape, FREE)
    if start is not None:
        warm = polish(problem, lam, start, fallback=False)
        if warm.error <= GOAL:
            return warm
    if too_large(problem):
        return accelerated_gradient(problem, lam)
    near = interior_point(problem, lam)
    exact = polish(problem, lam, near.status)
    return min(exact, near, key=lambda s: s.error)


def affordable(problem: Problem, lam: float) -> Flags:
    """The clients [M] that are not too expensive to have weight in the optimum at `lam`.

    With j the cheapest client, a_i > 0 needs price_i - price_j <= 2 (S_i - S_j) . r + 2 lam / n_j,
    and ||r|| and ||S_i - T|| are at most R = max ||S_i - T||. With a cap all are returned, because
    it may force expensive clients in.
    """
    if problem.price is None or not (problem.upper >= 1.0).all():
        return np.ones(problem.sizes.shape, dtype=np.bool_)
    cheapest = int(np.argmin(problem.price))
    reach = float(np.einsum("ij,ij->i", problem.rows, problem.rows).max())
    most = 4.0 * reach + 2.0 * lam / float(problem.sizes[cheapest])
    kept: Flags = problem.price - problem.price[cheapest] <= 1.001 * most
    return kept


def only(problem: Problem, kept: Flags) -> Problem:
    """The problem of the kept clients [M] bool alone."""
    fields = (problem.rows, problem.sizes, problem.upper, problem.counts, problem.price)
    return Problem(*(None if v is None else v[kept] for v in fields))  # type: ignore[arg-type]


def among(kept: Flags, solution: Solution) -> Solution:
    """A solution of the kept clients as one of all clients; the others have weight 0."""
    weights, status = np.zeros(kept.shape), np.full(kept.shape, AT_ZERO)
    weights[kept], status[kept] = solution.weights, solution.status
    return Solution(weights, status, solution.w, solution.theta, solution.error)


def too_large(problem: Problem) -> bool:
    """Whether a Newton system costs more than `MAX_WORK` multiply-adds."""
    return bool(problem.rows.size * min(problem.rows.shape) > MAX_WORK)


def accelerated_gradient(problem: Problem, lam: float, rounds: int = 2000) -> Solution:
    """Accelerated projected gradient in the metric sum a_i^2 / n_i, with restarts; error unknown.

    One step costs O(M K + M log M). Nesterov (1983); restart rule of O'Donoghue & Candes (2015),
    Found. Comput. Math. 15, 715-732, eq. 13. Stops at a Frank-Wolfe gap of 1e-12 * max(1, f).
    """
    steepest = 2.0 * (_curvature(problem) + lam)
    weights = allocate(np.zeros_like(problem.sizes), problem.sizes, problem.upper)
    ahead, momentum = weights, 1.0
    for count in range(rounds):
        scores = ahead / problem.sizes - gradient(problem, lam, ahead) / steepest
        following = allocate(scores, problem.sizes, problem.upper)
        # If momentum points uphill, drop it and restart from the last point.
        if ((ahead - following) / problem.sizes) @ (following - weights) > 0.0:
            ahead, momentum = weights, 1.0
            continue
        next_momentum = 0.5 * (1.0 + np.sqrt(1.0 + 4.0 * momentum**2))
        ahead = following + (momentum - 1.0) / next_momentum * (following - weights)
        weights, momentum = following, next_momentum
        if count % 20 == 0 and _converged(problem, lam, weights):
            break
    status = np.where(weights > 0.0, FREE, AT_ZERO)
    return Solution(weights, status, residual(problem, weights) / lam, 0.0, np.inf)


def _converged(problem: Problem, lam: float, weights: Floats) -> bool:
    gap = linear_gap(gradient(problem, lam, weights), weights, problem.upper)
    return bool(gap <= 1e-12 * max(1.0, objective(problem, lam, weights)))


def _curvature(problem: Problem, rounds: int = 30) -> float:
    """An upper estimate of the largest eigenvalue of diag(sqrt n) R R^T diag(sqrt n)."""
    root = np.sqrt(problem.sizes)
    x, size = np.full_like(root, 1.0 / np.sqrt(root.size)), 0.0
    for _ in range(rounds):
        x = root * (problem.rows @ ((root * x) @ problem.rows))
        size = float(np.linalg.norm(x))
        if size == 0.0:
            return 0.0
        x = x / size
    return 1.05 * size  # power iteration gives a lower estimate, with which steps could diverge
