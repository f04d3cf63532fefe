"""Costs and prices of clients, in the terms of the solver: sizes, a lambda, and prices.

    f(a) = ||T - S^T a||^2 + sum_i (lam / n_i + cost_i) a_i^2 + price . a

Costs c_i = lam / n_i + cost_i are mu / m_i: a client of cost c_i is one of m_i = mu / c_i examples.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol, TypeVar

import numpy as np
import scipy.optimize

from fedshift.server.mixture import ESS_TOLERANCE, MOST_LAM
from fedshift.server.qp import LEAST_LAM
from fedshift.server.simplex import Floats

# Different products cost_i n_i that rounding may make of one lambda.
MOST_PRODUCTS = 16


def as_lam(costs: Floats, sizes: Floats) -> float | None:
    """The lambda with lam / n_i = cost_i to the last bit, for all clients; None where none has."""
    products = np.unique(costs * sizes)
    if products.size > MOST_PRODUCTS:
        return None
    near = np.concatenate([products, np.nextafter(products, np.inf), np.nextafter(products, 0.0)])
    return next((float(lam) for lam in near if np.array_equal(lam / sizes, costs)), None)


def as_sizes(costs: Floats, sizes: Floats) -> tuple[Floats, float]:
    """m [M] and mu with mu / m_i = cost_i, m of the same sum as the clients' sizes."""
    inverse = costs.min() / costs  # at most 1: no sum leaves the range of floats
    m = inverse * (sizes.sum() / inverse.sum())
    return m, float(costs.min() * (sizes.sum() / inverse.sum()))


def affordable(price: Floats, costs: Floats, rows: Floats, capped: bool) -> Floats | None:
    """The prices less the least one, those beyond reach lowered to where they still are.

    None where all are equal, which changes nothing. rows [M, d] are S_i - T. A client j of positive
    weight has p_j - p_i <= 2 (S_j - S_i) . r + 2 c_i a_i for every i that could take more; without
    a cap i is the cheapest, and the right side is at most 4 R^2 + 2 c_i, R = max ||S_i - T||.
    """
    extra: Floats = price - price.min()
    if not extra.any():
        return None
    if capped:
        return extra
    reach = 8.0 * float(np.einsum("ij,ij->i", rows, rows).max())
    lowered: Floats = np.minimum(extra, reach + 4.0 * float(costs[np.argmin(price)]))
    return lowered


class HasEss(Protocol):
    """A solution that knows its ESS as a share of all examples."""

    @property
    def ess_fraction(self) -> float:
        """ESS / N."""


Solved = TypeVar("Solved", bound=HasEss)


def at_fraction(
    solve: Callable[[float], Solved], fraction: float, examples: float, free: bool
) -> Solved | None:
    """The solution of the smallest lam with ESS / N >= fraction; None where even inf has less.

    ESS does not fall as lam rises, whatever else clients cost. free: whether lam may be 0.
    """
    goal = fraction * (1.0 - ESS_TOLERANCE)
    least = LEAST_LAM * examples
    bottom = solve(0.0 if free else least)
    if bottom.ess_fraction >= goal:
        return bottom
    top = solve(math.inf)
    if goal >= top.ess_fraction * (1.0 - 2.0 * ESS_TOLERANCE):
        return top if goal <= top.ess_fraction else None

    def excess(log_lam: float) -> float:
        return math.log(solve(math.exp(log_lam)).ess_fraction / fraction)

    low = high = math.log(examples)
    step, most = math.log(16.0), math.log(MOST_LAM * examples)
    while excess(high) < 0.0 and high < most:
        low, high = high, high + step
    while low > math.log(least) and excess(low) >= 0.0:
        low, high = low - step, low
    if excess(low) * excess(high) > 0.0:  # by rounding: both ends are as near as there is
        return solve(math.exp(high))
    return solve(math.exp(scipy.optimize.brentq(excess, low, high, xtol=1e-13, rtol=1e-15)))
