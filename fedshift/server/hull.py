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
from fedshift.server.rounding import ON_TARGET, rounding_error, span_part
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

# Slopes this close (beyond the gap of the projection) are a tie, for clients that differ by 1; by
# less where all lie near each other and the target, see `_tie`.
TIE = 1e-14
# A projection of this gap is exact where clients differ by more than `APART`; nearer ones ask for
# less in proportion to the square of how far they differ, as the gap is of that order.
EXACT = 1e-15
APART = 1e-2
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
        # Non-negative least squares cannot express upper bounds.
        try:
            near = _project_by_columns(problem.rows)
            # Small differences between clients drown beside the added row of ones (sum a = 1).
            far = _reach(problem, near) >= APART
            if far or _distance_gap(problem, near) <= _exact_gap(problem, near):
                return near
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
        gap = _distance_gap(problem, a)
        if gap < least:
            best, least = a, gap
        if gap <= _exact_gap(problem, a):
            break
    return best


def _distance_gap(problem: Problem, weights: Floats) -> float:
    """The Frank-Wolfe gap of the squared distance to T."""
    return linear_gap(gradient(problem, 0.0, weights), weights, problem.upper)


def _exact_gap(problem: Problem, weights: Floats) -> float:
    """The gap at which a projection counts as exact."""
    return EXACT * min(1.0, (_reach(problem, weights) / APART) ** 2)


def _reach(problem: Problem, weights: Floats) -> float:
    """max_i ||S_i - S^T a||: the largest distance of a client from the given mixture."""
    offsets = problem.rows - weights @ problem.rows
    return float(np.sqrt(np.einsum("ij,ij->i", offsets, offsets).max()))


def _project_by_columns(rows: Floats) -> Floats:
    """Column generation: solve on a pool of clients, add those that would bring T nearer."""
    clients, classes = rows.shape
    lifted = np.vstack([rows.T, np.ones(clients)])
    goal = np.append(np.zeros(classes), 1.0)
    # A solution has at most `classes` + 1 positive weights; a larger pool saves iterations.
    batch = 2 * classes + 100
    pool = np.argsort(np.einsum("ij,ij->i", rows, rows), kind="stable")[:batch]
    while True:
        x, _ = scipy.optimize.nnls(lifted[:, pool], goal, maxiter=20 * pool.size + 1000)
        weights = np.zeros(clients)
        weights[pool] = x / x.sum()
        slopes = rows @ (weights @ rows)
        slopes -= slopes[weights > 0.0].min() - 1e-15
        slopes[pool] = 0.0  # optimal already, up to rounding that must not add them again
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
        error = np.inf if too_large(problem) else face.off_face
        zero = np.zeros(problem.rows.shape[1])
        return Solution(nearest, face.status, zero, 0.0, error)
    exact = _least_squares_on_target(face.part)
    return face.whole(exact, rounding_error(face.part, 0.0, exact, face.distance, face.missed))


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
    excess = allocation_gap(part, start, dual.w, dual.theta) + lam * float(dual.w @ dual.w)
    stay = Solution(start, exact.status, dual.w, dual.theta, math.sqrt(part.total * excess))
    misses = face.distance, face.missed
    candidates = (
        face.whole(exact, rounding_error(part, lam, exact, *misses)),
        face.whole(stay, limit.error + rounding_error(part, lam, stay, *misses)),
    )
    best = min(candidates, key=lambda s: s.error)
    return best if _stays_off(problem, lam, nearest, best) else replace(best, error=np.inf)


@dataclass(frozen=True)
class _Face:
    """The exposed face: status [M] (free on it), fixed weights [M], the remaining mass.

    `part` is the problem of the free clients alone with v, seen from the face, as the target and
    their weights divided by `mass`; `shift` is that target minus T, and `distance` that of v to T,
    in the scale of `part`. `missed` is by how much v can miss the nearest point, in that scale too,
    and `off_face` the L1 of weights that the nearest point could have off the face.
    """

    status: Codes
    fixed: Floats
    mass: float
    shift: Floats
    part: Problem
    distance: float
    missed: float
    off_face: float

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
        error = self.mass * solution.error + rounding + self.off_face
        return Solution(weights, status, w, theta, error)


def _face(problem: Problem, nearest: Floats, barred: Flags) -> _Face:
    status = _exposed(problem, nearest)
    status[barred] = AT_ZERO
    fixed = np.where(status == AT_CAP, problem.upper, 0.0)
    mass, free = 1.0 - float(fixed.sum()), status == FREE
    tiny = np.finfo(float).tiny
    size = max(mass, tiny)
    # A mixture of the free rows: v minus the fixed part would cancel.
    shift = nearest[free] @ problem.rows[free] / max(float(nearest[free].sum()), tiny)
    part = Problem(
        problem.rows[free] - shift,
        problem.sizes[free],
        problem.upper[free] / size,
        None if problem.counts is None else problem.counts[free],
    )
    distance = float(np.linalg.norm(nearest @ problem.rows)) / size
    missed, off_face = _projection_error(problem, nearest, status, barred)
    off_face += _barred_mass(problem, nearest, barred, missed)
    return _Face(status, fixed, mass, shift, part, distance, missed / size, off_face)


def _barred_mass(problem: Problem, nearest: Floats, barred: Flags, missed: float) -> float:
    """Bound on the L1 of weights that barred clients could have, if v is off v* by `missed`.

    Of a label of which v* has v_k, a client with the share s_k has at most the weight v_k / s_k.
    """
    if problem.counts is None or not barred.any():
        return 0.0
    shares = problem.counts / problem.counts.sum(axis=1, keepdims=True)
    mixed, has = nearest @ shares + missed, shares[barred]
    # A label that the client does not have sets no limit.
    upper = np.divide(mixed, has, out=np.full_like(has, np.inf), where=has > 0.0)
    return 2.0 * float(upper.min(axis=1).sum())


def _projection_error(
    problem: Problem, nearest: Floats, status: Codes, barred: Flags
) -> tuple[float, float]:
    """How far v can be from the point nearest to T, and the L1 of weights off the face `status`.

    With g the part of v - T in the span of the face, v is the exact projection of T + g where every
    client off the face is on its side, s_i the slopes (S_i - v) . (v - T - g): s_i >= m at zero and
    s_i <= -m at the cap, m > 0. A projection moves no further than its target does: ||v - v*|| <=
    ||g||. Both are nearest points, so m times the weight off the face is at most ||g||^2 / 4. What
    rounding of the slopes adds to g is charged for with the spectrum of the face.
    """
    off = nearest @ problem.rows
    length = float(np.linalg.norm(off))
    free, used = status == FREE, ~barred
    if length <= ON_TARGET or not free.any():
        return length, 0.0
    rows = problem.rows[free]
    g = span_part(rows - rows.mean(axis=0), off)
    slopes = problem.rows @ (off - g)
    level = float(slopes[free].mean())
    margins = np.where(status == AT_CAP, level - slopes, slopes - level)[used & ~free]
    missed = min(float(np.linalg.norm(g)), length)
    if margins.size == 0:
        return missed, 0.0
    least = float(margins.min())
    if least < _tie(problem, nearest) / 4:
        return missed, math.inf
    return missed, missed**2 / (2.0 * least)


def _stays_off(problem: Problem, lam: float, nearest: Floats, solution: Solution) -> bool:
    """Whether the slopes of the distance keep every client that is off the face where it is.

    With s the slopes and l their level on the face this is s_i - l >= lam (rows_i . w + theta) at
    zero and s_i - l <= lam (rows_i . w + theta - u_i / n_i) at the cap, by more than rounding.
    """
    slopes, status = _slopes(problem, nearest), _exposed(problem, nearest)
    level = slopes[linear_minimiser(slopes, problem.upper) > 0.0].max()
    pull = lam * (problem.rows @ solution.w + solution.theta)
    zero, capped = status == AT_ZERO, status == AT_CAP
    least = slopes[zero] - level - pull[zero]
    most = slopes[capped] - level - pull[capped] + lam * (problem.upper / problem.sizes)[capped]
    margin = _tie(problem, nearest) / 4
    return bool((least >= margin).all() and (most <= -margin).all())


def _least_squares_on_target(problem: Problem) -> Solution:
    """min sum a_i^2/n_i with S^T a = T, T in the hull: the limit lam -> 0+ of `minimise`.

    The active set at a small lam is that of the limit unless some weight is so small that the
    regulariser has outweighed it. Then a smaller lam is tried, at which only the interior point is
    reliable, and as a last resort its point itself is moved onto the target.
    """
    if problem.upper.sum() <= 1.0 + 1e-12:
        capped, zero = np.full(problem.sizes.shape, AT_CAP), np.zeros(problem.rows.shape[1])
        return Solution(problem.upper / problem.upper.sum(), capped, zero, 0.0, 0.0)
    small = minimise(problem, SMALL_LAM * problem.total)
    exact = polish(problem, 0.0, small.status, fallback=False)
    if exact.error <= GOOD:
        return exact
    near = interior_point(problem, TINY_LAM * problem.total)
    retry = polish(problem, 0.0, near.status)
    candidates = (exact, retry, _onto_target(problem, near))
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
    tie = _tie(problem, nearest) + linear_gap(slopes, nearest, problem.upper)
    status[(slopes > level + tie) & (nearest <= 0.0)] = AT_ZERO
    status[(slopes < level - tie) & (nearest >= problem.upper)] = AT_CAP
    return status


def _tie(problem: Problem, nearest: Floats) -> float:
    """How close slopes count as equal: their rounding is in proportion to both their factors."""
    scale = _reach(problem, nearest) + float(np.linalg.norm(nearest @ problem.rows))
    return TIE * min(1.0, scale)


def _slopes(problem: Problem, nearest: Floats) -> Floats:
    """(S_i - T) . (v - T), half the gradient of the squared distance at v, [M]."""
    slopes: Floats = problem.rows @ (nearest @ problem.rows)
    return slopes
