"""Turn the arguments of `pals_weights` into the problem to solve, for the clients with examples.

    minimise ||T - S^T a||^2 + sum_i (cost_i + lam / n_i) a_i^2 + price . a

A client with a cost is handled as one of size 1 / (cost_i + lam / n_i) at lam = 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import scipy.optimize
from numpy.typing import ArrayLike, NDArray

from fedshift.errors import InputError
from fedshift.real import check_labels, number
from fedshift.server.mixture import ESS_TOLERANCE, Mixture, at_lam, mixture
from fedshift.server.pals_input import (
    LARGEST_COST,
    LEAST_COST,
    check_cap,
    checked_counts,
    checked_per_client,
    checked_rows,
    checked_sizes,
    checked_target,
)
from fedshift.server.simplex import NO_CAP, Floats

# Embeddings are rescaled to about 1 if their largest number is outside these limits, because the
# solver's tolerances are made for label shares.
SMALL_ROWS, LARGE_ROWS = 1.0 / 128.0, 1.0


@dataclass(frozen=True, eq=False)
class Programme:
    """The problem of the clients with examples.

    mixture   its clients; their sizes there are n if there is no cost
    places    [active], positions of these clients among all
    count     number of all clients
    examples  [active], n
    cost      [active], or None
    scale     a power of 2: rows and target were divided by it; costs, prices and lam by its square
    """

    mixture: Mixture
    places: NDArray[np.intp]
    count: int
    examples: Floats
    cost: Floats | None = None
    scale: float = 1.0

    def costed(self, lam: float) -> Programme:
        """The programme with costs and a finite lam absorbed in the sizes: solve it at lam = 1."""
        assert self.cost is not None
        full = self.mixture.full
        bound = float(full.upper[0])
        sizes = 1.0 / (self.cost + lam / self.examples)
        # The rows are S_i - T already, so that the target is 0.
        zero = np.zeros(full.rows.shape[1])
        mixed = mixture(full.rows, sizes, zero, bound, price=full.price)
        return replace(self, mixture=mixed, cost=None)

    def fraction(self, lam: float) -> float:
        """ESS / N at this lam, for a programme with costs."""
        if lam == math.inf:
            mixed, at = self.mixture, lam
        else:
            mixed, at = self.costed(lam).mixture, 1.0
        weights = mixed.expand(at_lam(mixed, at).weights)
        return float(1.0 / (np.sum(weights**2 / self.examples) * self.examples.sum()))


def prepare(
    label_counts: ArrayLike,
    target: ArrayLike,
    lam: float | None,
    cap: float | None,
    rescale: bool,
    cost: ArrayLike | None = None,
    price: ArrayLike | None = None,
    rows: ArrayLike | None = None,
) -> tuple[Programme, float | None]:
    """(programme, lam), both in the programme's scale. Raises InputError for invalid arguments."""
    check_labels(label_counts=label_counts if rows is None else rows, target=target)
    counts = checked_counts(label_counts) if rows is None else checked_sizes(label_counts)
    sizes = counts.sum(axis=1)
    active = np.flatnonzero(sizes > 0.0)
    n = sizes[active]
    if rows is None:
        goal = checked_target(target, counts.shape[1], rescale)
        shares, exact, scale = counts[active] / n[:, None], counts[active], 1.0
    else:
        shares, goal, scale = _rescale_rows(rows, target, active, sizes.size, rescale)
        exact = None
    lam = None if lam is None else number(lam) / scale**2
    costs, prices = (
        _costs(cost, sizes.size, active, scale),
        _prices(price, sizes.size, active, scale),
    )
    # Costs lam / n_i mean an ordinary lam: solve for that, to the same bits as without costs.
    if costs is not None and lam == 0.0 and (common := _lam_equal_to(costs, n)) is not None:
        costs, lam = None, common
    mixed = mixture(shares, n, goal, _upper_bound(cap, active.size), exact, prices)
    return Programme(mixed, active, sizes.size, n, costs, scale), lam


def _rescale_rows(
    rows: ArrayLike, target: ArrayLike, active: NDArray[np.intp], count: int, rescale: bool
) -> tuple[Floats, Floats, float]:
    """(rows of the clients with examples, target, scale), the first two divided by the scale."""
    if rescale:
        raise InputError(
            "normalise_target is for label shares; beside rows the target is an embedding, "
            "which has no sum of 1: leave it out"
        )
    table, goal = checked_rows(rows, target, count)
    largest = float(max(np.abs(table[active]).max(), np.abs(goal).max()))
    fits = largest == 0.0 or SMALL_ROWS <= largest <= LARGE_ROWS
    # Division by a power of 2 is exact.
    scale = 1.0 if fits else 2.0 ** math.ceil(math.log2(largest))
    return table[active] / scale, goal / scale, scale


def _costs(
    cost: ArrayLike | None, count: int, active: NDArray[np.intp], scale: float
) -> Floats | None:
    if cost is None:
        return None
    return checked_per_client("cost", cost, count, LEAST_COST)[active] / scale**2


def _prices(
    price: ArrayLike | None, count: int, active: NDArray[np.intp], scale: float
) -> Floats | None:
    """Prices minus the lowest; None if all are equal, so that no weight changes by a bit."""
    if price is None:
        return None
    prices = checked_per_client("price", price, count, -2.0 * LARGEST_COST)[active]
    return (prices - prices.min()) / scale**2 if np.ptp(prices) > 0.0 else None


def _upper_bound(cap: float | None, clients: int) -> float:
    """The cap, or NO_CAP. At least 1 / clients, so that rounding cannot make it impossible."""
    if cap is None:
        return NO_CAP
    largest = number(cap)
    check_cap(largest, clients)
    return NO_CAP if largest >= 1.0 else max(largest, 1.0 / clients)


def _lam_equal_to(cost: Floats, sizes: Floats) -> float | None:
    """The lam with lam / n_i = cost_i to the last bit; None if there is none."""
    guess = float(cost[0] * sizes[0])
    for lam in (guess, math.nextafter(guess, 0.0), math.nextafter(guess, math.inf)):
        if (lam / sizes == cost).all():
            return lam
    return None


def lam_of_ess(programme: Programme, fraction: float) -> float:
    """The smallest lam with ESS / N >= fraction in a programme with costs; nan if no lam has it.

    ESS grows with lam, as it does without costs: lam multiplies 1 / ESS in f.
    """
    goal = fraction * (1.0 - ESS_TOLERANCE)
    if programme.fraction(0.0) >= goal:
        return 0.0
    highest = programme.fraction(math.inf)
    # Near its limit ESS hardly depends on lam, and a finite one would be arbitrary.
    if goal >= highest * (1.0 - 2.0 * ESS_TOLERANCE):
        return math.inf if goal <= highest else math.nan

    # lam can have any order of magnitude, so its logarithm is searched.
    def excess(log_lam: float) -> float:
        return math.log(programme.fraction(math.exp(log_lam)) / fraction)

    low = high = math.log(float(programme.examples.sum()))
    while excess(high) < 0.0 and high < 200.0:
        high += 3.0
    while excess(low) >= 0.0 and low > -200.0:
        low -= 3.0
    if excess(low) * excess(high) > 0.0:  # rounding has hidden the change of sign
        return math.exp(high)
    return math.exp(float(scipy.optimize.brentq(excess, low, high, xtol=1e-13, rtol=1e-15)))
