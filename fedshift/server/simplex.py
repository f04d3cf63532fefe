"""Problems on the capped simplex, sum a = 1 and 0 <= a <= u: types, objective, gap, projection.

    f(a) = ||T - S^T a||^2 + lam * sum_i a_i^2 / n_i + price . a

A problem stores the rows S_i - T, not S and T. On the simplex T - S^T a = -rows^T a, so f has no
linear term, and a residual near zero is computed without cancellation between large terms. Most
problems have no price.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Codes = NDArray[np.int8]
Flags = NDArray[np.bool_]

# Weights on the simplex are at most 1, so an upper bound of 2 is never active.
NO_CAP = 2.0
# If the sum of weights differs from 1 by more than this, it is more than ordinary rounding.
DRIFTED = 1e-9
TINY = float(np.finfo(float).tiny)
AT_ZERO, FREE, AT_CAP = np.int8(-1), np.int8(0), np.int8(1)


@dataclass(frozen=True)
class Problem:
    """A problem for clients of positive size, with the target as the origin.

    rows    [M, K], S_i - T
    sizes   [M], n_i
    upper   [M], the caps; `NO_CAP` for none
    counts  [M, K], the exact numbers from which rows were rounded, each row up to a factor; or None
    price   [M], cost per unit of weight; or None
    """

    rows: Floats
    sizes: Floats
    upper: Floats
    counts: Floats | None = None
    price: Floats | None = None

    @property
    def total(self) -> float:
        """N = sum_i n_i."""
        return float(self.sizes.sum())


@dataclass(frozen=True)
class Solution:
    """Weights [M], their status [M] (zero, free, at cap), and multipliers w [K] and theta.

    `error` is a proved bound on ||a - a*||_1, see `error_bound`.
    """

    weights: Floats
    status: Codes
    w: Floats
    theta: float
    error: float


def residual(problem: Problem, weights: Floats) -> Floats:
    """r = T - S^T a, [K]."""
    r: Floats = -(weights @ problem.rows)
    return r


def allocate(scores: Floats, sizes: Floats, upper: Floats) -> Floats:
    """argmin_a sum_i a_i^2 / n_i - 2 scores . a over the capped simplex, exactly, [M].

    a_i = clip(n_i (scores_i + theta), 0, u_i), where theta makes the sum one: the sum is piecewise
    linear and increasing in theta, so theta follows from its 2M sorted breakpoints.
    """
    breaks = np.concatenate([-scores, upper / sizes - scores])
    # Between two breakpoints the sum is linear; its slope is the total size of the free clients.
    order = np.argsort(breaks, kind="stable")
    sorted_breaks = breaks[order]
    slope = np.cumsum(np.concatenate([sizes, -sizes])[order])
    mass = np.concatenate([[0.0], np.cumsum(slope[:-1] * np.diff(sorted_breaks))])
    k = max(int(np.searchsorted(mass, 1.0, side="left")) - 1, 0)
    theta = sorted_breaks[k] + (1.0 - mass[k]) / slope[k] if slope[k] > 0.0 else sorted_breaks[k]
    weights: Floats = np.clip(sizes * (scores + theta), 0.0, upper)
    free = (weights > 0.0) & (weights < upper)
    # Cumulative sums over 2M terms lose a few digits, so rebalance once over the free clients.
    short = 1.0 - weights.sum()
    weights[free] += short * sizes[free] / max(sizes[free].sum(), TINY)
    np.clip(weights, 0.0, upper, out=weights)
    if abs(float(weights.sum()) - 1.0) > DRIFTED:
        return _allocate_by_bisection(scores, sizes, upper, sorted_breaks)
    return weights


def _allocate_by_bisection(scores: Floats, sizes: Floats, upper: Floats, breaks: Floats) -> Floats:
    """`allocate` for sizes that differ so much that cumulative sums lose the small ones.

    Bisection over the sorted breakpoints locates theta, and computes each sum from scratch.
    """
    low, high = 0, breaks.size - 1
    while high - low > 1:
        middle = (low + high) // 2
        full = np.clip(sizes * (scores + breaks[middle]), 0.0, upper).sum() >= 1.0
        low, high = (low, middle) if full else (middle, high)
    start = np.clip(sizes * (scores + breaks[low]), 0.0, upper)
    free = (-scores <= breaks[low]) & (upper / sizes - scores >= breaks[high])
    weights = start.copy()
    weights[free] += (1.0 - start.sum()) * sizes[free] / max(sizes[free].sum(), TINY)
    filled: Floats = np.clip(weights, 0.0, upper)
    return filled


def objective(problem: Problem, lam: float, weights: Floats) -> float:
    """f(a) = ||T - S^T a||^2 + lam * sum_i a_i^2 / n_i + price . a."""
    r = residual(problem, weights)
    f = float(r @ r + lam * np.sum(weights**2 / problem.sizes))
    return f if problem.price is None else f + float(problem.price @ weights)


def gradient(problem: Problem, lam: float, weights: Floats) -> Floats:
    """g = -2 (S - 1 T^T) r + 2 lam a / n + price, [M]: the gradient of f up to a constant."""
    g: Floats = 2.0 * lam * weights / problem.sizes
    g -= 2.0 * (problem.rows @ residual(problem, weights))
    if problem.price is not None:
        g += problem.price
    return g


def pull(problem: Problem, lam: float, w: Floats, theta: float) -> Floats:
    """h = rows w + theta - price / (2 lam), [M]: the optimum has a_i = clip(n_i h_i, 0, u_i)."""
    h: Floats = problem.rows @ w + theta
    return h if problem.price is None else h - problem.price / (2.0 * lam)


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
