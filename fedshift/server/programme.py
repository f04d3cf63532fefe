"""FedPALS' programme of the clients with examples: equal ones merged, the target projected, solved.

    minimise ||T - S^T a||^2 + sum_i (cost_i + lam / n_i) a_i^2

A client with a cost is handled as one of size 1 / (cost_i + lam / n_i) at lam = 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedshift.errors import InputError
from fedshift.real import check_labels, number
from fedshift.server.dual import (
    LEAST,
    NO_CAP,
    ON_TARGET,
    Flags,
    Floats,
    Problem,
    Solution,
    allocation_gap,
    bracket,
    largest_ess,
    linear_gap,
    narrow,
    optimum,
    pivots,
    root,
)
from fedshift.server.hull import limit, project
from fedshift.server.pals_input import (
    Fidelity,
    check_cap,
    checked_cost,
    checked_counts,
    checked_rows,
    checked_sizes,
)
from fedshift.server.rounding import ROUNDING, charge
from fedshift.server.shares import label_shares

# An ESS this close to the requested one, relatively, reaches it.
ESS_TOLERANCE = 1e-12
# Below this lam / N the dual's multipliers may be too long for the digits of a float.
UNCERTAIN = 1e-8
# With a proved L1 error below this, nothing else is tried.
PROVEN = 1e-7
# A label's share below this is rounding.
ABSENT = 1e-14
# The lam / N that tells whether the norm form has residual 0; the smallest to try in its search.
SMALL, LEAST_MU = 1e-10, 1e-21
# Embeddings are divided by a power of 2 if their largest number is outside these limits, because
# the solver's tolerances are made for label shares.
SMALL_ROWS, LARGE_ROWS = 1.0 / 128.0, 1.0


@dataclass(frozen=True)
class Answer:
    """Weights of merged clients, their lam and proved L1 error, and the norm form's gap."""

    weights: Floats
    lam: float
    error: float
    norm_gap: float | None = None


@dataclass(frozen=True, eq=False)
class Programme:
    """The problem of the clients with examples.

    rows      [active, K], S_i - T as given
    examples  [active], n
    upper     [active], the caps
    cost      [active], 0 without costs
    places    [active], positions of these clients among all
    count     number of all clients
    scale     a power of 2, by which the rows of `merged` are divided
    merged    the problem of groups of equal clients, one row per group
    group     [active], the group of each client
    nearest   weights of `merged` that mix to v, the point of the hull nearest to T
    barred    groups with examples of a label of which v has none: no weights that mix to v use them
    """

    rows: Floats
    examples: Floats
    upper: Floats
    cost: Floats
    places: NDArray[np.intp]
    count: int
    scale: float
    merged: Problem
    group: NDArray[np.intp]
    nearest: Floats
    barred: Flags

    def expand(self, weights: Floats) -> Floats:
        """Weights of clients from weights of groups: in a group, a_i is proportional to n_i."""
        share = self.examples / self.merged.sizes[self.group]
        spread = np.minimum(weights[self.group] * share, self.upper)
        # If a group is at its cap, set its clients to theirs, to the last bit.
        return np.where((weights >= self.merged.upper)[self.group], self.upper, spread)

    def fraction(self, weights: Floats) -> float:
        """ESS(a) / N."""
        return float(1.0 / np.sum(weights**2 / self.merged.share))

    # ----------------------------------------------------------------------- at a lam, at an ESS

    def at_lam(self, lam: float, fidelity: Fidelity) -> Answer:
        """The answer at 0 <= lam <= inf."""
        if lam == math.inf:
            return self._answer(lam, self._limit(lam))
        if fidelity == "norm" and lam > 0.0 and not self.merged.single:
            return self._norm(lam, *self._at_norm(lam))
        return self._answer(lam, self._proved(lam))

    def at_ess(self, fraction: float, fidelity: Fidelity) -> Answer:
        """The answer at the smallest lam with ESS / N >= fraction.

        ESS does not decrease in lam, and is constant only from 0 up to some lam and at its maximum.
        The maximum (1 without a cap) is reached at lam = inf. lam is nan if even that stays below
        the fraction, which only a cap can cause.
        """
        goal = fraction * (1.0 - ESS_TOLERANCE)
        top, bottom = self._limit(math.inf), self._solve(0.0, None)
        highest = self.fraction(top.weights)
        if self.fraction(bottom.weights) >= goal:
            return self._answer(0.0, self._proved(0.0))
        if goal >= highest * (1.0 - 2.0 * ESS_TOLERANCE):
            return self._answer(math.inf if goal <= highest else math.nan, top)

        # The log of ESS is nearly linear in log lam, which suits Brent's method.
        def excess(lam: float, solution: Solution) -> float:
            return math.log(self.fraction(solution.weights) / fraction)

        total = float(self.merged.sizes.sum())
        lam, solution = root(self._solve, excess, *bracket(self._solve, excess, total))
        if fidelity == "squared":
            return self._answer(lam, self._proved(lam, solution))
        distance = float(np.linalg.norm(solution.weights @ self.merged.rows))
        return self._norm(lam / (2.0 * distance), lam, solution)

    def _solve(self, lam: float, start: Solution | None) -> Solution:
        """The squared form's solution at a finite lam; its error is without charge for rounding."""
        problem, rate = self._costed(lam)
        if problem.single or rate >= LEAST * float(problem.sizes.sum()):
            return optimum(problem, rate, start)
        return limit(problem, self.nearest, self.barred, rate)

    def _proved(self, lam: float, start: Solution | None = None) -> Solution:
        """The solution at a finite lam with the best proof, rounding included."""
        problem, rate = self._costed(lam)
        if problem.single:
            return optimum(problem, rate)
        ridge = rate / float(problem.sizes.sum())
        best = limit(problem, self.nearest, self.barred) if rate == 0.0 else None
        if best is None and ridge >= LEAST:
            best = _charged(problem, rate, optimum(problem, rate, start))
        if best is None or (best.error > PROVEN and 0.0 < ridge < UNCERTAIN):
            # The multipliers are too long for the digits of a float: solve on a face of the hull.
            near = limit(problem, self.nearest, self.barred, rate)
            found = limit(problem, self.nearest, self.barred) if best is None else best
            guess = pivots(problem, ridge, replace(found, error=math.inf))
            rest = [] if best is None else [best]
            best = min(_charged(problem, rate, guess), near, *rest, key=lambda s: s.error)
        return best

    def _costed(self, lam: float) -> tuple[Problem, float]:
        """(problem, lam) in the scale of `merged`, with costs absorbed in the sizes."""
        if not self.cost.any():
            return self.merged, lam / self.scale**2
        cost = np.empty_like(self.cost)
        cost[self.group] = self.cost
        return replace(self.merged, sizes=self.scale**2 / (cost + lam / self.merged.sizes)), 1.0

    def _limit(self, lam: float) -> Solution:
        """The solution at lam = inf."""
        return Solution(largest_ess(self.merged), 0.0 * self.merged.rows[0], 0.0, 0.0)

    def _answer(self, lam: float, solution: Solution) -> Answer:
        return Answer(solution.weights, lam, solution.error)

    # ----------------------------------------------------------------------- the unsquared form

    def _at_norm(self, lam: float) -> tuple[float, Solution]:
        """Solve min ||T - S^T a|| + lam q(a), q(a) = sum_i a_i^2/n_i: (mu, the solution there).

        Its dual is max D(w) over ||w|| <= 1 / (2 lam), D(w) = min_a q(a) - 2 w . (S^T a - T), and
        that of the squared form at mu is max D(w) - mu ||w||^2, with the maximiser r(mu) / mu. So,
        with w(0+) the shortest multiplier of S^T a = T in min q(a), finite if T is in the hull:

        - 2 lam ||w(0+)|| <= 1: the residual is zero, and a is the max-ESS point (the norm is an
          exact penalty). mu = 0 stands for this case.
        - otherwise ||w|| = 1 / (2 lam), and a is the squared form's a(mu) with 2 lam ||w(mu)|| = 1.

        Near the border of the two the better proof decides.
        """
        problem, total = self.merged, float(self.merged.sizes.sum())
        distance = float(np.linalg.norm(self.nearest @ problem.rows))
        farthest = float(np.linalg.norm(largest_ess(problem) @ problem.rows))
        # mu = 2 lam ||r||, and ||r|| lies between its values at lam = 0 and lam = inf.
        low, high = 2.0 * lam * distance, 2.0 * lam * farthest
        if distance > ON_TARGET:
            return self._binding(lam, low, high)
        # T is in the hull up to rounding: decide between the two cases at a small mu.
        small = optimum(problem, SMALL * total)
        if 2.0 * lam * float(np.linalg.norm(small.w)) > total:
            return self._binding(lam, SMALL * total, high)
        point = self._solve(0.0, None)
        # On all clients a multiplier has to keep those off the face at zero, and be in the ball.
        duals = []
        for found in (small, pivots(problem, 0.0, replace(small, error=math.inf)), point):
            by = min(1.0, total / max(2.0 * lam * float(np.linalg.norm(found.w)), 1e-300))
            duals.append(replace(point, w=by * found.w, theta=by * found.theta))
        exact = min(duals, key=lambda s: allocation_gap(problem, s.weights, s.w, s.theta))
        if self._norm(lam, 0.0, exact).error <= PROVEN:
            return 0.0, exact
        cases = ((0.0, exact), self._binding(lam, low, min(high, SMALL * total)))
        return min(cases, key=lambda case: self._norm(lam, *case).error)

    def _binding(self, lam: float, low: float, high: float) -> tuple[float, Solution]:
        """mu in [low, high] with 2 lam ||w(mu)|| = 1, and a(mu)."""
        total = float(self.merged.sizes.sum())
        low = max(low, LEAST_MU * total)
        if low >= high:
            return high, self._solve(high, None)

        def excess(mu: float, solution: Solution) -> float:
            return math.log(2.0 * lam * max(float(np.linalg.norm(solution.w)), 1e-300) / total)

        return root(lambda mu, start: optimum(self.merged, mu, start), excess, low, high)

    def _norm(self, lam: float, mu: float, solution: Solution) -> Answer:
        """The answer of the norm form at lam, which is the squared form's at mu, with its error.

        With w of length 1 / (2 lam) the duality gap proves a bound, as the norm form is 2 lam
        strongly convex in the norm sum a_i^2/n_i. At mu = 0 the error is that of the max-ESS
        point, where r = 0 exactly, plus that of `solution` as an approximation of this point.
        """
        problem, total = self.merged, float(self.merged.sizes.sum())
        r, length = -(solution.weights @ problem.rows), float(np.linalg.norm(solution.w))
        size, most = float(np.linalg.norm(r)), total / (2.0 * lam)
        by = most / length if length > 0.0 else 1.0
        by = min(1.0, by) if mu == 0.0 else by
        gap = allocation_gap(problem, solution.weights, by * solution.w, by * solution.theta)
        error = math.inf
        if mu == 0.0 and size <= ON_TARGET:
            error = solution.error + math.sqrt(gap) + ROUNDING * length
        elif mu > 0.0 and size > 0.0 and length > 0.0:
            # ||turn||^2 / 2 is 1 - cos of the angle between r and w, without cancellation.
            turn = r / size - solution.w / length
            gap += 0.5 * size * total * float(turn @ turn) / lam
            error = math.sqrt(gap) + charge(problem, mu, solution)
        return Answer(solution.weights, lam, error, self._norm_gap(lam, solution))

    def _norm_gap(self, lam: float, solution: Solution) -> float:
        """The Frank-Wolfe gap: ||T - S^T b|| >= u . (T - S^T b) for any u in the unit ball.

        At r = 0, where the norm has no gradient, u = 2 lam w, scaled into the ball, is tried.
        """
        problem, a = self.merged, solution.weights
        r = -(a @ problem.rows)
        size, dual = float(np.linalg.norm(r)), 2.0 * lam * solution.w / problem.sizes.sum()
        tried = [dual / max(1.0, float(np.linalg.norm(dual)))] + ([r / size] if size > 0.0 else [])
        pull = 2.0 * lam * a / problem.sizes
        return min(
            linear_gap(pull - problem.rows @ u, a, problem.upper) + max(size - float(u @ r), 0.0)
            for u in tried
        )


def _charged(problem: Problem, lam: float, solution: Solution) -> Solution:
    """The solution, with the effect of rounding of the input added to its error."""
    if not math.isfinite(solution.error):
        return solution
    return replace(solution, error=solution.error + charge(problem, lam, solution))


# --------------------------------------------------------------------------- from the arguments


def prepare(
    label_counts: ArrayLike,
    target: ArrayLike,
    cap: float | None,
    rescale: bool,
    cost: ArrayLike | None = None,
    rows: ArrayLike | None = None,
) -> Programme:
    """The programme of the arguments of `pals_weights`. Raises InputError for invalid ones.

    Without a cap, clients with equal rows merge into one with n = sum n_i: f depends only on the
    sum of their weights, and sum a_i^2/n_i is least if a_i is proportional to n_i. A cap could bind
    for the larger members only. So with a cap, clients must be equal in row and size to merge:
    their weights are equal at the (unique) optimum, and the group's cap is the sum of theirs. With
    costs none merge.
    """
    check_labels(label_counts=label_counts if rows is None else rows, target=target)
    counts = checked_counts(label_counts) if rows is None else checked_sizes(label_counts)
    sizes = counts.sum(axis=1)
    places = np.flatnonzero(sizes > 0.0)
    n, scale, exact = sizes[places], 1.0, None
    if rows is None:
        goal, exact = label_shares(target, "target", counts.shape[1], rescale), counts[places]
        shares = exact / n[:, None]
    else:
        if rescale:
            raise InputError(
                "normalise_target is for label shares; beside rows the target is an embedding, "
                "which has no sum of 1: leave it out"
            )
        table, goal = checked_rows(rows, target, sizes.size)
        shares = table[places]
        largest = float(max(np.abs(shares).max(), np.abs(goal).max()))
        if largest > 0.0 and not SMALL_ROWS <= largest <= LARGE_ROWS:
            scale = 2.0 ** math.ceil(math.log2(largest))  # division by it is exact
    costs = np.zeros(len(n)) if cost is None else checked_cost(cost, sizes.size)[places]
    bound = _upper_bound(cap, len(n))
    keys = [shares] + [n[:, None]] * (bound < 1.0)
    keys += [np.arange(len(n))[:, None]] * bool(costs.any())
    first, group = _equal_rows(np.column_stack(keys))
    upper = np.full(len(n), bound)
    whole = shares - goal
    merged = Problem(
        narrow(whole[first] / scale),
        np.bincount(group, weights=n).astype(np.float64),
        np.minimum(np.bincount(group) * bound, NO_CAP) if bound < 1.0 else upper[first],
        None if exact is None else exact[first],
    )
    nearest = (
        merged.upper / merged.upper.sum() if merged.single else project(merged.rows, merged.upper)
    )
    # A column of embeddings may have negative entries; then clients can cancel, and bar no one.
    absent = (nearest @ shares[first] <= ABSENT) & (shares >= 0.0).all(axis=0)
    barred = (shares[first][:, absent] > 0.0).any(axis=1) & (nearest <= ABSENT)
    return Programme(
        whole, n, upper, costs, places, sizes.size, scale, merged, group, nearest, barred
    )


def _upper_bound(cap: float | None, clients: int) -> float:
    """The cap, or NO_CAP. At least 1 / clients, so that rounding cannot make it impossible."""
    if cap is None:
        return NO_CAP
    largest = number(cap)
    check_cap(largest, clients)
    return NO_CAP if largest >= 1.0 else max(largest, 1.0 / clients)


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
