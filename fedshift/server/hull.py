"""Where lam -> 0+ leads: the point of the clients' hull nearest to the target, and its weights.

The hull (with caps, part of it) is {S^T a : sum a = 1, 0 <= a <= u}. Its point nearest to T is
unique, the weights that mix to it are not; the limit takes those of largest ESS.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import numpy as np
import scipy.optimize

from fedshift.server.active_set import GOOD, ON_TARGET, error_bound, polish, ratio_tests
from fedshift.server.qp import (
    SMALL_LAM,
    accelerated_gradient,
    interior_point,
    minimise,
    too_large,
)
from fedshift.server.simplex import (
    AT_CAP,
    AT_ZERO,
    FREE,
    Codes,
    Flags,
    Floats,
    Problem,
    Solution,
    gradient,
    linear_gap,
    linear_minimiser,
    residual,
)

# Slopes this close (beyond the gap of the projection) are a tie.
TIE = 1e-14
# The lam / N tried where SMALL_LAM was too large.
TINY_LAM = 1e-14


def project(problem: Problem) -> Floats:
    """Weights [M] of the point of the (capped) hull nearest to T; any of them, not the max-ESS one.

    Without a cap this is non-negative least squares (Lawson & Hanson 1974, ch. 23): the
    minimiser x of ||rows^T x||^2 + (1 . x - 1)^2 over x >= 0 is a multiple of the one sought.
    """
    if too_large(problem):
        return accelerated_gradient(problem, SMALL_LAM * problem.total).weights
    if (problem.upper >= 1.0).all():
        try:
            return _project_by_columns(problem.rows)
        except RuntimeError:
            pass  # Lawson-Hanson ran out of iterations: use the general method
    # Sizes play no part in the distance; equal ones keep the faces well conditioned. Ratio tests
    # from a feasible point make the distance fall at every step, whereas block pivoting at lam = 0
    # leaves the neighbourhood as soon as a face reaches T outside the simplex.
    problem = replace(problem, sizes=np.ones_like(problem.sizes))
    small = minimise(problem, SMALL_LAM * problem.total)
    best, least = small.weights, np.inf
    for candidate in chain([small], ratio_tests(problem, 0.0, small)):
        a = candidate.weights
        gap = linear_gap(gradient(problem, 0.0, a), a, problem.upper)
        if gap < least:
            best, least = a, gap
        if gap <= 1e-15:
            break
    return best


def _project_by_columns(rows: Floats) -> Floats:
    """Column generation: solve on a pool of clients, add those that would bring T nearer."""
    clients, classes = rows.shape
    lifted = np.vstack([rows.T, np.ones(clients)])
    goal = np.append(np.zeros(classes), 1.0)
    batch = 2 * classes + 100
    pool = np.argsort(np.einsum("ij,ij->i", rows, rows), kind="stable")[:batch]
    while True:
        x, _ = scipy.optimize.nnls(lifted[:, pool], goal, maxiter=20 * pool.size + 1000)
        weights = np.zeros(clients)
        weights[pool] = x / x.sum()
        slopes = rows @ (weights @ rows)
        slopes -= slopes[weights > 0.0].min() - 1e-15
        slopes[pool] = 0.0
        better = np.argsort(slopes, kind="stable")[:batch]
        better = better[slopes[better] < 0.0]
        if better.size == 0:
            return weights
        pool = np.concatenate([pool, better])


def max_ess(problem: Problem, nearest: Floats, barred: Flags) -> Solution:
    """The limit lam -> 0+: least sum a_i^2/n_i among the weights whose S^T a is nearest to T.

    `nearest` [M] are any weights that attain the projection v; `barred` [M] marks clients known to
    be zero in all of them. The slopes of the distance fix all others off the exposed face (to zero,
    or to their cap); on the face the problem is solved again with v as the target.
    """
    status = _exposed(problem, nearest)
    status[barred] = AT_ZERO
    fixed = np.where(status == AT_CAP, problem.upper, 0.0)
    mass = 1.0 - fixed.sum()
    if too_large(problem) or mass < 1e-14:
        error = np.inf if too_large(problem) else 0.0
        return Solution(nearest, status, np.zeros(problem.rows.shape[1]), 0.0, error)
    face = status == FREE
    shift = (nearest @ problem.rows - fixed @ problem.rows) / mass
    part = Problem(problem.rows[face] - shift, problem.sizes[face], problem.upper[face] / mass)
    exact = _least_squares_on_target(part)
    weights = fixed
    weights[face] = mass * exact.weights
    status[face] = exact.status
    return Solution(weights, status, mass * exact.w, mass * exact.theta, mass * exact.error)


def _least_squares_on_target(problem: Problem) -> Solution:
    """min sum a_i^2/n_i with S^T a = T, T in the hull: the limit lam -> 0+ of `minimise`.

    The active set at a small lam is that of the limit unless some weight is so small that the
    regulariser has outweighed it. Then a smaller lam is tried, at which only the interior point is
    reliable, and as a last resort its point itself is moved onto the target.
    """
    if problem.upper.sum() <= 1.0 + 1e-12:
        held, zero = np.full(problem.sizes.shape, AT_CAP), np.zeros(problem.rows.shape[1])
        return Solution(problem.upper / problem.upper.sum(), held, zero, 0.0, 0.0)
    small = minimise(problem, SMALL_LAM * problem.total)
    exact = polish(problem, 0.0, small.status, fallback=False)
    if exact.error <= GOOD:
        return exact
    near = interior_point(problem, TINY_LAM * problem.total)
    again = polish(problem, 0.0, near.status)
    candidates = (exact, again, _onto_target(problem, near))
    return min(candidates, key=lambda s: (s.error, np.linalg.norm(residual(problem, s.weights))))


def _onto_target(problem: Problem, near: Solution) -> Solution:
    """The least relative change of positive weights that makes S^T a = T and sum a = 1 exact."""
    a = near.weights
    system = np.column_stack([problem.rows, np.ones(a.size)]) * a[:, None]
    missing = np.append(residual(problem, a), 1.0 - a.sum())
    change = np.linalg.lstsq(system.T, missing, rcond=1e-14)[0]
    weights = a + a * change
    feasible = (weights >= 0.0).all() and (weights <= problem.upper).all()
    if not feasible:
        return replace(near, error=np.inf)
    return replace(
        near, weights=weights, error=error_bound(problem, 0.0, weights, near.w, near.theta)
    )


def _exposed(problem: Problem, nearest: Floats) -> Codes:
    """Free where the slope ties with the level at which a linear minimiser stops filling, [M].

    Ties are exact for label counts (clients with no example of a class lie in a common face), so
    the tolerance has to cover rounding only. With T in the hull all slopes are rounding.
    """
    slopes = problem.rows @ (nearest @ problem.rows)
    status = np.full(slopes.shape, FREE)
    if float(np.linalg.norm(nearest @ problem.rows)) <= ON_TARGET:
        return status
    level = slopes[linear_minimiser(slopes, problem.upper) > 0.0].max()
    tie = TIE + linear_gap(slopes, nearest, problem.upper)
    status[(slopes > level + tie) & (nearest <= 0.0)] = AT_ZERO
    status[(slopes < level - tie) & (nearest >= problem.upper)] = AT_CAP
    return status
