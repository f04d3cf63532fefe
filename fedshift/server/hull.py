"""The limit lam -> 0+: the point of the clients' hull nearest to the target, and its weights.

The hull (with caps, a part of it) is {S^T a : sum a = 1, 0 <= a <= u}. Its point nearest to T is
unique; the weights that mix to it are not, and the limit takes those with the largest ESS.
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

# Slopes that differ by less than this (besides the gap of the projection) count as equal, for
# clients whose rows differ by 1. If all are near each other and the target it is less, see
# `_tie_tolerance`.
TIE = 1e-14
# A projection with this gap is exact if clients differ by more than `APART`. For clients that are
# closer the gap must be smaller, in proportion to the square of their distance.
EXACT = 1e-15
APART = 1e-2
# The lam / N to try if SMALL_LAM was too large.
TINY_LAM = 1e-14


def project(problem: Problem) -> Floats:
    """Some weights [M] that mix to the point of the (capped) hull nearest to T, of any ESS.

    Without a cap this is non-negative least squares (Lawson & Hanson 1974, ch. 23): the minimiser x
    of ||rows^T x||^2 + (1 . x - 1)^2 over x >= 0 is a multiple of such weights.
    """
    if too_large(problem):
        return accelerated_gradient(problem, SMALL_LAM * problem.total).weights
    if (problem.upper >= 1.0).all():
        # Only without a cap: non-negative least squares has no upper bounds.
        try:
            near = _project_by_columns(problem.rows)
            # If clients differ little, their differences are lost beside the added row of ones
            # (sum a = 1): accept the result only if its gap is small enough.
            far = _largest_distance(problem, near) >= APART
            if far or _distance_gap(problem, near) <= _exact_gap(problem, near):
                return near
        except RuntimeError:
            pass  # Lawson-Hanson ran out of iterations: use the general method below
    # The distance does not depend on sizes, and equal ones keep the faces well conditioned. Ratio
    # tests from a feasible point reduce the distance at every step. Block pivoting at lam = 0 would
    # jump away as soon as a face reaches T outside the simplex.
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
    """The gap up to which a projection counts as exact."""
    return EXACT * min(1.0, (_largest_distance(problem, weights) / APART) ** 2)


def _largest_distance(problem: Problem, weights: Floats) -> float:
    """max_i ||S_i - S^T a||: the largest distance of a client from the given mixture."""
    offsets = problem.rows - weights @ problem.rows
    return float(np.sqrt(np.einsum("ij,ij->i", offsets, offsets).max()))


def _project_by_columns(rows: Floats) -> Floats:
    """Column generation: solve for a pool of clients, add those that would reduce the distance."""
    clients, classes = rows.shape
    lifted = np.vstack([rows.T, np.ones(clients)])
    goal = np.append(np.zeros(classes), 1.0)
    # A solution has at most `classes` + 1 positive weights; a larger pool saves iterations.
    batch = 2 * classes + 100
    # Start with the clients nearest to the target.
    pool = np.argsort(np.einsum("ij,ij->i", rows, rows), kind="stable")[:batch]
    while True:
        x, _ = scipy.optimize.nnls(lifted[:, pool], goal, maxiter=20 * pool.size + 1000)
        weights = np.zeros(clients)
        weights[pool] = x / x.sum()
        slopes = rows @ (weights @ rows)
        # Below 0 now: clients with a smaller slope than those in use would reduce the distance.
        slopes -= slopes[weights > 0.0].min() - 1e-15
        slopes[pool] = 0.0  # the pool is solved already; rounding must not add a client twice
        better = np.argsort(slopes, kind="stable")[:batch]
        better = better[slopes[better] < 0.0]
        if better.size == 0:
            return weights
        pool = np.concatenate([pool, better])


def max_ess(problem: Problem, nearest: Floats, barred: Flags) -> Solution:
    """The limit lam -> 0+: least sum a_i^2/n_i among the weights whose S^T a is nearest to T.

    `nearest` [M] are some weights that mix to the nearest point v; `barred` [M] marks clients that
    have weight 0 in all such weights. The slopes of the distance show which clients are on the face
    of the hull that v lies on. The others are fixed (at zero, or at their cap), and the problem is
    solved again on the face, with v as the target.
    """
    face = _make_face(problem, nearest, barred)
    if too_large(problem) or face.mass < 1e-14:
        error = np.inf if too_large(problem) else face.off_face
        zero = np.zeros(problem.rows.shape[1])
        return Solution(nearest, face.status, zero, 0.0, error)
    exact = _least_squares_on_target(face.part)
    return face.whole(exact, rounding_error(face.part, 0.0, exact, face.distance, face.missed))


def near_max_ess(problem: Problem, lam: float, nearest: Floats, limit: Solution) -> Solution:
    """The optimum at a lam too small for `minimise`, from the limit and its face of the hull.

    With v the nearest point and r = T - v, on that face f = ||r||^2 + ||v - S^T a||^2 +
    lam sum a_i^2/n_i, which is the problem with v instead of T; `_stays_off` proves that no other
    client joins. Two candidates are compared by their proofs: the solution of that problem at lam,
    and the limit a0 itself. Because S^T a0 = v, any w and theta prove for the latter that
    ||a - a0||_1 <= sqrt(N (allocation_gap + lam ||w||^2)).
    """
    face = _make_face(problem, nearest, np.zeros_like(nearest, dtype=np.bool_))
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
    """The face of the hull on which the nearest point v lies, and the problem of its clients.

    status    [M], free for the clients on the face
    fixed     [M], the weights of all others
    mass      what is left for the free clients
    part      the problem of the free clients alone, with v (as a mixture of their rows) as the
              target, and weights divided by `mass`
    shift     that target minus T
    distance  of v to T, in the scale of `part`
    missed    how far v can be from the true nearest point, in the scale of `part`
    off_face  how much weight, in L1, the true nearest point could have off the face
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
        """A solution of `part` as one of all clients; `rounding` is added to its error."""
        weights, status = self.fixed.copy(), self.status.copy()
        free = self.free
        weights[free], status[free] = self.mass * solution.weights, solution.status
        w = self.mass * solution.w
        theta = self.mass * solution.theta - float(self.shift @ w)
        error = self.mass * solution.error + rounding + self.off_face
        return Solution(weights, status, w, theta, error)


def _make_face(problem: Problem, nearest: Floats, barred: Flags) -> _Face:
    status = _face_status(problem, nearest)
    status[barred] = AT_ZERO
    fixed = np.where(status == AT_CAP, problem.upper, 0.0)
    mass, free = 1.0 - float(fixed.sum()), status == FREE
    tiny = np.finfo(float).tiny
    size = max(mass, tiny)
    # Computed as a mixture of the free rows, because v minus the fixed part would cancel.
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
    """How much weight, in L1, barred clients could have if v is off the true v* by `missed`.

    If v* has the share v_k of a label and a client s_k, its weight is at most v_k / s_k.
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
    """(how far v can be from the true nearest point v*, the weight of v* off the face in L1).

    Let g be the part of v - T in the span of the face, and s_i = (S_i - v) . (v - T - g). If
    s_i >= m for all clients at zero and s_i <= -m at their cap, m > 0, then v is the exact
    projection of T + g. A projection moves no further than its target, so ||v - v*|| <= ||g||. And
    because both are nearest points, m times the weight off the face is at most ||g||^2 / 4.
    Rounding of the slopes is charged for elsewhere, with the spectrum of the face.
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
    if least < _tie_tolerance(problem, nearest) / 4:
        return missed, math.inf
    return missed, missed**2 / (2.0 * least)


def _stays_off(problem: Problem, lam: float, nearest: Floats, solution: Solution) -> bool:
    """Whether every client off the face stays at its bound at this lam, by the slopes s.

    With l the slope on the face, this needs s_i - l >= lam (rows_i . w + theta) at zero and
    s_i - l <= lam (rows_i . w + theta - u_i / n_i) at the cap, by more than rounding.
    """
    slopes, status = _slopes(problem, nearest), _face_status(problem, nearest)
    level = slopes[linear_minimiser(slopes, problem.upper) > 0.0].max()
    pull = lam * (problem.rows @ solution.w + solution.theta)
    zero, capped = status == AT_ZERO, status == AT_CAP
    least = slopes[zero] - level - pull[zero]
    most = slopes[capped] - level - pull[capped] + lam * (problem.upper / problem.sizes)[capped]
    margin = _tie_tolerance(problem, nearest) / 4
    return bool((least >= margin).all() and (most <= -margin).all())


def _least_squares_on_target(problem: Problem) -> Solution:
    """min sum a_i^2/n_i with S^T a = T, T in the hull: the limit lam -> 0+ of `minimise`.

    A small lam usually has the active set of the limit. If not, because the regulariser hides some
    very small weight, a smaller lam is tried, where only the interior-point method is reliable. As
    a last resort its own point is moved onto the target.
    """
    if problem.upper.sum() <= 1.0 + 1e-12:
        # The caps leave a single point, with every client at its cap.
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
    """`near` with its weights changed, by as little as possible in relative terms, to S^T a = T."""
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


def _face_status(problem: Problem, nearest: Floats) -> Codes:
    """The status [M] of clients at v: free where the slope equals that at which filling stops.

    "Filling" gives weight to clients in ascending order of slopes until the sum is 1
    (`linear_minimiser`). For label counts ties are exact (all clients without an example of some
    class lie on one face), so the tolerance only has to cover rounding. If T is in the hull, all
    slopes are rounding and all clients are free.
    """
    slopes = _slopes(problem, nearest)
    status = np.full(slopes.shape, FREE)
    if float(np.linalg.norm(nearest @ problem.rows)) <= ON_TARGET:
        return status
    level = slopes[linear_minimiser(slopes, problem.upper) > 0.0].max()
    tie = _tie_tolerance(problem, nearest) + linear_gap(slopes, nearest, problem.upper)
    status[(slopes > level + tie) & (nearest <= 0.0)] = AT_ZERO
    status[(slopes < level - tie) & (nearest >= problem.upper)] = AT_CAP
    return status


def _tie_tolerance(problem: Problem, nearest: Floats) -> float:
    """Slopes that differ by less count as equal. It scales as the rounding of the products does."""
    scale = _largest_distance(problem, nearest) + float(np.linalg.norm(nearest @ problem.rows))
    return TIE * min(1.0, scale)


def _slopes(problem: Problem, nearest: Floats) -> Floats:
    """(S_i - T) . (v - T), half the gradient of the squared distance at v, [M]."""
    slopes: Floats = problem.rows @ (nearest @ problem.rows)
    return slopes
