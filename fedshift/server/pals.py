"""FedPALS aggregation weights: convex weights that pull the clients' labels towards the target.

    a = argmin over the simplex of ||T - S^T a||^2 + lam * sum_i a_i^2 / n_i     (FedPALS, eq. 8-9)

S [M, K] holds the clients' label marginals, n [M] their sizes, T [K] the target marginal. The
second term is lam / ESS(a): lam trades the match of the labels against effective sample size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import ArrayLike

from fedshift.arguments import settled
from fedshift.errors import InputError
from fedshift.real import described, number, numbers
from fedshift.server.charges import affordable, as_lam, as_sizes, at_fraction
from fedshift.server.mixture import (
    Mixture,
    at_ess,
    at_lam,
    ess_fraction,
    mixture,
    squared_gap,
)
from fedshift.server.norm_form import at_lam_norm, norm_evidence
from fedshift.server.pals_input import (
    LARGEST_LAM,
    SUM_TOLERANCE,
    Fidelity,
    Given,
    check_costs,
    check_setting,
    checked_charges,
    given_of,
)
from fedshift.server.simplex import Floats, Solution, objective, residual
from fedshift.sketch import sketched

# An answer counts as exact up to this gap and this proven L1 error. The gap's own
# rounding is about 1e-16 |f|; the bound on the error is of second order in rounding.
GAP_TOLERANCE = 1e-12
L1_TOLERANCE = 1e-6


@sketched
@dataclass(frozen=True, eq=False)
class PalsWeights:
    """Weights and the evidence for them.

    weights       a [M], which sum to 1
    ess           1 / sum_i a_i^2/n_i, in examples; ess_fraction is ess / N
    distance      ||T - S^T a0||, a0 the answer at lam = 0: how far T lies outside what the clients
                  can mix (under the cap)
    residual      [K], T - S^T a
    gap           the Frank-Wolfe gap, a bound on f(a) - f*
    l1_bound      sqrt(N gap / lam), which bounds ||a - a*||_1; inf at lam = 0
    certified     the gap is at most 1e-12 max(1, |f|), a is on the simplex to 1e-12, and
                  ||a - a*||_1 <= 1e-6 by the duality gap of the active set and a charge for
                  rounding and for the projection at lam = 0
    lam           the lambda of these weights; where `ess` was given, the smallest that reaches it
    note          says so where `ess` changes nothing because lam = 0 already has as much

    a* is the optimum for the very numbers given, at `lam`; at lam = 0 the max-ESS minimiser.
    """

    weights: Floats
    ess: float
    ess_fraction: float
    distance: float
    residual: Floats
    gap: float
    l1_bound: float
    certified: bool
    lam: float
    note: str = ""


def effective_sample_size(weights: ArrayLike, sizes: ArrayLike) -> float:
    """ESS(a) = 1 / sum_i a_i^2 / n_i over the clients with a_i > 0, in examples (Kish 1965).

    It is N at a = n / N, its largest value, and n_i when client i has all the weight. Raises
    InputError when the lengths differ or a client without examples has a positive weight.

    >>> from fedshift.server.pals import effective_sample_size
    >>> effective_sample_size([0.5, 0.5], [100, 300])
    300.0
    """
    try:
        a, n = numbers(weights), numbers(sizes)
    except ValueError as error:
        raise InputError(f"weights and sizes must be two lists of numbers; {error}") from error
    if a.shape != n.shape or a.ndim != 1:
        raise InputError(
            f"weights and sizes must be two lists of one length; got {a.shape}, {n.shape}"
        )
    used = a > 0.0
    if not used.any() or not (n[used] > 0.0).all():
        raise InputError(
            "some weight must be positive, and only clients with examples may have one"
        )
    if not np.isfinite(np.concatenate([a, n])).all() or float(min(a.min(), n.min())) < 0.0:
        raise InputError("weights and sizes must be finite and 0 or more")
    with np.errstate(all="ignore"):
        ess = float(1.0 / np.sum(a[used] ** 2 / n[used]))
    if not 0.0 < ess < math.inf:
        raise InputError("weights or sizes are too small or too large: their squares are no floats")
    return ess


def pals_weights(
    label_counts: ArrayLike,
    target: ArrayLike,
    *,
    lam: float | None = None,
    ess: float | None = None,
    cap: float | None = None,
    fidelity: Fidelity = "squared",
    normalise_target: bool = False,
    cost: ArrayLike | None = None,
    price: ArrayLike | None = None,
    rows: ArrayLike | None = None,
) -> PalsWeights:
    """FedPALS weights: argmin_a ||T - S^T a||^2 + lam sum_i a_i^2/n_i, sum a = 1, 0 <= a_i <= cap.

    label_counts  [M, K], 0 or more; S_i = counts_i / n_i. Clients without examples get 0
    target        T [K], which sums to 1 within 1e-6 (rescaled only with `normalise_target`); a
                  label that no client has stays in `residual`
    lam           in units of examples, 0 <= lam <= inf; or
    ess           a fraction in (0, 1]: the smallest lam with ESS / N >= ess
    cap           in (0, 1], bounds every weight
    fidelity      "norm" minimises ||T - S^T a|| + lam sum_i a_i^2/n_i, not squared; it is solved
                  as a_norm(lam) = a_squared(2 r lam) with r = ||T - S^T a|| at the solution
    cost          [M], 0 or more: sum_i cost_i a_i^2 is added, for variances beside sampling; then
                  lam is 0 if left out. `cost = lam / n` alone is `lam`, bit for bit
    price         [M], any sign: price . a is added, what each client's weight costs in itself
    rows          [M, d], any sign, in the place of S, with T [d]: embeddings of the clients'
                  labels. label_counts then give the sizes n_i only

    lam = 0 is the limit lam -> 0+, the minimiser of the distance with the largest ESS, and so is
    any lam below 1e-12 N; lam = inf is n / N (with a cap, the largest ESS under it). With costs
    or prices every lam / n_i + cost_i must be above 0.

    >>> solved = fs.pals_weights([[90, 10], [20, 80]], [0.5, 0.5], lam=0)
    >>> solved.weights.round(3).tolist(), round(solved.ess), solved.certified
    ([0.429, 0.571], 196, True)
    >>> dear = fs.pals_weights([[90, 10], [20, 80]], [0.5, 0.5], lam=1, price=[0, 0.2])
    >>> dear.weights.round(3).tolist()
    [0.53, 0.47]

    Raises InputError for counts or a target of another form, for clients of less than 1e-12
    or more than 1e18 examples, for lam and ess both or neither or out of range (lam > 0 goes from
    1e-100 to 1e100), for costs, prices or rows out of range or of another length, prices with
    fidelity "norm", and for a cap or an ess that cannot be met.

    FedPALS, eq. 8 and 9. The authors' development code minimises the unsquared form, by SLSQP,
    which is too loose for the second term; eq. 8 and we square the norm. The cap is ours.
    """
    check_setting(lam, ess, cap, fidelity, charged=cost is not None)
    settled("normalise_target", normalise_target, bool)
    given = given_of(label_counts, target, cap, normalise_target, rows)
    if cost is not None or price is not None:
        return _charged(given, lam, ess, fidelity, _charges(given, cost, price, fidelity))
    clients = _mixed(given)
    if ess is not None:
        return _with_ess(clients, number(ess), fidelity)
    return _with_lam(clients, number(lam) + 0.0, fidelity)  # -0.0 is 0.0


def ess_curve(
    label_counts: ArrayLike,
    target: ArrayLike,
    fractions: Sequence[float],
    *,
    cap: float | None = None,
    fidelity: Fidelity = "squared",
) -> tuple[PalsWeights, ...]:
    """`pals_weights` at each ESS fraction, in the order given; the hull is searched only once.

    Raises InputError as `pals_weights` does, and for fractions outside (0, 1].

    >>> curve = fs.ess_curve([[90, 10], [10, 90], [50, 0]], [0.1, 0.9], (0.5, 0.75, 1))
    >>> [weights.weights.round(2).tolist() for weights in curve]
    [[0.11, 0.89, 0.0], [0.23, 0.68, 0.09], [0.4, 0.4, 0.2]]
    """
    if isinstance(fractions, str) or not isinstance(fractions, Iterable):
        raise InputError(
            f"fractions must be a list of ESS fractions, as (0.25, 0.5); got {described(fractions)}"
        )
    checked = list(fractions)
    for fraction in checked:
        check_setting(None, fraction, cap, fidelity)
    clients = _mixed(given_of(label_counts, target, cap, False))
    return tuple(_with_ess(clients, number(fraction), fidelity) for fraction in checked)


# --------------------------------------------------------------------------- solving


@dataclass(frozen=True, eq=False)
class _Clients:
    """The mixture that is solved for, and what it was made of."""

    mixture: Mixture
    given: Given


def _with_ess(clients: _Clients, fraction: float, fidelity: Fidelity) -> PalsWeights:
    lam, solution = at_ess(clients.mixture, fraction)
    if math.isnan(lam):
        most = ess_fraction(clients.mixture.merged, solution.weights)
        raise _too_much(fraction, most)
    # At both ends the two forms have the same solution.
    if fidelity == "squared" or lam in (0.0, math.inf):
        return _with_note(_result(clients, lam, solution), fraction)
    distance = _distance(clients, solution)
    return _norm_result(clients, lam / (2.0 * distance), lam, solution)


def _too_much(fraction: float, most: float) -> InputError:
    return InputError(
        f"ess={fraction:g} cannot be met: under this cap the largest ESS is {most:.6g} of the "
        "examples; raise cap or lower ess"
    )


def _with_note(solved: PalsWeights, fraction: float) -> PalsWeights:
    """Add a note where the requested ESS is below that of lambda = 0."""
    if solved.lam or not solved.ess_fraction > fraction * (1 + 1e-9):
        return solved
    return replace(
        solved,
        note=f"ess={fraction:g} changes nothing: the closest mixture (lam=0) already has "
        f"{solved.ess_fraction:.4g}",
    )


def _with_lam(clients: _Clients, lam: float, fidelity: Fidelity) -> PalsWeights:
    lam /= clients.given.unit(fidelity)
    if fidelity == "squared" or lam in (0.0, math.inf) or clients.mixture.only_equal:
        return _result(clients, lam, at_lam(clients.mixture, lam))
    mu, solution = at_lam_norm(clients.mixture, lam)
    return _norm_result(clients, lam, mu, solution)


def _result(clients: _Clients, lam: float, solution: Solution) -> PalsWeights:
    weights = clients.mixture.expand(solution.weights)
    f = objective(clients.mixture.full, 0.0 if lam == math.inf else lam, weights)
    gap = squared_gap(clients.mixture, lam, weights)
    return _report(clients, "squared", lam, weights, f, gap, solution.error)


def _norm_result(clients: _Clients, lam: float, mu: float, solution: Solution) -> PalsWeights:
    weights = clients.mixture.expand(solution.weights)
    n = clients.mixture.full.sizes
    size = _distance(clients, solution)
    gap, error = norm_evidence(clients.mixture, lam, mu, solution)
    f = size + lam * float(np.sum(weights**2 / n))
    return _report(clients, "norm", lam, weights, f, gap, error)


def _report(
    clients: _Clients, form: Fidelity, lam: float, active: Floats, f: float, gap: float,
    error: float,
) -> PalsWeights:  # fmt: skip
    full, given = clients.mixture.full, clients.given
    total, scale, unit = float(given.sizes.sum()), given.scale, given.unit(form)
    weights = np.zeros(given.count)
    weights[given.places] = active
    unmatched = scale * residual(full, active)
    nearest = residual(full, clients.mixture.expand(clients.mixture.nearest))
    # Read-only: results may be cached and handed out again.
    for array in (weights, unmatched):
        array.setflags(write=False)
    exact = gap <= GAP_TOLERANCE * max(1.0, abs(f)) and error <= L1_TOLERANCE
    on_simplex = abs(float(active.sum()) - 1.0) <= SUM_TOLERANCE and float(active.min()) >= 0.0
    # Never above N, so that the fraction can be given back as `ess`.
    ess = min(effective_sample_size(active, given.sizes), total)
    return PalsWeights(
        weights=weights,
        ess=ess,
        ess_fraction=ess / total,
        distance=scale * float(np.linalg.norm(nearest)),
        residual=unmatched,
        gap=unit * gap,
        l1_bound=0.0 if lam == math.inf else _l1_bound(full.total, gap, lam),
        certified=exact and on_simplex,
        lam=unit * lam,
    )


def _distance(clients: _Clients, solution: Solution) -> float:
    return float(np.linalg.norm(residual(clients.mixture.merged, solution.weights)))


def _l1_bound(total: float, gap: float, lam: float) -> float:
    return math.sqrt(total * gap / lam) if lam > 0.0 else math.inf


def _mixed(given: Given) -> _Clients:
    of = given
    return _Clients(mixture(of.rows, of.sizes, of.target, of.bound, of.counts), given)


# ------------------------------------------------------------------- costs and prices


def _charges(
    given: Given, cost: ArrayLike | None, price: ArrayLike | None, fidelity: Fidelity
) -> tuple[Floats, Floats]:
    """Costs and prices of the clients with examples, in the units of the scaled rows."""
    if price is not None and fidelity == "norm":
        raise InputError('fidelity "norm" takes no price; leave it out for the squared form')
    none, unit = np.zeros(given.count), given.unit(fidelity)
    costs = none if cost is None else checked_charges("cost", cost, given.count, 0.0)
    prices = none if price is None else checked_charges("price", price, given.count, -LARGEST_LAM)
    return costs[given.places] / unit, prices[given.places] / unit


def _charged(
    given: Given, lam: float | None, ess: float | None, fidelity: Fidelity,
    charges: tuple[Floats, Floats],
) -> PalsWeights:  # fmt: skip
    """`pals_weights` with costs and prices: at a lam, 0 if left out, or at an ESS."""
    solve = partial(_with_charges, given, fidelity, *charges)
    if ess is None:
        return solve(0.0 if lam is None else number(lam) + 0.0)
    fraction, examples = number(ess), float(given.sizes.sum())
    # Also where all are 0 and nothing has a price: then it is the programme without either.
    free = bool(charges[0].all()) or not (charges[0].any() or np.ptp(charges[1]))
    solved = at_fraction(solve, fraction, examples, free)
    if solved is None:
        raise _too_much(fraction, solve(math.inf).ess_fraction)
    return _with_note(solved, fraction)


def _with_charges(
    given: Given, fidelity: Fidelity, cost: Floats, price: Floats, lam: float
) -> PalsWeights:
    if lam == math.inf:  # it outweighs all else
        return _with_lam(_mixed(given), lam, fidelity)
    if not cost.any() and not np.ptp(price):
        return _with_lam(_mixed(given), lam, fidelity)
    costs, rows = lam / given.unit(fidelity) / given.sizes + cost, given.rows - given.target
    check_costs(costs)
    dear = affordable(price, costs, rows, given.bound < 1.0)
    exact = as_lam(costs, given.sizes) if dear is None else None
    m, mu = as_sizes(costs, given.sizes) if exact is None else (given.sizes, exact)
    of = given
    clients = _Clients(mixture(of.rows, m, of.target, of.bound, of.counts, dear), given)
    solved = _with_lam(clients, mu * given.unit(fidelity), fidelity)
    return solved if exact is not None and not lam else replace(solved, lam=lam)
