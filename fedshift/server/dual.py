"""FedPALS' programme by its dual: minimise ||T - S^T a||^2 + lam sum_i a_i^2/n_i on the simplex.

    sum_i a_i = 1,   0 <= a_i <= u_i

Whatever lam is, the optimum is a_i = clip(n_i (x_i . w + theta), 0, u_i), x_i = S_i - T, for the
(w, theta) that maximise the concave dual

    D(w, theta) = 2 theta - lam ||w||^2 + sum_i a_i^2/n_i - 2 a_i (x_i . w + theta),

a function of K + 1 numbers, however many clients there are. Its gradient is piecewise linear, so
that Newton's method ends after a few steps. D is at most f(a) / lam for every feasible a, which
proves how good a is. At lam = 0, D is the dual of the largest ESS among the weights with S^T a = T.

Inside, sizes are divided by N: m = n / N, ridge = lam / N, and w and theta are N times those above.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import scipy.linalg
import scipy.optimize
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

# Weights on the simplex are at most 1, so an upper bound of 2 is never active.
NO_CAP = 2.0
# With a proved L1 error below the first, nothing else is tried; below the second, no long search.
SETTLED, GOOD = 1e-10, 1e-8
# Below this ridge the regulariser is lost in the rounding of the residual.
LEAST = 1e-12
# ||T - S^T a|| up to this is rounding.
ON_TARGET = 2e-15
# Singular values of weighted shares below this are rounding.
RANK_TOLERANCE = 1e-15
NEWTON, PIVOTS = 100, 12
TINY = float(np.finfo(float).tiny)


@dataclass(frozen=True)
class Problem:
    """The clients of positive size, with the target as the origin.

    rows    [M, K], S_i - T: a residual near 0 is then computed without cancellation
    sizes   [M], n_i
    upper   [M], u_i; `NO_CAP` for none
    counts  [M, K], the exact numbers from which rows were rounded, each row up to a factor; or None
    """

    rows: Floats
    sizes: Floats
    upper: Floats
    counts: Floats | None = None

    @property
    def share(self) -> Floats:
        """m = n / N, [M]."""
        return np.asarray(self.sizes / self.sizes.sum())

    @property
    def single(self) -> bool:
        """Whether the bounds leave a single point: every client at its own."""
        return bool(self.upper.sum() <= 1.0 + 1e-12)


@dataclass(frozen=True)
class Solution:
    """Weights [M], the multipliers w [K] and theta, and `error`, a proved bound on ||a - a*||_1."""

    weights: Floats
    w: Floats
    theta: float
    error: float


# --------------------------------------------------------------------------- the simplex


def allocate(scores: Floats, sizes: Floats, upper: Floats) -> Floats:
    """argmin_a sum_i a_i^2 / n_i - 2 scores . a over the capped simplex, exactly, [M].

    a_i = clip(n_i (scores_i + theta), 0, u_i), where theta makes the sum one. The sum is piecewise
    linear and increasing in theta; bisection over its 2M breakpoints finds the piece.
    """
    breaks = np.sort(np.concatenate([-scores, upper / sizes - scores]), kind="stable")
    low, high = 0, breaks.size - 1
    while high - low > 1:
        middle = (low + high) // 2
        full = np.clip(sizes * (scores + breaks[middle]), 0.0, upper).sum() >= 1.0 - 1e-15
        low, high = (low, middle) if full else (middle, high)
    weights: Floats = np.clip(sizes * (scores + breaks[low]), 0.0, upper)
    free = (-scores <= breaks[low]) & (upper / sizes - scores >= breaks[high])
    return rebalanced(weights, sizes, upper, free)


def rebalanced(weights: Floats, sizes: Floats, upper: Floats, free: Flags) -> Floats:
    """The weights with what their sum lacks of 1 added to the free ones, in proportion to sizes."""
    weights = weights.copy()
    weights[free] += (1.0 - weights.sum()) * sizes[free] / max(float(sizes[free].sum()), TINY)
    return np.clip(weights, 0.0, upper)


def largest_ess(problem: Problem) -> Floats:
    """The weights of the largest ESS: n / N or, under caps, the nearest to it; lam = inf."""
    weights = problem.share
    if (weights > problem.upper).any():
        weights = allocate(np.zeros_like(weights), problem.sizes, problem.upper)
    return weights


def linear_minimiser(slopes: Floats, upper: Floats) -> Floats:
    """argmin_s slopes . s over the capped simplex: fill the cheapest entries first, [M]."""
    order = np.argsort(slopes, kind="stable")
    before = np.cumsum(upper[order]) - upper[order]
    filled = np.empty_like(slopes)
    filled[order] = np.clip(1.0 - before, 0.0, upper[order])
    return filled


def linear_gap(slopes: Floats, weights: Floats, upper: Floats) -> float:
    """max_s slopes . (a - s) over the capped simplex; with the gradient, the Frank-Wolfe gap.

    Both a and s sum to 1, so a constant may be subtracted from the slopes. The last slope that s
    fills makes every term non-negative, so that nothing cancels.
    """
    best = linear_minimiser(slopes, upper)
    level = slopes[best > 0.0].max()
    return float((slopes - level) @ (weights - best))


def narrow(rows: Floats) -> Floats:
    """If M < K, the rows in an orthonormal basis of their span: same distances, M columns."""
    if rows.shape[0] >= rows.shape[1]:
        return rows
    triangle = scipy.linalg.qr(rows.T, mode="r", check_finite=False)[0][: rows.shape[0]]
    return np.ascontiguousarray(triangle.T)


# --------------------------------------------------------------------------- the dual


def allocation_gap(problem: Problem, weights: Floats, w: Floats, theta: float) -> float:
    """sum_i [(a_i - m_i h_i)^2 - (b_i - m_i h_i)^2] / m_i, h = x w + theta, b = clip(m h, 0, u).

    How far sum_i a_i^2/m_i - 2 h . a is above its minimum over the box; no term is negative.
    """
    m = problem.share
    wanted = m * (problem.rows @ w + theta)
    best = np.clip(wanted, 0.0, problem.upper)
    terms = (weights - best) * (weights + best - 2.0 * wanted) / m
    return float(np.maximum(terms, 0.0).sum())


def _proved(problem: Problem, ridge: float, weights: Floats, w: Floats, theta: float) -> Solution:
    """The weights with the bound sqrt(gap) on ||a - a*||_1, from the duality gap.

    gap = ||r - ridge w||^2 / ridge + `allocation_gap`, r = T - S^T a: f is strongly convex in the
    norm sum a_i^2/m_i. Without a ridge the bound is inf unless r is rounding. Rounding of the data
    comes on top (`fedshift.server.rounding`).
    """
    r = -(weights @ problem.rows)
    gap = allocation_gap(problem, weights, w, theta)
    if ridge > 0.0:
        missed = r / ridge - w
        gap += ridge * float(missed @ missed)
    elif float(np.linalg.norm(r)) > ON_TARGET:
        gap = math.inf
    return Solution(weights, w, theta, math.sqrt(gap))


def _newton(problem: Problem, ridge: float, start: Solution | None) -> Solution:
    """The maximiser of the dual, up to rounding, by Newton's method with exact line searches."""
    m, upper = problem.share, problem.upper
    centre = m @ problem.rows
    table = np.column_stack([problem.rows - centre, np.ones_like(m)])
    linear, ridges = np.append(-centre, 1.0), np.append(np.full(centre.shape, ridge), 0.0)
    y = np.append(np.zeros_like(centre), 1.0)
    if start is not None:
        y = np.append(start.w, start.theta + centre @ start.w)
    for _ in range(NEWTON):
        h = table @ y
        a = np.clip(m * h, 0.0, upper)
        free = (a > 0.0) & (a < upper)
        slope = linear - a @ table - ridges * y  # half of the dual's
        step = _newton_step(table, m, free, ridges, slope)
        k = table @ step
        rise, bend = (linear - ridges * y) @ step, ridges @ step**2
        length = _line_search(h, k, m, upper, float(rise), float(bend))
        y = y + length * step
        after = m * (h + length * k)
        same = bool((free == ((after > 0.0) & (after < upper))).all())
        if (same and abs(length - 1.0) < 1e-3) or float(slope @ step) <= 1e-22:
            break
    a = np.clip(m * (table @ y), 0.0, upper)
    return Solution(a, y[:-1], float(y[-1] - centre @ y[:-1]), math.inf)


def _line_search(h: Floats, k: Floats, m: Floats, upper: Floats, rise: float, bend: float) -> float:
    """The t > 0 with rise - t bend = sum_i k_i clip(m_i (h_i + t k_i), 0, u_i); 1 if that is it.

    The left minus the right is half of the dual's slope along a step. It falls in t, and is linear
    between the t at which some client meets a bound; bisection finds the piece.
    """

    def slope(t: float) -> float:
        return rise - t * bend - float(np.clip(m * (h + t * k), 0.0, upper) @ k)

    first, at_one = slope(0.0), slope(1.0)
    if abs(at_one) <= 1e-10 * first:
        return 1.0
    with np.errstate(divide="ignore", invalid="ignore"):
        breaks = np.concatenate([-h / k, (upper / m - h) / k])
    breaks = np.sort(breaks[np.isfinite(breaks) & (breaks > 0.0)])
    low, high = -1, breaks.size
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if slope(breaks[middle]) > 0.0 else (low, middle)
    start = breaks[low] if low >= 0 else 0.0
    end = breaks[high] if high < breaks.size else 2.0 * start + 1.0
    before, after = slope(start), slope(end)
    return float(start + (end - start) * before / max(before - after, TINY))


def _newton_step(table: Floats, m: Floats, free: Flags, ridges: Floats, slope: Floats) -> Floats:
    # A little of every client, so that no direction is flat where few are free.
    weight = m * (free + 1e-13)
    matrix = (table * weight[:, None]).T @ table
    matrix[np.diag_indices_from(matrix)] += ridges
    scale = np.sqrt(np.maximum(matrix.diagonal(), TINY))
    scaled, goal = matrix / np.outer(scale, scale), slope / scale
    try:
        factor = scipy.linalg.cho_factor(scaled, check_finite=False)
        if factor[0].diagonal().min() > 1e-6:
            return np.asarray(scipy.linalg.cho_solve(factor, goal, check_finite=False) / scale)
    except scipy.linalg.LinAlgError:
        pass
    step = scipy.linalg.lstsq(scaled, goal, cond=1e-14, check_finite=False)[0]
    return np.asarray(step / scale)


# --------------------------------------------------------------------------- exact on a face


def solve_face(problem: Problem, ridge: float, free: Flags, capped: Flags) -> Solution:
    """The exact minimiser if all others stay at their bounds; the free ones may be outside theirs.

    With free mass c, free total m_F and m-weighted mean row p: a_F = c m_F / m + sqrt(m) u, where
    u = argmin ||d - X^T u||^2 + ridge ||u||^2, X = sqrt(m) (rows - p), by singular vectors: at
    ridge = 0 it is the shortest u, the largest ESS. Neither u nor w loses digits by cancellation.
    """
    m, rows = problem.share[free], problem.rows[free]
    weights = np.where(capped, problem.upper, 0.0)
    total, root, mass = float(m.sum()), np.sqrt(m), 1.0 - float(weights.sum())
    mean = m @ rows / total
    x = root[:, None] * (rows - mean)
    d = -mass * mean - weights @ problem.rows
    # QR first: then the SVD is of a small triangle instead of a tall matrix.
    q, triangle = np.linalg.qr(x)
    left, values, basis = np.linalg.svd(triangle, full_matrices=False)
    keep = values > RANK_TOLERANCE * math.sqrt(total)
    left, values, basis = q @ left[:, keep], values[keep], basis[keep]
    filtered = values / (values**2 + ridge)
    u = left @ (filtered * (basis @ d))
    w = ((basis @ d) / (values**2 + ridge)) @ basis
    if ridge > 0.0:
        w = w + (d - (basis @ d) @ basis) / ridge
    else:  # one step of refinement: S^T a = T must hold to rounding
        u += left @ (filtered * (basis @ (d - u @ x)))
    # root . u is 0 but for rounding; remove that, or it would change the total weight.
    u -= root * (root @ u) / total
    weights[free] = mass * m / total + root * u
    return Solution(weights, w, mass / total - float(mean @ w), math.inf)


def pivots(problem: Problem, ridge: float, guess: Solution) -> Solution:
    """The best of the faces reached from a guess by moving all clients that violate a sign."""
    m, upper = problem.share, problem.upper
    free = (guess.weights > 0.0) & (guess.weights < upper)
    capped, best = guess.weights >= upper, guess
    for _ in range(PIVOTS):
        if not free.any():
            break
        face = solve_face(problem, ridge, free, capped)
        feasible = rebalanced(np.clip(face.weights, 0.0, upper), m, upper, free)
        if abs(float(feasible.sum()) - 1.0) > 1e-13:
            feasible = allocate(face.weights / m, m, upper)
        best = min(
            best, _proved(problem, ridge, feasible, face.w, face.theta), key=lambda s: s.error
        )
        # Smaller violations are rounding, and pivoting on them would cycle.
        slack = np.full(m.shape, 1e-13 / m.size)
        low, high = free & (face.weights < -slack), free & (face.weights > upper + slack)
        if low.any() or high.any():
            free, capped = free & ~low & ~high, capped | high
        else:
            wanted = m * (problem.rows @ face.w + face.theta)
            slack += m * (1e-15 * float(np.linalg.norm(face.w)))
            low, high = capped & (wanted < upper - slack), ~free & ~capped & (wanted > slack)
            free, capped = free | low | high, capped & ~low
        if best.error <= SETTLED or not (low.any() or high.any()):
            break
    return best


def optimum(problem: Problem, lam: float, start: Solution | None = None) -> Solution:
    """argmin f at 0 <= lam < inf; at 0, the largest ESS with S^T a = T, which must be in the hull.

    start  a solution at a nearby lam
    """
    if problem.single:
        return Solution(problem.upper / problem.upper.sum(), 0.0 * problem.rows[0], 0.0, 0.0)
    ridge = lam / float(problem.sizes.sum())
    # Without a ridge the dual is flat in places: come from a small one.
    best, guess = None, start
    for near in (ridge,) if ridge > 0.0 else (1e-6, 1e-10, 1e-14, 0.0):
        guess = _newton(problem, near, guess)
        free = (guess.weights > 0.0) & (guess.weights < problem.upper)
        feasible = rebalanced(guess.weights, problem.sizes, problem.upper, free)
        if abs(float(feasible.sum()) - 1.0) > 1e-13:
            feasible = allocate(problem.rows @ guess.w, problem.share, problem.upper)
        found = _proved(problem, ridge, feasible, guess.w, guess.theta)
        if found.error > SETTLED and near <= 1e-10 + ridge:
            found = pivots(problem, ridge, found)
        best = found if best is None or found.error < best.error else best
        if best.error <= GOOD:
            break
    assert best is not None
    return best


# --------------------------------------------------------------------------- searches

Solver = Callable[[float, Solution | None], Solution]
Score = Callable[[float, Solution], float]


def root(solve: Solver, score: Score, low: float, high: float) -> tuple[float, Solution]:
    """(lam, solution) in [low, high] where the score, which falls or rises, is 0: Brent on log lam.

    solve  takes a lam and a solution at a nearby one, from which it starts
    """
    latest: Solution | None = None

    def score_at(log_lam: float) -> float:
        nonlocal latest
        latest = solve(math.exp(log_lam), latest)
        return score(math.exp(log_lam), latest)

    ends = math.log(high), math.log(low)
    values = [score_at(end) for end in ends]
    if values[0] * values[1] > 0.0:
        # Rounding has hidden the change of sign: take the end with the score nearer to 0.
        found = ends[int(abs(values[1]) < abs(values[0]))]
    else:
        known = dict(zip(ends, values, strict=True))  # a warmer start may change the last digits
        again = lambda t: known[t] if t in known else score_at(t)  # noqa: E731
        found = scipy.optimize.brentq(again, *ends, xtol=1e-13, rtol=1e-15)
    return math.exp(found), solve(math.exp(found), latest)


def bracket(solve: Solver, score: Score, total: float) -> tuple[float, float]:
    """(low, high), a factor of 16 apart, with a score below 0 at low and not at high.

    Searched from lam = N, the total, downwards if the score is 0 or more there, else upwards.
    """
    low = high = total
    solution = solve(low, None)
    falling = score(low, solution) >= 0.0
    while True:
        edge = low / 16.0 if falling else high * 16.0
        solution = solve(edge, solution)
        low, high = (edge, low) if falling else (high, edge)
        # Stop at the limits, too: rounding may keep a goal next to the maximum out of reach.
        within = LEAST * total <= edge <= 1e30 * total
        if (score(edge, solution) >= 0.0) != falling or not within:
            return low, high
