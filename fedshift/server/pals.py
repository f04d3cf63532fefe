"""FedPALS aggregation weights: convex weights that pull the clients' labels towards the target.

    a = argmin over the simplex of ||T - S^T a||^2 + lam * sum_i a_i^2 / n_i     (FedPALS, eq. 8-9)

S [M, K] has the clients' label shares, n [M] their sizes, T [K] the target's label shares. The
second term is lam / ESS(a): lam trades the match of the labels against effective sample size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from fedshift.arguments import settled
from fedshift.errors import InputError
from fedshift.real import described, number, numbers
from fedshift.server.mixture import at_ess, at_lam, ess_fraction, squared_gap
from fedshift.server.norm_form import at_lam_norm, norm_evidence
from fedshift.server.pals_input import SUM_TOLERANCE, Fidelity, check_setting
from fedshift.server.programme import Programme, lam_of_ess, prepare
from fedshift.server.simplex import Floats, Solution, objective, residual
from fedshift.sketch import sketched

# A result counts as exact up to this gap and this proven L1 error. (Rounding of the gap itself is
# about 1e-16 |f|; in the bound on the error, rounding is of second order.)
GAP_TOLERANCE = 1e-12
L1_TOLERANCE = 1e-6


@sketched
@dataclass(frozen=True, eq=False)
class PalsWeights:
    """Weights and the evidence for them.

    weights       a [M], which sum to 1
    ess           1 / sum_i a_i^2/n_i, in examples; ess_fraction is ess / N
    distance      ||T - S^T a0||, a0 the weights at lam = 0: how far T is from the nearest mixture
                  of the clients (under the cap)
    residual      [K], T - S^T a
    gap           the Frank-Wolfe gap, a bound on f(a) - f*
    l1_bound      sqrt(N gap / lam), which bounds ||a - a*||_1; inf at lam = 0
    certified     the gap is at most 1e-12 max(1, |f|), a is on the simplex to 1e-12, and
                  ||a - a*||_1 <= 1e-6 is proved by the duality gap of the active set, with
                  allowances for rounding and for the projection at lam = 0
    lam           the lambda of these weights; if `ess` was given, the smallest that reaches it
    note          if `ess` changes nothing because lam = 0 already has as much, says so

    a* is the optimum at `lam` for exactly the numbers given; at lam = 0 the max-ESS minimiser.
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

    Its largest value is N, at a = n / N; it is n_i if client i has all the weight. Raises
    InputError if the lengths differ, if weights do not sum to 1 within 1e-6, or if a client without
    examples has a positive weight.

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
    if abs(float(a.sum()) - 1.0) > 1e-6:
        raise InputError(f"weights sum to {a.sum():.9g}, and must sum to 1; give a / a.sum()")
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

    lam = 0 means the limit lam -> 0+, which of all minimisers of the distance is the one with the
    largest ESS; so does any lam below 1e-12 N. lam = inf is n / N (with a cap, the largest ESS
    under it).

    Three more arguments make f(a) = ||T - S^T a||^2 + sum_i (cost_i + lam/n_i) a_i^2 + price . a:

    cost   [M], above 0: what a client's weight costs besides lam/n_i, such as the noise of its
           counts. With it, lam and ess may be left out (lam = 0); cost = lam/n equals that lam
    price  [M], of either sign: a large one leaves the client out. Only differences matter
    rows   [M, d], embeddings to use as S_i, which may be negative; the target [d] is one as well,
           and label_counts may be the sizes [M]

    >>> solved = fs.pals_weights([[90, 10], [20, 80]], [0.5, 0.5], lam=0)
    >>> solved.weights.round(3).tolist(), round(solved.ess), solved.certified
    ([0.429, 0.571], 196, True)

    Raises InputError for counts or a target in another form, for clients with less than 1e-12
    or more than 1e18 examples, for both lam and ess or neither, for values out of range (lam > 0
    goes from 1e-100 to 1e100), and for a cap or an ess that cannot be met.

    FedPALS, eq. 8 and 9. The authors' development code minimises the unsquared form, by SLSQP,
    which is too loose for the second term; eq. 8 and we square the norm. Cap, cost, price and rows
    are ours.
    """
    lam = 0.0 if cost is not None and lam is None and ess is None else lam
    check_setting(lam, ess, cap, fidelity)
    settled("normalise_target", normalise_target, bool)
    if fidelity == "norm" and (given := _names(cost=cost, price=price, rows=rows)):
        raise InputError(f'fidelity="norm" takes no {given}; leave fidelity out: it is "squared"')
    clients, lam = prepare(label_counts, target, lam, cap, normalise_target, cost, price, rows)
    if ess is not None:
        return _undo_scaling(_with_ess(clients, number(ess), fidelity), clients.scale)
    solved = _with_lam(clients, number(lam) + 0.0, fidelity)  # -0.0 is 0.0
    return _undo_scaling(solved, clients.scale)


def _undo_scaling(solved: PalsWeights, scale: float) -> PalsWeights:
    """The result in the units of the user's rows, which `prepare` may have divided by `scale`."""
    if scale == 1.0:
        return solved
    unmatched = solved.residual * scale
    unmatched.setflags(write=False)
    return replace(
        solved,
        distance=solved.distance * scale,
        residual=unmatched,
        gap=solved.gap * scale**2,
        lam=solved.lam * scale**2,
    )


def _names(**given: object) -> str:
    return " and no ".join(name for name, value in given.items() if value is not None)


def ess_curve(
    label_counts: ArrayLike,
    target: ArrayLike,
    fractions: Sequence[float],
    *,
    cap: float | None = None,
    fidelity: Fidelity = "squared",
) -> tuple[PalsWeights, ...]:
    """`pals_weights` at each ESS fraction, in the order given; the target is projected only once.

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
    clients, _ = prepare(label_counts, target, 0.0, cap, False)
    return tuple(_with_ess(clients, number(fraction), fidelity) for fraction in checked)


# --------------------------------------------------------------------------- solving


def _with_ess(clients: Programme, fraction: float, fidelity: Fidelity) -> PalsWeights:
    """The weights at the smallest lam that reaches this fraction."""
    if clients.cost is not None:
        lam = lam_of_ess(clients, fraction)
        if not math.isnan(lam):
            return _with_note(_with_lam(clients, lam, fidelity), fraction)
        solution = at_lam(clients.mixture, math.inf)
    else:
        lam, solution = at_ess(clients.mixture, fraction)
    if math.isnan(lam):
        # The solution is then the one with the largest ESS.
        most = ess_fraction(clients.mixture.merged, solution.weights)
        raise InputError(
            f"ess={fraction:g} cannot be met: under this cap the largest ESS is {most:.6g} of the "
            "examples; raise cap or lower ess"
        )
    # At lam = 0 and inf the squared and the unsquared form have the same solution.
    if fidelity == "squared" or lam in (0.0, math.inf):
        return _with_note(_result(clients, lam, solution), fraction)
    distance = _distance(clients, solution)
    return _norm_result(clients, lam / (2.0 * distance), lam, solution)


def _with_note(solved: PalsWeights, fraction: float) -> PalsWeights:
    """Add a note if the requested ESS is below that of lambda = 0."""
    if solved.lam or not solved.ess_fraction > fraction * (1 + 1e-9):
        return solved
    return replace(
        solved,
        note=f"ess={fraction:g} changes nothing: the closest mixture (lam=0) already has "
        f"{solved.ess_fraction:.4g}",
    )


def _with_lam(clients: Programme, lam: float, fidelity: Fidelity) -> PalsWeights:
    """The weights at this lam; a programme with costs is solved at lam = 1 (`Programme.costed`)."""
    if clients.cost is not None and lam < math.inf:
        at = clients.costed(lam)
        return replace(_result(at, 1.0, at_lam(at.mixture, 1.0)), lam=lam)
    if fidelity == "squared" or lam in (0.0, math.inf) or clients.mixture.only_equal:
        return _result(clients, lam, at_lam(clients.mixture, lam))
    mu, solution = at_lam_norm(clients.mixture, lam)
    return _norm_result(clients, lam, mu, solution)


def _result(clients: Programme, lam: float, solution: Solution) -> PalsWeights:
    """Weights and evidence from a solution of the squared problem."""
    weights = clients.mixture.expand(solution.weights)
    f = objective(clients.mixture.full, 0.0 if lam == math.inf else lam, weights)
    gap = squared_gap(clients.mixture, lam, weights)
    return _report(clients, lam, weights, f, gap, solution.error)


def _norm_result(clients: Programme, lam: float, mu: float, solution: Solution) -> PalsWeights:
    """Weights and evidence for the unsquared problem; the squared one at mu has this solution."""
    weights = clients.mixture.expand(solution.weights)
    n = clients.mixture.full.sizes
    size = _distance(clients, solution)
    gap, error = norm_evidence(clients.mixture, lam, mu, solution)
    return _report(clients, lam, weights, size + lam * float(np.sum(weights**2 / n)), gap, error)


def _report(
    clients: Programme, lam: float, active: Floats, f: float, gap: float, error: float
) -> PalsWeights:
    """`PalsWeights` of all clients from the weights of those with examples."""
    full, n = clients.mixture.full, clients.examples
    weights = np.zeros(clients.count)
    weights[clients.places] = active
    unmatched = residual(full, active)
    nearest = residual(full, clients.mixture.expand(clients.mixture.nearest))
    # Read-only, because results may be cached and returned again.
    for array in (weights, unmatched):
        array.setflags(write=False)
    exact = gap <= GAP_TOLERANCE * max(1.0, abs(f)) and error <= L1_TOLERANCE
    on_simplex = abs(float(active.sum()) - 1.0) <= SUM_TOLERANCE and float(active.min()) >= 0.0
    # At most N, despite rounding, so that the fraction can be used as `ess` again.
    total = float(n.sum())
    ess = min(effective_sample_size(active, n), total)
    return PalsWeights(
        weights=weights,
        ess=ess,
        ess_fraction=ess / total,
        distance=float(np.linalg.norm(nearest)),
        residual=unmatched,
        gap=gap,
        l1_bound=0.0 if lam == math.inf else _l1_bound(full.total, gap, lam),
        certified=exact and on_simplex,
        lam=lam,
    )


def _distance(clients: Programme, solution: Solution) -> float:
    return float(np.linalg.norm(residual(clients.mixture.merged, solution.weights)))


def _l1_bound(total: float, gap: float, lam: float) -> float:
    return math.sqrt(total * gap / lam) if lam > 0.0 else math.inf
