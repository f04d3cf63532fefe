"""Merge equal clients, project the target onto their hull, and solve at a lam or an ESS."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import scipy.linalg
import scipy.optimize
from numpy.typing import NDArray

from fedshift.server.active_set import polish
from fedshift.server.hull import max_ess, near_max_ess, project
from fedshift.server.priced import cheapest
from fedshift.server.qp import LEAST_LAM, minimise
from fedshift.server.rounding import rounding_error
from fedshift.server.simplex import (
    AT_CAP,
    FREE,
    NO_CAP,
    Flags,
    Floats,
    Problem,
    Solution,
    allocate,
    gradient,
    linear_gap,
)

# An ESS this close to the wanted one (relative) reaches it.
ESS_TOLERANCE = 1e-12
# A proven L1 error that is good enough: no other method is tried.
PROVEN = 1e-7
# No larger lam / N is tried: there the weights are n / N to the last bit.
MOST_LAM = 1e30
# Below this a label's share is rounding dust.
ABSENT = 1e-14


@dataclass(frozen=True)
class Mixture:
    """Clients with examples, and the smaller problem with the same optimum.

    `full` holds every client; `merged` one row per group, `group` [M] says which. `nearest` are
    weights of `merged` whose S^T a is v, the point of the hull nearest to T. `barred` marks groups
    with examples of a label of which v has none: no weights that mix to v can use them.
    """

    full: Problem
    merged: Problem
    group: NDArray[np.intp]
    nearest: Floats
    barred: Flags

    @property
    def only_equal(self) -> bool:
        """Whether the cap leaves a single point: every client at its cap."""
        return bool(self.full.upper.sum() <= 1.0 + 1e-12)

    def expand(self, weights: Floats) -> Floats:
        """Weights of groups to weights of clients: in a group, a_i is proportional to n_i."""
        share = self.full.sizes / self.merged.sizes[self.group]
        spread = np.minimum(weights[self.group] * share, self.full.upper)
        # A group at its cap is a client at its cap, to the last bit.
        return np.where((weights >= self.merged.upper)[self.group], self.full.upper, spread)


def mixture(
    shares: Floats,
    sizes: Floats,
    target: Floats,
    bound: float,
    counts: Floats | None = None,
    price: Floats | None = None,
) -> Mixture:
    """Merge what is equal and project the target; `shares` [M, K], `sizes` [M], all n_i > 0.

    Equal rows enter f only through their sum, and sum a_i^2/n_i is then least for a_i proportional
    to n_i: the group is one client with n = sum n_i. A cap breaks this where it binds on the larger
    members only, so that with a cap only clients equal in row and size are merged: their weights
    are equal at the (unique) optimum, and the group's cap is the sum of theirs. `counts`, of
    which the shares are the rounding, separate exact ties between clients from near ties. Clients
    of different prices differ.
    """
    # Without a cap clients of equal shares merge whatever their sizes; see the docstring.
    capped = bound < 1.0
    keys = np.column_stack([shares, sizes]) if capped else shares
    if price is not None:
        keys = np.column_stack([keys, price])
    first, group = _equal_rows(keys)
    upper = np.full(sizes.shape, bound if capped else NO_CAP)
    full = Problem(shares - target, sizes, upper, price=price)
    members = np.bincount(group)
    upper = np.minimum(members * bound, NO_CAP) if capped else np.full(first.shape, NO_CAP)
    totals = np.bincount(group, weights=sizes).astype(np.float64)
    exact = None if counts is None else counts[first]
    prices = None if price is None else price[first]
    merged = Problem(narrow(full.rows[first]), totals, upper, exact, prices)
    only_equal = full.upper.sum() <= 1.0 + 1e-12
    nearest = (
        merged.upper / merged.upper.sum() if only_equal else project(replace(merged, price=None))
    )
    # Of embeddings, which may be negative, only a column without a negative entry can say this.
    absent = (nearest @ shares[first] <= ABSENT) & (shares >= 0.0).all(axis=0)
    barred = (shares[first][:, absent] > 0.0).any(axis=1) & (nearest <= ABSENT)
    return Mixture(full, merged, group, nearest, barred)


def _equal_rows(keys: Floats) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """First row of each group and the group of each row; groups sorted by their bytes.

    Division is correctly rounded, so proportional integer counts give bitwise equal shares. The
    sorted order makes the solve independent of the order of the clients, bit for bit.
    """
    # + 0.0 turns -0.0 into 0.0, whose bytes differ.
    rows = np.ascontiguousarray(keys + 0.0)
    as_bytes = rows.view(np.dtype((np.void, rows.itemsize * rows.shape[1]))).ravel()
    _, first, group = np.unique(as_bytes, return_index=True, return_inverse=True)
    return first, group


def narrow(rows: Floats) -> Floats:
    """Rows in an orthonormal basis of their span when M < K: same distances, M columns."""
    if rows.shape[0] >= rows.shape[1]:
        return rows
    triangle = scipy.linalg.qr(rows.T, mode="r", check_finite=False)[0][: rows.shape[0]]
    return np.ascontiguousarray(triangle.T)


def ess_fraction(problem: Problem, weights: Floats) -> float:
    """ESS(a) / N."""
    return float(1.0 / (np.sum(weights**2 / problem.sizes) * problem.total))


def at_lam(clients: Mixture, lam: float) -> Solution:
    """The squared problem at 0 <= lam <= inf.

    Below lam = 1e-12 N the limit lam -> 0+ or its active set solved at lam, whichever is proven
    nearer to the answer at this lam; with neither proven, the one of the smaller gap.
    """
    problem = clients.merged
    zero = np.zeros(problem.rows.shape[1])
    if clients.only_equal:
        capped = np.full(problem.sizes.shape, AT_CAP)
        return Solution(clients.nearest, capped, zero, 0.0, 0.0)
    if lam == math.inf:
        weights = problem.sizes / problem.total
        if (weights > problem.upper).any():
            weights = allocate(np.zeros_like(weights), problem.sizes, problem.upper)
        return Solution(weights, np.full(weights.shape, FREE), zero, 0.0, 0.0)
    if lam >= LEAST_LAM * problem.total:
        return charged(problem, lam, minimise(problem, lam))
    if problem.price is not None:
        return cheapest(problem)
    limit = max_ess(problem, clients.nearest, clients.barred)
    if lam == 0.0:
        return limit
    exact = charged(problem, lam, polish(problem, lam, limit.status, fallback=False))
    refined = near_max_ess(problem, lam, clients.nearest, limit)
    proven = min(exact, refined, key=lambda s: s.error)
    if proven.error <= PROVEN:
        return proven
    unproven = replace(limit, error=math.inf)
    return min(exact, refined, unproven, key=lambda s: _gap(problem, lam, s.weights))


def charged(problem: Problem, lam: float, solution: Solution) -> Solution:
    """The solution, and in its error what rounding of the input can move."""
    if not math.isfinite(solution.error):
        return solution
    return replace(solution, error=solution.error + rounding_error(problem, lam, solution))


Score = Callable[[float, Solution], float]


def root(
    problem: Problem, score: Score, low: float, high: float, limit: Solution
) -> tuple[float, Solution]:
    """lam in [low, high] where the score, monotone in lam, is zero (Brent's method on log lam).

    Each solve starts from the one before; below 1e-12 N from `limit`, the solution at lam -> 0+.
    """
    # Solutions at neighbouring lam share most of their active set: each starts the next.
    latest = minimise(problem, high)

    def score_at(log_lam: float) -> float:
        nonlocal latest
        lam = math.exp(log_lam)
        if lam >= LEAST_LAM * problem.total:
            latest = minimise(problem, lam, latest.status)
        else:
            latest = polish(problem, lam, limit.status, fallback=False)
        return score(lam, latest)

    ends = math.log(high), math.log(low)
    if score_at(ends[0]) * score_at(ends[1]) > 0.0:
        # By rounding there is no sign change: take the end that is nearer to zero.
        log_root = min(ends, key=lambda t: abs(score_at(t)))
    else:
        log_root = scipy.optimize.brentq(score_at, *ends, xtol=1e-13, rtol=1e-15)
    score_at(log_root)
    return math.exp(log_root), charged(problem, math.exp(log_root), latest)


def at_ess(clients: Mixture, fraction: float) -> tuple[float, Solution]:
    """The smallest lam of the squared problem with ESS / N >= fraction, and its solution.

    ESS is non-decreasing in lam, and constant only from 0 up to some lam or where it is at its top.
    A fraction at the top, 1 without a cap, is reached at lam = inf. Returns lam = nan when even
    lam = inf stays below the fraction, which takes a cap.
    """
    problem, goal = clients.merged, fraction * (1.0 - ESS_TOLERANCE)
    bottom = at_lam(clients, 0.0)
    if ess_fraction(problem, bottom.weights) >= goal:
        return 0.0, bottom
    top = at_lam(clients, math.inf)
    highest = ess_fraction(problem, top.weights)
    if goal >= highest * (1.0 - 2.0 * ESS_TOLERANCE):
        return (math.inf if goal <= highest else math.nan), top

    # The logarithm is nearly linear in log lam, which suits Brent's method.
    def log_excess(lam: float, solution: Solution) -> float:
        return math.log(ess_fraction(problem, solution.weights) / fraction)

    return root(problem, log_excess, *_bracket(problem, log_excess), bottom)


def _bracket(problem: Problem, score: Score) -> tuple[float, float]:
    """lam a factor of 16 apart with the score below zero at the first, from lam = N outwards."""
    low = high = problem.total
    solution = minimise(problem, low)
    falling = score(low, solution) >= 0.0
    while True:
        edge = low / 16.0 if falling else high * 16.0
        solution = minimise(problem, edge, solution.status)
        if falling:
            low, high = edge, low
        else:
            low, high = high, edge
        reached = score(edge, solution) >= 0.0
        # A goal that rounding puts next to the top may not be reached at all.
        within = LEAST_LAM * problem.total <= edge <= MOST_LAM * problem.total
        if reached != falling or not within:
            return low, high


def _gap(problem: Problem, lam: float, weights: Floats) -> float:
    return linear_gap(gradient(problem, lam, weights), weights, problem.upper)


def squared_gap(clients: Mixture, lam: float, weights: Floats) -> float:
    """Frank-Wolfe gap of weights [M] in the full problem; at lam = inf of sum a_i^2/n_i alone."""
    if lam == math.inf:
        return linear_gap(2.0 * weights / clients.full.sizes, weights, clients.full.upper)
    return _gap(clients.full, lam, weights)
