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
from fedshift.server.dual import Floats, linear_gap
from fedshift.server.pals_input import SUM_TOLERANCE, Fidelity, check_setting
from fedshift.server.programme import Answer, Programme, prepare
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

    Two more arguments make f(a) = ||T - S^T a||^2 + sum_i (cost_i + lam/n_i) a_i^2:

    cost   [M], above 0: what a client's weight costs besides lam/n_i, such as the noise of its
           counts. With it, lam and ess may be left out (lam = 0); cost = lam/n equals that lam
    rows   [M, d], embeddings to use as S_i, which may be negative; the target [d] is one as well,
           and label_counts may be the sizes [M]

    >>> solved = fs.pals_weights([[90, 10], [20, 80]], [0.5, 0.5], lam=0)
    >>> solved.weights.round(3).tolist(), round(solved.ess), solved.certified
    ([0.429, 0.571], 196, True)

    Raises InputError for counts or a target in another form, for clients with less than 1e-12
    or more than 1e18 examples, for both lam and ess or neither, for values out of range (lam > 0
    goes from 1e-100 to 1e100), and for a cap or an ess that cannot be met.

    FedPALS, eq. 8 and 9. The authors' development code minimises the unsquared form, by SLSQP,
    which is too loose for the second term; eq. 8 and we square the norm. Cap, cost and rows are
    ours.
    """
    lam = 0.0 if cost is not None and lam is None and ess is None else lam
    check_setting(lam, ess, cap, fidelity)
    settled("normalise_target", normalise_target, bool)
    if fidelity == "norm" and not (cost is None and rows is None):
        given = "rows" if cost is None else "cost" if rows is None else "cost and no rows"
        raise InputError(f'fidelity="norm" takes no {given}; leave fidelity out: it is "squared"')
    clients = prepare(label_counts, target, cap, normalise_target, cost, rows)
    if ess is not None:
        return _with_ess(clients, number(ess), fidelity)
    return _result(clients, clients.at_lam(number(lam) + 0.0, fidelity))  # -0.0 is 0.0


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
    clients = prepare(label_counts, target, cap, False)
    return tuple(_with_ess(clients, number(fraction), fidelity) for fraction in checked)


# --------------------------------------------------------------------------- solving


def _with_ess(clients: Programme, fraction: float, fidelity: Fidelity) -> PalsWeights:
    """The weights at the smallest lam that reaches this fraction."""
    answer = clients.at_ess(fraction, fidelity)
    if math.isnan(answer.lam):
        # The answer is then the one with the largest ESS.
        raise InputError(
            f"ess={fraction:g} cannot be met: under this cap the largest ESS is "
            f"{clients.fraction(answer.weights):.6g} of the examples; raise cap or lower ess"
        )
    solved = _result(clients, answer)
    if solved.lam or not solved.ess_fraction > fraction * (1 + 1e-9):
        return solved
    return replace(
        solved,
        note=f"ess={fraction:g} changes nothing: the closest mixture (lam=0) already has "
        f"{solved.ess_fraction:.4g}",
    )


def _result(clients: Programme, answer: Answer) -> PalsWeights:
    """Weights of all clients and the evidence for them, from an answer for the merged ones."""
    rows, n, lam = clients.rows, clients.examples, answer.lam
    active = clients.expand(answer.weights)
    weights = np.zeros(clients.count)
    weights[clients.places] = active
    unmatched = -(active @ rows)
    size, widest = float(np.linalg.norm(unmatched)), max(1.0, clients.scale)
    # Read-only, because results may be cached and returned again.
    for array in (weights, unmatched):
        array.setflags(write=False)
    rate = 1.0 / n if lam == math.inf else clients.cost + lam / n
    pull = 2.0 * rate * active
    if lam == math.inf:
        f, gap = float(rate @ active**2), linear_gap(pull, active, clients.upper)
    elif answer.norm_gap is not None:
        f, gap = size + float(rate @ active**2), answer.norm_gap
    else:
        f = size**2 + float(rate @ active**2)
        gap = linear_gap(pull - 2.0 * (rows @ unmatched), active, clients.upper)
    exact = gap <= GAP_TOLERANCE * max(widest**2, abs(f)) and answer.error <= L1_TOLERANCE
    on_simplex = abs(float(active.sum()) - 1.0) <= SUM_TOLERANCE and float(active.min()) >= 0.0
    # At most N, despite rounding, so that the fraction can be used as `ess` again.
    total = float(n.sum())
    ess = min(effective_sample_size(active, n), total)
    return PalsWeights(
        weights=weights,
        ess=ess,
        ess_fraction=ess / total,
        distance=float(np.linalg.norm(clients.expand(clients.nearest) @ rows)),
        residual=unmatched,
        gap=gap,
        l1_bound=0.0 if lam == math.inf else math.sqrt(total * gap / lam) if lam else math.inf,
        certified=bool(exact and on_simplex),
        lam=lam,
    )
