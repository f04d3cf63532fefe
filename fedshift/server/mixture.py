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

# An ESS this close to the requested one, relatively, reaches it.
ESS_TOLERANCE = 1e-12
# With a proven L1 error below this, no other method is tried.
PROVEN = 1e-7
# The largest lam / N to try: there the weights are n / N to the last bit.
MOST_LAM = 1e30
# A label's share below this is rounding.
ABSENT = 1e-14


@dataclass(frozen=True)
class Mixture:
    """Clients with examples, and a smaller problem with the same optimum.

    full     the problem of all clients
    merged   that of groups of equal clients, one row per group
    group    [M], the group of each client
    nearest  weights of `merged` that mix to v, the point of the hull nearest to T
    barred   groups with examples of a label of which v has none: no weights that mix to v use them
    """

    full: Problem
    merged: Problem
    group: NDArray[np.intp]
    nearest: Floats
    barred: Flags

    @property
    def only_equal(self) -> bool:
        """Whether the cap allows a single point only: every client at its cap."""
        return bool(self.full.upper.sum() <= 1.0 + 1e-12)

    def expand(self, weights: Floats) -> Floats:
        """Weights of clients from weights of groups: in a group, a_i is proportional to n_i."""
        share = self.full.sizes / self.merged.sizes[self.group]
        spread = np.minimum(weights[self.group] * share, self.full.upper)
        # If a group is at its cap, set its clients to theirs, to the last bit.
        return np.where((weights >= self.merged.upper)[self.group], self.full.upper, spread)


def mixture(
    shares: Floats,
    sizes: Floats,
    target: Floats,
    bound: float,
    counts: Floats | None = None,
    price: Floats | None = None,
) -> Mixture:
    """Merge equal clients and project the target; `shares` [M, K], `sizes` [M], all n_i > 0.

    Without a cap, clients with equal rows merge into one with n = sum n_i: f depends only on the
    sum of their weights, and sum a_i^2/n_i is least if a_i is proportional to n_i. A cap could bind
    for the larger members only. So with a cap, clients must be equal in row and size to merge:
    their weights are equal at the (unique) optimum, and the group's cap is the sum of theirs.
    Clients with different prices do not merge. `counts`, from which the shares were rounded, tell
    exact ties between clients from near ties.
    """
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
    # A column of embeddings may have negative entries; then clients can cancel, and bar no one.
    absent = (nearest @ shares[first] <= ABSENT) & (shares >= 0.0).all(axis=0)
    barred = (shares[first][:, absent] > 0.0).any(axis=1) & (nearest <= ABSENT)
    return Mixture(full, merged, group, nearest, barred)


def _equal_rows(keys: Floats) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """(first row of each group, group of each row); groups are sorted by the bytes of their rows.

    Comparing bytes is enough: division is correctly rounded, so that proportional integer counts
    give equal bits. Sorting makes the result independent of the order of clients, bit for bit.
    """
    # + 0.0 turns -0.0 into 0.0, whose bytes differ.
    rows = np.ascontiguousarray(keys + 0.0)
    as_bytes = rows.view(np.dtype((np.void, rows.itemsize * rows.shape[1]))).ravel()
    _, first, group = np.unique(as_bytes, return_index=True, return_inverse=True)
    return first, group


def narrow(rows: Floats) -> Floats:
    """If M < K, the rows in an orthonormal basis of their span: same distances, M columns."""
    if rows.shape[0] >= rows.shape[1]:
        return rows
    triangle = scipy.linalg.qr(rows.T, mode="r", check_finite=False)[0][: rows.shape[0]]
    return np.ascontiguousarray(triangle.T)


def ess_fraction(problem: Problem, weights: Floats) -> float:
    """ESS(a) / N."""
    return float(1.0 / (np.sum(weights**2 / problem.sizes) * problem.total))


def at_lam(clients: Mixture, lam: float) -> Solution:
    """Solve the squared problem at 0 <= lam <= inf.

    Below lam = 1e-12 N, take the limit lam -> 0+ or the solution at lam on its active set,
    whichever has the better proof at this lam; without a proof, the one with the smallest gap.
    """
    problem = clients.merged
    zero = np.zeros(problem.rows.shape[1])
    if clients.only_equal:
        capped = np.full(problem.sizes.shape, AT_CAP)
        return Solution(clients.nearest, capped, zero, 0.0, 0.0)
    if lam == math.inf:
        weights = problem.sizes / problem.total
        if (weights > problem.upper).any():
            # Scores of 0: least sum a_i^2 / n_i under the caps.
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
    """The solution, with the effect of rounding of the input added to its error."""
    if not math.isfinite(solution.error):
        return solution
    return replace(solution, error=solution.error + rounding_error(problem, lam, solution))


Score = Callable[[float, Solution], float]


def root(
    problem: Problem, score: Score, low: float, high: float, limit: Solution
) -> tuple[float, Solution]:
    """(lam, solution) in [low, high] where the score, monotone in lam, is 0: Brent on log lam.

    Below 1e-12 N every solve starts from `limit`, the solution at lam -> 0+.
    """
    # Above, each solve starts from the one before: neighbours share most of their active set.
    latest = minimise(problem, high)

    def score_at(log_lam: float) -> float:
        """The score at this lam; also stores the solution, from which the next solve starts."""
        nonlocal latest
        lam = math.exp(log_lam)
        if lam >= LEAST_LAM * problem.total:
            latest = minimise(problem, lam, latest.status)
        else:
            latest = polish(problem, lam, limit.status, fallback=False)
        return score(lam, latest)

    ends = math.log(high), math.log(low)
    if score_at(ends[0]) * score_at(ends[1]) > 0.0:
        # Rounding has hidden the change of sign: take the end with the score nearer to 0.
        log_root = min(ends, key=lambda t: abs(score_at(t)))
    else:
        log_root = scipy.optimize.brentq(score_at, *ends, xtol=1e-13, rtol=1e-15)
    score_at(log_root)
    return math.exp(log_root), charged(problem, math.exp(log_root), latest)


def at_ess(clients: Mixture, fraction: float) -> tuple[float, Solution]:
    """The smallest lam of the squared problem with ESS / N >= fraction, and its solution.

    ESS does not decrease in lam, and is constant only from 0 up to some lam and at its maximum. The
    maximum (1 without a cap) is reached at lam = inf. Returns lam = nan if even lam = inf stays
    below the fraction, which only a cap can cause.
    """
    problem, goal = clients.merged, fraction * (1.0 - ESS_TOLERANCE)
    bottom = at_lam(clients, 0.0)
    if ess_fraction(problem, bottom.weights) >= goal:
        return 0.0, bottom
    top = at_lam(clients, math.inf)
    highest = ess_fraction(problem, top.weights)
    if goal >= highest * (1.0 - 2.0 * ESS_TOLERANCE):
        return (math.inf if goal <= highest else math.nan), top

    # The log of ESS is nearly linear in log lam, which suits Brent's method.
    def log_excess(lam: float, solution: Solution) -> float:
        return math.log(ess_fraction(problem, solution.weights) / fraction)

    return root(problem, log_excess, *_bracket(problem, log_excess), bottom)


def _bracket(problem: Problem, score: Score) -> tuple[float, float]:
    """(low, high), a factor of 16 apart, with a score below 0 at low and not at high.

    Searched from lam = N, downwards if the score is 0 or more there, else upwards.
    """
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
        # Stop at the limits, too: rounding may keep a goal next to the maximum out of reach.
        within = LEAST_LAM * problem.total <= edge <= MOST_LAM * problem.total
        if reached != falling or not within:
            return low, high


def _gap(problem: Problem, lam: float, weights: Floats) -> float:
    return linear_gap(gradient(problem, lam, weights), weights, problem.upper)


def squared_gap(clients: Mixture, lam: float, weights: Floats) -> float:
    """Frank-Wolfe gap of weights [M] in the full problem; at lam = inf, that of sum a_i^2/n_i."""
    if lam == math.inf:
        return linear_gap(2.0 * weights / clients.full.sizes, weights, clients.full.upper)
    return _gap(clients.full, lam, weights)
