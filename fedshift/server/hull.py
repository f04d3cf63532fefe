"""The limit lam -> 0: the point of the clients' hull nearest to the target, and its weights.

The hull (with caps, a part of it) is {S^T a : sum a = 1, 0 <= a <= u}. Its point nearest to T is
unique; the weights that mix to it are not, and the limit takes those with the largest ESS.
"""

from __future__ import annotations

import math

import numpy as np
import scipy.optimize

from fedshift.server.dual import (
    NO_CAP,
    ON_TARGET,
    TINY,
    Flags,
    Floats,
    Problem,
    Solution,
    linear_gap,
    linear_minimiser,
    optimum,
)
from fedshift.server.rounding import charge, span_part

# Slopes that differ by less (besides the gap of the projection) count as equal, for clients whose
# rows differ by 1.
TIE = 1e-14
# A projection with this gap is exact, for clients that differ by more than `APART`; for others the
# gap must be smaller, in proportion to the square of their distance.
EXACT, APART = 1e-15, 1e-2
STEPS = 400


def project(rows: Floats, upper: Floats | None = None) -> Floats:
    """Some weights [M] that mix to the point of the (capped) hull of the rows nearest to 0.

    Without a cap by non-negative least squares (Lawson & Hanson 1974, ch. 23). With one, or if
    clients differ so little that their differences are lost there, by an active-set method.
    """
    bound = np.full(len(rows), NO_CAP) if upper is None else upper
    if (bound >= 1.0).all():
        try:
            near = _by_columns(rows)
            if _gap(rows, bound, near) <= _exact_gap(rows, near):
                return near
        except RuntimeError:
            pass  # out of iterations
    # The distance does not depend on sizes, and equal ones keep the faces well conditioned.
    even = Problem(rows, np.ones(len(rows)), bound)
    reach = float(np.einsum("ij,ij->i", rows - rows.mean(0), rows - rows.mean(0)).max())
    return _active_set(rows, bound, optimum(even, 1e-8 * len(rows) * max(reach, 1e-16)).weights)


def _by_columns(rows: Floats) -> Floats:
    """min ||rows^T x||^2 + (1 . x - 1)^2 over x >= 0, a multiple of the weights, by columns.

    Solves for a pool of clients, and adds those that would reduce the distance.
    """
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


def _active_set(rows: Floats, upper: Floats, weights: Floats) -> Floats:
    """The nearest point from weights near it: least squares on the free clients, up to a bound."""
    best, least, a, again = weights, math.inf, weights, 2
    free = (a > 0.0) & (a < upper)
    for _ in range(STEPS):
        v = a @ rows
        gap = _gap(rows, upper, a)
        best, least = (a, gap) if gap < least else (best, least)
        # At a distance of nearly 0 some steps more tell whether it is 0.
        again -= least <= _exact_gap(rows, best)
        if again == 0 or (again < 2 and not ON_TARGET < float(np.linalg.norm(v)) < 1e-10):
            break
        if not free.any():
            free = (a > 0.0) & (a < upper)
        step, length = np.zeros_like(a), 1.0
        if free.any():
            part = rows[free] - rows[free].mean(0)
            step[free] = np.linalg.lstsq(part.T, -v, rcond=1e-14)[0]
            step[free] -= step[free].mean()  # its sum is 0 but for rounding
            room = np.where(step < 0.0, a, upper - a)
            with np.errstate(divide="ignore", invalid="ignore"):
                reach = np.where(step != 0.0, room / np.abs(step), np.inf)
            length = min(1.0, float(reach.min()))
            a = np.clip(a + length * step, 0.0, upper)
        if length < 1.0:
            hit = reach <= length
            a = np.where(hit, np.where(step < 0.0, 0.0, upper), a)
            free = free & ~hit
            continue
        # Free the worst at each bound.
        slopes = rows @ (a @ rows)
        level = slopes[linear_minimiser(slopes, upper) > 0.0].max()
        wrong = np.where(a <= 0.0, level - slopes, np.where(a >= upper, slopes - level, 0.0))
        free = (a > 0.0) & (a < upper)
        for bound in (a <= 0.0, a >= upper):
            if (wrong[bound] > 0.0).any() or not free.any():
                free = free | (bound & (wrong == wrong[bound].max(initial=-np.inf)))
    return best


def _gap(rows: Floats, upper: Floats, weights: Floats) -> float:
    """The Frank-Wolfe gap of the squared distance to 0."""
    return linear_gap(2.0 * (rows @ (weights @ rows)), weights, upper)


def _exact_gap(rows: Floats, weights: Floats) -> float:
    """The gap up to which a projection counts as exact."""
    return EXACT * min(1.0, (_widest(rows, weights) / APART) ** 2)


def _widest(rows: Floats, weights: Floats) -> float:
    """max_i ||S_i - S^T a||: the largest distance of a client from the given mixture."""
    offsets = rows - weights @ rows
    return float(np.sqrt(np.einsum("ij,ij->i", offsets, offsets).max()))


# --------------------------------------------------------------------------- the largest ESS there


def limit(problem: Problem, nearest: Floats, barred: Flags, lam: float = 0.0) -> Solution:
    """The limit lam -> 0: least sum a_i^2/n_i among the weights whose S^T a is nearest to T.

    nearest  [M], some weights that mix to the nearest point v
    barred   [M], clients that have weight 0 in all such weights
    lam      one so small that the face is that of the limit; if it is not, the error is inf

    Slopes (S_i - T) . (v - T) of the distance show which clients are on the face of the hull that v
    lies on. The others are fixed at a bound, and `optimum` solves for the face, with v as target.
    """
    rows, upper = problem.rows, problem.upper
    r, slopes = nearest @ rows, rows @ (nearest @ rows)
    length = float(np.linalg.norm(r))
    barred = barred & (lam == 0.0)
    at_zero, capped = barred.copy(), np.zeros_like(barred)
    tie = TIE * min(1.0, _widest(rows, nearest) + length)
    level = slopes[linear_minimiser(slopes, upper) > 0.0].max()
    if length > ON_TARGET:
        near, slack = tie + linear_gap(slopes, nearest, upper), 1e-13 / len(rows)
        at_zero |= (slopes > level + near) & (nearest <= slack)
        capped = (slopes < level - near) & (nearest >= upper - slack) & ~barred
    free = ~at_zero & ~capped
    fixed = np.where(capped, upper, 0.0)
    mass = 1.0 - float(fixed.sum())
    missed, off_face = _off(problem, nearest, free, capped, barred, tie)
    if mass < 1e-14 or not free.any():
        return Solution(nearest, 0.0 * r, 0.0, off_face)
    # As a mixture of the free rows, because v minus the fixed part would cancel.
    shift = nearest[free] @ rows[free] / max(float(nearest[free].sum()), TINY)
    counts = None if problem.counts is None else problem.counts[free]
    part = Problem(rows[free] - shift, problem.sizes[free], upper[free] / mass, counts)
    exact = optimum(part, lam)
    error = exact.error + charge(part, lam, exact, length / mass, missed / mass)
    weights, scale = fixed.copy(), mass / float(problem.share[free].sum())
    weights[free] = mass * exact.weights
    w = scale * exact.w
    theta = scale * exact.theta - float(shift @ w)
    if lam > 0.0 and not free.all():
        # The face holds if every other client's slope stays beyond lam's pull, by more than ties.
        pull = lam / float(problem.sizes.sum()) * (rows @ w + theta)
        over = np.where(capped, lam * upper / problem.sizes + slopes - level - pull, 0.0)
        over = np.where(at_zero, level + pull - slopes, over)
        off_face = off_face if bool((over[~free] <= -tie / 4).all()) else math.inf
    return Solution(weights, w, theta, mass * error + off_face)


def _off(
    problem: Problem, nearest: Floats, free: Flags, capped: Flags, barred: Flags, tie: float
) -> tuple[float, float]:
    """(how far v can be from the true nearest point v*, the weight of v* off the face in L1).

    Let g be the part of v - T in the span of the face, and s_i = (S_i - v) . (v - T - g). If
    s_i >= m for all clients at zero and s_i <= -m at their cap, m > 0, then v is the exact
    projection of T + g. A projection moves no further than its target, so ||v - v*|| <= ||g||. And
    because both are nearest points, m times the weight off the face is at most ||g||^2 / 4.
    """
    off = nearest @ problem.rows
    missed, weight = float(np.linalg.norm(off)), 0.0
    if missed > ON_TARGET and free.any():
        rows = problem.rows[free]
        g = span_part(rows - rows.mean(axis=0), off)
        slopes = problem.rows @ (off - g)
        level = float(slopes[free].mean())
        margins = np.where(capped, level - slopes, slopes - level)[~barred & ~free]
        missed = min(float(np.linalg.norm(g)), missed)
        least = float(margins.min(initial=np.inf))
        weight = missed**2 / (2.0 * least) if least >= tie / 4 else math.inf
    if problem.counts is not None and barred.any():
        # If v* has the share v_k of a label and a client s_k, its weight is at most v_k / s_k.
        shares = problem.counts / problem.counts.sum(axis=1, keepdims=True)
        mixed, has = nearest @ shares + missed, shares[barred]
        most = np.divide(mixed, has, out=np.full_like(has, np.inf), where=has > 0.0)
        weight += 2.0 * float(most.min(axis=1).sum())
    return missed, weight
