"""Exact solution on a guessed active set, repair of that guess, and a proven error bound.

The active set says which weights are at zero, at their cap, or free between the two. With
r = T - S^T a and w = r / lam, the optimum of f has a_i = clip(n_i (rows_i . w + theta), 0, u_i); a
price subtracts n_i price_i / (2 lam) inside the clip (`simplex.pull`).

All formulas use w and theta, not the gradient: both stay of moderate size as lam -> 0, and at
lam = 0 they are the multipliers of the max-ESS problem min sum a_i^2 / n_i subject to S^T a = v.
So the same code serves every lam >= 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import scipy.linalg

from fedshift.server.rounding import ON_TARGET, RANK_TOLERANCE
from fedshift.server.simplex import (
    AT_CAP,
    AT_ZERO,
    FREE,
    Codes,
    Floats,
    Problem,
    Solution,
    allocate,
    pull,
    residual,
)

# Block pivoting either settles within a few rounds or cycles between near-ties.
BLOCK_ROUNDS = 12
RATIO_ROUNDS = 400
# The ratio-test method gives up after so many multiply-adds (M K min(M, K) a round): some seconds.
RATIO_WORK = 5e9
# With a bound on ||a - a*||_1 below this, further pivoting would only chase rounding errors.
SETTLED = 1e-10
# With an error bound below this, the ratio-test method is not worth its cost.
GOOD = 1e-8
# If the span of a face is further than this from the target, the face does not reach the target. A
# smaller distance may be rounding in a nearly dependent span. This only guides pivoting; no proof
# depends on it.
MISSED = 1e-13
# Stands for lam -> 0 where a residual above rounding is divided by it: the quotient then exceeds
# every finite multiplier.
VANISHING = 1e-18
# Up to this pull of prices on weights, in L1, the terms with and without a price add without
# cancellation. Beyond it a price is split (`_split_price`).
MILD = 1e5


@dataclass(frozen=True)
class Face:
    """The exact minimiser if all weights at a bound stay there: weights [M], w, theta.

    The free weights may lie outside their bounds.
    """

    weights: Floats
    w: Floats
    theta: float


def solve_face(problem: Problem, lam: float, status: Codes, *, exact: bool = False) -> Face:
    """Minimise f with all weights at a bound fixed; the free ones only have to sum to the rest.

    With free mass m, free total n_F and n-weighted mean row p: a_F = m n_F / n + sqrt(n) u, where
    u = argmin ||d - X^T u||^2 + lam ||u||^2, X = sqrt(n) (rows - p), d = -m p - rows_U^T u_U.
    lam = 0 means lam -> 0+: the least-norm u, i.e. the largest effective sample size. `exact` takes
    the orthogonal solver instead of the faster normal equations. A price needs lam > 0; it moves
    the target as far as the rows can express it (`_split_price`).
    """
    free, at_cap = status == FREE, status == AT_CAP
    weights = np.where(at_cap, problem.upper, 0.0)
    if not free.any():
        return _solve_vertex(problem, lam, status, weights)
    sizes, rows = problem.sizes[free], problem.rows[free]
    total, root = sizes.sum(), np.sqrt(sizes)
    mean = sizes @ rows / total
    mass = 1.0 - weights.sum()
    x = rows - mean
    x *= root[:, None]
    d = -mass * mean - weights[at_cap] @ problem.rows[at_cap]

    solve = _solve_orthogonal if exact or lam == 0.0 else _solve_ridge
    # Singular values of X below this are rounding: X is scaled by sqrt(n).
    noise = RANK_TOLERANCE * math.sqrt(total)
    if problem.price is None:
        u, w = solve(x, d, lam, noise)
        level = 0.0
    else:
        level = float(sizes @ problem.price[free] / total) / (2.0 * lam)
        c = root * (problem.price[free] / 2.0 - level * lam)
        if math.sqrt(total) * float(np.linalg.norm(c)) <= MILD * lam:
            # A linear term moves the centre of the ridge: u = v - c / lam, where v solves the
            # problem for d + X^T c / lam.
            u, w = solve(x, d + c @ x / lam, lam, noise)
            u = u - c / lam
        else:
            moved, rest = _split_price(x, c)
            u, w = solve(x, d - moved, lam, noise)
            u, w = u - rest / lam, w + moved / lam
    # root . u is 0 but for rounding; remove that, or it would change the total weight.
    u -= root * (root @ u) / total
    weights[free] = mass * sizes / total + root * u
    return Face(weights, w, float(mass / total - mean @ w) + level)


def _split_price(x: Floats, c: Floats) -> tuple[Floats, Floats]:
    """(q, c - X q), where q [K] is the least-squares solution of X q = c.

    Then 2 c . u = 2 q . X^T u + 2 (c - X q) . u, so ||d - X^T u||^2 + 2 c . u equals
    ||d - q - X^T u||^2 + 2 (c - X q) . u up to a constant. For a small lam the second form is
    needed: the first one divides the whole price by lam, and the large terms cancel.
    """
    q, rest = np.zeros(x.shape[1]), c
    for _ in range(2):  # the second pass corrects the rounding of the first
        q = q + np.linalg.lstsq(x, rest, rcond=RANK_TOLERANCE)[0]
        rest = c - x @ q
    rounding = 1e-15 * (np.abs(c) + np.abs(x) @ np.abs(q))
    return q, np.where(np.abs(rest) <= rounding, 0.0, rest)


def _solve_vertex(problem: Problem, lam: float, status: Codes, weights: Floats) -> Face:
    w = residual(problem, weights) / lam if lam > 0.0 else np.zeros(problem.rows.shape[1])
    # Without a free weight theta may be anything between two bounds: take the middle.
    score = pull(problem, lam, w, 0.0)
    highest = -score[status == AT_ZERO]
    lowest = (problem.upper / problem.sizes - score)[status == AT_CAP]
    ends = np.array([highest.min(initial=np.inf), lowest.max(initial=-np.inf)])
    return Face(weights, w, float(ends[np.isfinite(ends)].mean()))


def _solve_ridge(x: Floats, d: Floats, lam: float, noise: float) -> tuple[Floats, Floats]:
    """u and w = (d - X^T u) / lam for the ridge problem of `solve_face`, by normal equations."""
    try:
        return (
            _solve_ridge_wide(x, d, lam)
            if x.shape[0] < x.shape[1]
            else _solve_ridge_tall(x, d, lam)
        )
    except scipy.linalg.LinAlgError:
        return _solve_orthogonal(x, d, lam, noise)


def _solve_ridge_tall(x: Floats, d: Floats, lam: float) -> tuple[Floats, Floats]:
    inner = x.T @ x
    shifted = inner.copy()
    shifted[np.diag_indices_from(shifted)] += lam
    factor = scipy.linalg.cho_factor(shifted, overwrite_a=True, check_finite=False)
    w = scipy.linalg.cho_solve(factor, d, check_finite=False)
    # Iterative refinement, because the normal equations square the condition number.
    for _ in range(2):
        w += scipy.linalg.cho_solve(factor, d - (inner @ w + lam * w), check_finite=False)
    return x @ w, w


def _solve_ridge_wide(x: Floats, d: Floats, lam: float) -> tuple[Floats, Floats]:
    inner = x @ x.T
    inner[np.diag_indices_from(inner)] += lam
    factor = scipy.linalg.cho_factor(inner, overwrite_a=True, check_finite=False)
    u = scipy.linalg.cho_solve(factor, x @ d, check_finite=False)
    for _ in range(2):
        u += scipy.linalg.cho_solve(factor, x @ (d - u @ x) - lam * u, check_finite=False)
    w = (d - u @ x) / lam
    # Dividing by a small lam magnifies rounding. Refining u = X w restores the part of w on which
    # the weights depend.
    for _ in range(2):
        w += scipy.linalg.cho_solve(factor, u - x @ w, check_finite=False) @ x
    return u, w


def _solve_orthogonal(x: Floats, d: Floats, lam: float, noise: float) -> tuple[Floats, Floats]:
    """`_solve_ridge` by singular vectors, also for lam = 0 (u is then the shortest solution).

    It avoids two errors of the normal equations. In w, the part of d outside the span of the rows
    is divided by lam; here it cannot leak into u. And u is not computed as X w, which cancels if
    clients of 1 and of 1e5 examples are on one face.
    """
    # QR first: then the SVD is of a small triangle instead of a tall matrix.
    q, triangle = np.linalg.qr(x)
    left, values, basis = np.linalg.svd(triangle, full_matrices=False)
    keep = values > noise
    left, values, basis = q @ left[:, keep], values[keep], basis[keep]
    filtered = values / (values**2 + lam)
    u = left @ (filtered * (basis @ d))
    if lam == 0.0:
        # One step of iterative refinement: without a ridge, S^T a = v must hold to rounding.
        u += left @ (filtered * (basis @ (d - u @ x)))
    w = ((basis @ d) / (values**2 + lam)) @ basis
    missed = d - (basis @ d) @ basis
    if lam > 0.0:
        w = w + missed / lam
    elif float(np.linalg.norm(missed)) > MISSED:
        # The face does not reach the target, so w = r / lam grows without limit as lam -> 0: make
        # it so large that r alone decides the signs of the multipliers.
        w = w + missed / VANISHING
    return u, w


def allocation_gap(
    problem: Problem, weights: Floats, w: Floats, theta: float, lam: float = 0.0
) -> float:
    """sum_i [(a_i - n_i h_i)^2 - (b_i - n_i h_i)^2] / n_i, h = `pull`, b = clip(n h, 0, u).

    How far sum_i a_i^2/n_i - 2 h . a is above its minimum over the box; no term is negative.
    `lam` is used only if the problem has a price.
    """
    wanted = problem.sizes * pull(problem, lam, w, theta)
    best = np.clip(wanted, 0.0, problem.upper)
    terms = (weights - best) * (weights + best - 2.0 * wanted) / problem.sizes
    return float(np.maximum(terms, 0.0).sum())


def error_bound(problem: Problem, lam: float, weights: Floats, w: Floats, theta: float) -> float:
    """A proven bound on ||a - a*||_1: sqrt(N G / lam) with G the Fenchel duality gap.

    For any w and theta, G / lam = ||r - lam w||^2 / lam + `allocation_gap`, and f(a) - f* <= G
    because ||r||^2 >= 2 lam w . r - lam^2 ||w||^2. f is 2 lam-strongly convex in the norm
    sum a_i^2/n_i, which gives the bound. No term is negative, so nothing cancels. G is of second
    order in the error of w, the Frank-Wolfe gap only of first.
    At lam = 0, a* is the max-ESS point among the weights with the same S^T a, and the bound is inf
    unless S^T a = T up to rounding. Errors by rounding of the data come on top, see
    `rounding_error`.
    """
    r = residual(problem, weights)
    gap = allocation_gap(problem, weights, w, theta, lam)
    if lam > 0.0:
        mismatch = r / lam - w
        gap += lam * float(mismatch @ mismatch)
    elif float(np.linalg.norm(r)) > ON_TARGET:
        return float(np.inf)
    return float(np.sqrt(problem.total * gap))


def _candidate(problem: Problem, lam: float, face: Face, status: Codes) -> Solution:
    """The face's minimiser made feasible, with its error bound."""
    weights = np.clip(face.weights, 0.0, problem.upper)
    # Clipping changes the sum of the weights. Re-allocate only if the change exceeds rounding.
    short = 1.0 - weights.sum()
    if abs(short) > 1e-15:
        weights = allocate(face.weights / problem.sizes, problem.sizes, problem.upper)
    error = error_bound(problem, lam, weights, face.w, face.theta)
    return Solution(weights, status, face.w, face.theta, error)


@dataclass(frozen=True)
class _Faults:
    """What the minimiser of a face violates, [M] each.

    below, above  free weights outside their bounds
    release       by how much the multiplier of a weight at a bound has the wrong sign, else 0
    """

    below: Codes
    above: Codes
    release: Floats

    @property
    def infeasible(self) -> bool:
        return bool(self.below.any() or self.above.any())


def _find_faults(problem: Problem, lam: float, status: Codes, face: Face) -> _Faults:
    # Smaller violations are rounding, and pivoting on them would cycle.
    tolerance = 1e-13 / problem.sizes.size
    rounding = problem.sizes * (1e-15 * float(np.linalg.norm(face.w)))
    free = status == FREE
    wanted = problem.sizes * pull(problem, lam, face.w, face.theta)
    release = np.where(status == AT_ZERO, wanted, 0.0)
    release = np.where(status == AT_CAP, problem.upper - wanted, release)
    return _Faults(
        (free & (face.weights < -tolerance)).astype(np.int8),
        (free & (face.weights > problem.upper + tolerance)).astype(np.int8),
        np.where(release > tolerance + rounding, release / problem.sizes, 0.0),
    )


def block_pivots(problem: Problem, lam: float, status: Codes) -> Iterator[Solution]:
    """Pivot all violators at once: fix weights until the face is feasible, then free some, and so
    on.
    """
    for _ in range(BLOCK_ROUNDS):
        face = solve_face(problem, lam, status)
        yield _candidate(problem, lam, face, status)
        faults = _find_faults(problem, lam, status, face)
        following = status.copy()
        if faults.infeasible:
            following[faults.below > 0] = AT_ZERO
            following[faults.above > 0] = AT_CAP
        else:
            following[faults.release > 0.0] = FREE
        if np.array_equal(following, status):
            break
        status = following
    if lam > 0.0:
        # The normal equations may have been too inaccurate for a proof: solve the last face again.
        yield _candidate(problem, lam, solve_face(problem, lam, status, exact=True), status)


def ratio_tests(problem: Problem, lam: float, start: Solution) -> Iterator[Solution]:
    """Primal active-set method from a feasible point; ends, because f falls at each full step."""
    weights, status = start.weights.copy(), start.status.copy()
    # Take the status from the weights: `_candidate` may have clipped free ones to a bound.
    status[weights <= 0.0], status[weights >= problem.upper] = AT_ZERO, AT_CAP
    status[(weights > 0.0) & (weights < problem.upper)] = FREE
    affordable = 5 + int(RATIO_WORK / (problem.rows.size * min(problem.rows.shape)))
    for _ in range(min(RATIO_ROUNDS, affordable)):
        face = solve_face(problem, lam, status)
        faults = _find_faults(problem, lam, status, face)
        if faults.infeasible:
            weights, status = _step_towards(problem, weights, face.weights, status, faults)
            continue
        weights = face.weights
        yield _candidate(problem, lam, face, status)
        if not faults.release.any():
            return
        status = _release(status, faults.release)


def _step_towards(
    problem: Problem, weights: Floats, goal: Floats, status: Codes, faults: _Faults
) -> tuple[Floats, Codes]:
    """(weights, status) after the longest feasible step towards the face's minimiser `goal`."""
    step = goal - weights
    reach = np.full_like(weights, np.inf)
    below = (faults.below > 0) & (step < 0.0)
    above = (faults.above > 0) & (step > 0.0)
    reach[below] = -weights[below] / step[below]
    reach[above] = (problem.upper - weights)[above] / step[above]
    length = max(float(reach.min()), 0.0)
    hit = reach <= length
    following = status.copy()
    following[hit & below], following[hit & above] = AT_ZERO, AT_CAP
    moved = np.clip(weights + min(length, 1.0) * step, 0.0, problem.upper)
    moved[hit & below], moved[hit & above] = 0.0, problem.upper[hit & above]
    return moved, following


def _release(status: Codes, release: Floats) -> Codes:
    """Free the worst violator; if no weight is free, the worst at each bound.

    Two are needed in that case, because the sum of the weights must stay 1.
    """
    following = status.copy()
    if (status == FREE).any():
        following[int(np.argmax(release))] = FREE
        return following
    for bound in (AT_ZERO, AT_CAP):
        if (status == bound).any():
            following[int(np.argmax(np.where(status == bound, release, -np.inf)))] = FREE
    return following


def pivots(problem: Problem, lam: float, status: Codes) -> Iterator[Solution]:
    """Candidates from a guessed status [M]: by block pivoting and, if that fails, ratio tests."""
    best = None
    for candidate in block_pivots(problem, lam, status):
        yield candidate
        best = candidate if best is None or candidate.error < best.error else best
    if best is not None and best.error > GOOD:
        yield from ratio_tests(problem, lam, best)


def polish(problem: Problem, lam: float, status: Codes, *, fallback: bool = True) -> Solution:
    """The best solution from pivoting at a guessed status [M], with its proven L1 error.

    Solutions are compared by their error bounds, not by the signs of their multipliers, which are
    noise in near-ties.
    """
    method = pivots if fallback else block_pivots
    candidates = method(problem, lam, status)
    best = next(candidates)
    while best.error > SETTLED and (candidate := next(candidates, None)) is not None:
        best = min(best, candidate, key=lambda s: s.error)
    return best
