"""The limit lam -> 0+ with prices: the minimiser of ||T - S^T a||^2 + price . a with largest ESS.

All clients on the face of the minimisers have equal slopes 2 rows_i . (S^T a - T) + price_i. For
them the price has the form price_i / 2 = rows_i . q + constant, which moves the target by q. So the
problem on that face is one without prices, with T - q instead of T.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from fedshift.server.hull import max_ess, project
from fedshift.server.qp import SMALL_LAM, affordable, among, minimise, only
from fedshift.server.rounding import ROUNDING, spectrum
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
)

# Slopes at SMALL_LAM that differ by less than this, in units of max ||S_i - T||^2, may be equal at
# lam -> 0+.
NEAR = 1e-7


def cheapest(problem: Problem) -> Solution:
    """The limit lam -> 0+ of a problem with a price; its error is inf if the face is not proved.

    `error` is the sum of three: that of the problem on the face, the effect of rounding of q, and
    the weight that other clients could have. If the slopes of these differ by a margin of m from
    the face's, a gap of f allows at most gap / m.
    """
    kept = affordable(problem, 0.0)
    if not kept.all():
        return among(kept, cheapest(only(problem, kept)))
    small = minimise(problem, SMALL_LAM * problem.total)
    status = _face_status(problem, small.weights)
    free = status == FREE
    fixed = np.where(status == AT_CAP, problem.upper, 0.0)
    mass = 1.0 - float(fixed.sum())
    if not free.any() or mass <= 0.0:
        return replace(small, error=math.inf)
    part, q_error = _price_as_move(problem, free, fixed, mass)
    inner = max_ess(part, project(part), np.zeros(part.sizes.shape, dtype=np.bool_))
    weights = fixed.copy()
    weights[free] = mass * inner.weights
    error = inner.error + q_error * spectrum(part, inner.weights > 0.0).inward(0.0)
    return replace(
        small, weights=weights, status=status, error=error + _off_face(problem, weights, status)
    )


def _face_status(problem: Problem, weights: Floats) -> Codes:
    """The status [M]: free if the slope at SMALL_LAM equals that of clients within their bounds."""
    slopes = gradient(problem, SMALL_LAM * problem.total, weights)
    level = slopes[linear_minimiser(slopes, problem.upper) > 0.0].max()
    near = NEAR * float(np.einsum("ij,ij->i", problem.rows, problem.rows).max())
    status = np.full(slopes.shape, FREE)
    status[(slopes > level + near) & (weights < problem.upper)] = AT_ZERO
    status[(slopes < level - near) & (weights > 0.0)] = AT_CAP
    return status


def _price_as_move(
    problem: Problem, free: Flags, fixed: Floats, mass: float
) -> tuple[Problem, float]:
    """(problem of the free clients, its price turned into a move q of the target; error of q)."""
    assert problem.price is not None
    rows, half = problem.rows[free], problem.price[free] / 2.0
    centred, wanted = rows - rows.mean(axis=0), half - half.mean()
    q = np.zeros(rows.shape[1])
    for _ in range(2):  # the second pass corrects the rounding of the first
        q = q + np.linalg.lstsq(centred, wanted - centred @ q, rcond=1e-14)[0]
    # The free weights are mass * b with sum b = 1, so a constant that is added to all rows adds as
    # much to S^T b: here the part of the clients at their caps, and q.
    part = Problem(
        rows + (fixed @ problem.rows + q) / mass, problem.sizes[free], problem.upper[free] / mass
    )
    values = np.linalg.svd(centred, compute_uv=False)
    # Smaller singular values are rounding, and q has no part in their directions.
    least = float(values[values > 1e-14].min(initial=math.inf))
    missed = float(np.abs(wanted - centred @ q).max()) + ROUNDING * float(np.abs(half).max())
    return part, missed / (least * mass)


def _off_face(problem: Problem, weights: Floats, status: Codes) -> float:
    """How much weight, in L1, the optimum could have off the face."""
    slopes = gradient(problem, 0.0, weights)
    gap = linear_gap(slopes, weights, problem.upper)
    level = float(slopes[status == FREE].mean())
    margins = np.where(status == AT_CAP, level - slopes, slopes - level)[status != FREE]
    if margins.size == 0:
        return 0.0
    least = float(margins.min())
    return 2.0 * gap / least if least > 0.0 else math.inf
