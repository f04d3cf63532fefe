"""The unsquared form of the FedPALS weights, min ||T - S^T a|| + lam * sum_i a_i^2 / n_i.

With q(a) = sum_i a_i^2/n_i, and a over the (capped) simplex, its dual is

    max D(w) over ||w|| <= 1 / (2 lam),   D(w) = min_a q(a) - 2 w . (S^T a - T).

The dual of the squared form at mu is max D(w) - mu ||w||^2, with the maximiser w(mu) = r(mu) / mu,
and ||w(mu)|| falls as mu grows. So there are two cases. They are told apart by w(0+), the shortest
multiplier of S^T a = T in min q(a), which is finite if and only if T is in the hull:

- 2 lam ||w(0+)|| <= 1: D has its maximum within the ball, the residual is exactly zero, and a is
  the max-ESS point a(0+), with w(0+) as the proof. (The norm is an exact penalty.)
- otherwise the bound on w is active, ||w|| = 1 / (2 lam), with a multiplier mu > 0, and a is the
  squared form's a(mu) with mu = 2 lam ||r(mu)||.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from fedshift.server.active_set import allocation_gap, polish
from fedshift.server.mixture import PROVEN, Mixture, at_lam, root
from fedshift.server.qp import LEAST_LAM, SMALL_LAM, minimise
from fedshift.server.rounding import ON_TARGET, ROUNDING, rounding_error
from fedshift.server.simplex import Problem, Solution, linear_gap, residual

# The smallest mu / N to try; below it the residual is rounding.
LEAST_MU = 1e-21


def at_lam_norm(clients: Mixture, lam: float) -> tuple[float, Solution]:
    """Solve the unsquared problem, 0 < lam < inf: (mu of the squared problem, its solution).

    mu = 0 stands for the first case of this module, zero residual. If T is in the hull and
    2 lam ||w(mu)|| <= 1 at a small mu, either case is possible: then the better proof decides.
    """
    problem = clients.merged
    top = at_lam(clients, math.inf)
    distance, longest = (
        float(np.linalg.norm(residual(problem, a))) for a in (clients.nearest, top.weights)
    )
    # mu = 2 lam ||r||, and ||r|| lies between its values at lam = 0 and lam = inf.
    low, high = 2.0 * lam * distance, 2.0 * lam * longest
    small_mu = SMALL_LAM * problem.total
    if distance > ON_TARGET:
        return _solve_binding(clients, lam, low, high)
    # T is in the hull up to rounding: decide between the two cases at a small mu.
    small = minimise(problem, small_mu)
    if 2.0 * lam * _length(small) > 1.0:
        return _solve_binding(clients, lam, small_mu, high)
    limit = polish(problem, 0.0, small.status, fallback=False)
    exact = _exact_penalty(clients, lam, (small, limit))
    if norm_evidence(clients, lam, 0.0, exact)[1] <= PROVEN:
        return 0.0, exact
    candidates = ((0.0, exact), _solve_binding(clients, lam, low, min(high, small_mu)))
    return min(candidates, key=lambda s: norm_evidence(clients, lam, *s)[1])


def _length(solution: Solution) -> float:
    return float(np.linalg.norm(solution.w))


def _exact_penalty(clients: Mixture, lam: float, duals: tuple[Solution, ...]) -> Solution:
    """The max-ESS point with those of the multipliers, scaled into the ball, that prove most.

    The max-ESS problem has multipliers only for clients on its face of the hull, where r = 0 keeps
    the others at zero. Here a multiplier has to do that, and it must be in the ball.
    """
    limit = at_lam(clients, 0.0)
    scaled = [(d, 1.0 / max(1.0, 2.0 * lam * _length(d))) for d in duals]
    candidates = [replace(limit, w=t * d.w, theta=t * d.theta) for d, t in scaled]
    return min(candidates, key=lambda s: allocation_gap(clients.merged, s.weights, s.w, s.theta))


def _solve_binding(clients: Mixture, lam: float, low: float, high: float) -> tuple[float, Solution]:
    """mu in [low, high] with 2 lam ||w(mu)|| = 1, and a(mu)."""
    problem = clients.merged
    low = max(low, LEAST_MU * problem.total)
    if low >= high:
        return high, at_lam(clients, high)

    def excess(mu: float, solution: Solution) -> float:
        return math.log(2.0 * lam * max(_length(solution), 1e-300))

    # `root` uses the limit only for mu below LEAST_LAM N; otherwise do not compute it.
    reliable = low >= LEAST_LAM * problem.total
    limit = at_lam(clients, math.inf if reliable else 0.0)
    return root(problem, excess, low, high, limit)


def norm_evidence(
    clients: Mixture, lam: float, mu: float, solution: Solution
) -> tuple[float, float]:
    """Frank-Wolfe gap and proven L1 error of the unsquared problem, 0 < lam < inf.

    ||T - S^T b|| >= u . (T - S^T b) for any u in the unit ball, so every such u proves
        F(a) - F* <= ||r|| - u . r + max_b (lam-part with slope -S u),
    even at r = 0, where F has no gradient. Two are tried: 2 lam w, scaled into the ball, and
    r/||r||. The error follows because F is 2 lam-strongly convex in the norm sum a_i^2/n_i. At
    mu = 0 it is the error of the max-ESS point, where r = 0 exactly, plus that of `solution` as an
    approximation of this point.
    """
    problem, a = clients.merged, solution.weights
    r = residual(problem, a)
    size = float(np.linalg.norm(r))
    dual = 2.0 * lam * solution.w
    candidates = [dual / max(1.0, float(np.linalg.norm(dual)))]
    if size > 0.0:
        candidates.append(r / size)
    pull = 2.0 * lam * a / problem.sizes
    gap = min(
        linear_gap(pull - problem.rows @ u, a, problem.upper) + max(size - float(u @ r), 0.0)
        for u in candidates
    )
    if mu == 0.0:
        return gap, _penalty_error(problem, lam, solution, size)
    return gap, _binding_error(problem, lam, mu, solution)


def _penalty_error(problem: Problem, lam: float, solution: Solution, size: float) -> float:
    """The L1 error of a max-ESS point, inf if it misses T; size is ||T - S^T a||."""
    length = _length(solution)
    if size > ON_TARGET:
        return math.inf
    scale = 1.0 / max(1.0, 2.0 * lam * length)
    excess = allocation_gap(problem, solution.weights, scale * solution.w, scale * solution.theta)
    rounding = ROUNDING * problem.total * length
    return solution.error + math.sqrt(problem.total * excess) + rounding


def _binding_error(problem: Problem, lam: float, mu: float, solution: Solution) -> float:
    """The L1 error of a point with an active bound on w, by the dual w of length 1 / (2 lam)."""
    r, length = residual(problem, solution.weights), _length(solution)
    size = float(np.linalg.norm(r))
    if size == 0.0 or length == 0.0:
        return math.inf
    scale = 1.0 / (2.0 * lam * length)
    excess = allocation_gap(problem, solution.weights, scale * solution.w, scale * solution.theta)
    # ||turn||^2 / 2 is 1 - cos of the angle between r and w, without cancellation.
    turn = r / size - solution.w / length
    excess += 0.5 * size * float(turn @ turn) / lam
    return math.sqrt(problem.total * excess) + rounding_error(problem, mu, solution)
