"""Where lam -> 0+ leads: the point of the clients' hull nearest to the target, and its weights.

The hull (with caps, part of it) is {S^T a : sum a = 1, 0 <= a <= u}. Its point nearest to T is
unique, the weights that mix to it are not; the limit takes those of largest ESS.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import scipy.optimize

from fedshift.server.active_set import (
    GOOD,
    allocation_gap,
    error_bound,
    polish,
    ratio_tests,
    solve_face,
)
from fedshift.server.qp import (
    SMALL_LAM,
    accelerated_gradient,
    interior_point,
    minimise,
    too_large,
)
from fedshift.server.rounding import ON_TARGET, rounding_error
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
    face = _face(problem, nearest, barred)
    if too_large(problem) or face.mass < 1e-14:
        error = np.inf if too_large(problem) else 0.0
        zero = np.zeros(problem.rows.shape[1])
        return Solution(nearest, face.status, zero, 0.0, error)
    exact = _least_squares_on_target(face.part)
    return face.whole(exact, rounding_error(face.part, 0.0, exact, face.distance))


def near_max_ess(problem: Problem, lam: float, nearest: Floats, limit: Solution) -> Solution:
    """The optimum at a lam too small for `minimise`, on the exposed face and from the limit there.

    With v the nearest point and r = T - v, f = ||r||^2 + ||v - S^T a||^2 + lam sum a_i^2/n_i on the
    exposed face, which is the problem with v for T; `_stays_off` proves that no other client joins.
    Besides its solution at lam the limit a0 itself is tried: S^T a0 = v, so that any w and theta
    prove ||a - a0||_1 <= sqrt(N (allocation_gap + lam ||w||^2)).
    """
    face = _face(problem, nearest, np.zeros_like(nearest, dtype=np.bool_))
    if too_large(problem) or face.mass < 1e-14:
        return replace(limit, error=np.inf)
    part = face.part
    exact = polish(part, lam, limit.status[face.free], fallback=False)
    dual = solve_face(part, 0.0, exact.status)
    start = limit.weights[face.free] / face.mass
    off = allocation_gap(part, start, dual.w, dual.theta) + lam * float(dual.w @ dual.w)
    stay = Solution(start, exact.status, dual.w, dual.theta, math.sqrt(part.total * off))
    found = (
        face.whole(exact, rounding_error(part, lam, exact, face.distance)),
        face.whole(stay, limit.error + rounding_error(part, lam, stay, face.distance)),
    )
    best = min(found, key=lambda s: s.error)
    return best if _stays_off(problem, lam, nearest, best) else replace(best, error=np.inf)


@dataclass(frozen=True)
class _Face:
    """The exposed face: status [M] (free on it), held weights [M], their rest of the mass.

    `part` is the problem of the free clients alone with v, seen from the face, as the target and
    their weights divided by `mass`; `shift` is that target minus T, and `distance` that of v to T,
    in the scale of `part`.
    """

    status: Codes
    fixed: Floats
    mass: float
    shift: Floats
    part: Problem
    distance: float

    @property
    def free(self) -> Flags:
        """The clients of `part`, [M]."""
        return np.asarray(self.status == FREE)

    def whole(self, solution: Solution, rounding: float) -> Solution:
        """A solution of `part` as one of all clients, with a charge for rounding on its error."""
        weights, status = self.fixed.copy(), self.status.copy()
        free = self.free
        weights[free], status[free] = self.mass * solution.weights, solution.status
        w = self.mass * solution.w
        theta = self.mass * solution.theta - float(self.shift @ w)
        return Solution(weights, status, w, theta, self.mass * solution.error + rounding)


def _face(problem: Problem, nearest: Floats, barred: Flags) -> _Face:
    status = _exposed(problem, nearest)
    status[barred] = AT_ZERO
    fixed = np.where(status == AT_CAP, problem.upper, 0.0)
    mass, free = 1.0 - float(fixed.sum()), status == FREE
    tiny = np.finfo(float).tiny
    size = max(mass, tiny)
    # A mixture of the free rows, and not v less the held part, which would cancel.
    shift = nearest[free] @ problem.rows[free] / max(float(nearest[free].sum()), tiny)
    part = Problem(problem.rows[free] - shift, problem.sizes[free], problem.upper[free] / size)
    distance = float(np.linalg.norm(nearest @ problem.rows)) / size
    return _Face(status, fixed, mass, shift, part, distance)


def _stays_off(problem: Problem, lam: float, nearest: Floats, solution: Solution) -> bool:
    """Whether the slopes of the distance keep every client that is off the face where it is.

    With s the slopes and l their level on the face this is s_i - l >= lam (rows_i . w + theta) at
    zero and s_i - l <= lam (rows_i . w + theta - u_i / n_i) at the cap, by more than rounding.
    """
    slopes, status = _slopes(problem, nearest), _exposed(problem, nearest)
    level = slopes[linear_minimiser(slopes, problem.upper) > 0.0].max()
    pull = lam * (problem.rows @ solution.w + solution.theta)
    zero, held = status == AT_ZERO, status == AT_CAP
    least = slopes[zero] - level - pull[zero]
    most = slopes[held] - level - pull[held] + lam * (problem.upper / problem.sizes)[held]
    return bool((least >= TIE / 4).all() and (most <= -TIE / 4).all())


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
    slopes = _slopes(problem, nearest)
    status = np.full(slopes.shape, FREE)
    if float(np.linalg.norm(nearest @ problem.rows)) <= ON_TARGET:
        return status
    level = slopes[linear_minimiser(slopes, problem.upper) > 0.0].max()
    tie = TIE + linear_gap(slopes, nearest, problem.upper)
    status[(slopes > level + tie) & (nearest <= 0.0)] = AT_ZERO
    status[(slopes < level - tie) & (nearest >= problem.upper)] = AT_CAP
    return status


def _slopes(problem: Problem, nearest: Floats) -> Floats:
    """(S_i - T) . (v - T), half the gradient of the squared distance at v, [M]."""
    slopes: Floats = problem.rows @ (nearest @ problem.rows)
    return slopes
