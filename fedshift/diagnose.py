"""From label counts alone: can a mixture of the clients match the target, and at what price?"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import scipy.optimize
from numpy.typing import ArrayLike, NDArray

from fedshift.diagnosis import Carrier, Claim, CurvePoint, Diagnosis, Interval, Label
from fedshift.errors import InputError, shown
from fedshift.real import described, is_whole, number, numbers
from fedshift.server.pals import PalsWeights, ess_curve, pals_weights
from fedshift.server.shares import rescaled
from fedshift.verdict import sentences

__all__ = ["FRACTIONS", "TOLERANCE", "Diagnosis", "diagnose", "distance_interval"]

Floats = NDArray[np.float64]

# The paper's grid (Zec et al., FedPALS, App. B.3): lambda = 0, these, and all of the examples.
FRACTIONS = (0.1, 0.25, 0.5, 0.75)
# Distances are square roots of objectives solved to about 1e-12, so a distance below 1e-6 may be
# zero.
TOLERANCE = 1e-6
# Below this smallest weight, in units of 1/M, a client counts as left out.
_ALL_TAKE_PART = 1e-6
_LEAVE_OUT = 5
# Limits on resamples of a bootstrap, and on a client's examples in one; more are no more exact.
MOST_DRAWS, MOST_DRAWN = 100_000, 2**53
COUNTED = "The target was given as counts; they were divided by their sum."
RULE = "the setting on the curve with the least cost = L1 distance / 2 + sqrt(K / ESS)"


def diagnose(
    label_counts: ArrayLike,
    target: ArrayLike,
    *,
    classes: Sequence[str] | None = None,
    clients: Sequence[str] | None = None,
    lam: float | None = None,
    ess: float | None = None,
    cap: float | None = None,
    normalise_target: bool = False,
    bootstrap: int = 0,
    seed: int = 0,
) -> Diagnosis:
    """A `Diagnosis` of the clients before any training: coverage, weights and their risks.

    With S_i = counts_i / n_i and a(lambda) the FedPALS weights: the target is covered when
    min_a ||T - S^T a||_2 <= `TOLERANCE`; the L1 distance is ||T - S^T a(lambda)||_1.

    label_counts, target  [M, K] and [K], as in `pals_weights`; a target of counts, whole numbers,
                          is divided by its sum, and the verdict says so
    classes, clients      names of the axes; left out: "0", "1", ...
    lam, ess, cap         a setting of `pals_weights`; without lam and ess it is recommended by
                          `RULE`, which is the least `cost`
    bootstrap             draws for an interval for the distance (`distance_interval`); 0: none
    seed                  of these draws

    >>> from fedshift.diagnose import diagnose
    >>> diagnosis = diagnose([[90, 10], [20, 80]], [0.5, 0.5], classes=["healthy", "ill"])
    >>> diagnosis.covered, diagnosis.case, round(diagnosis.chosen.ess)
    (True, 'inside', 196)

    Raises InputError as `pals_weights` does, for names that do not fit the counts, and for shares
    in place of counts.
    Source: Zec et al., FedPALS, eq. 8 and 9 and App. B.3 (the ESS heuristic).
    """
    normalise = normalise_target or _are_counts(target)
    closest = pals_weights(label_counts, target, lam=0.0, normalise_target=normalise)  # checks all
    data = _data(label_counts, target, classes, clients, normalise)
    curve, solved = _curve(data, closest, lam, ess, cap)
    case = _case(data, closest)
    diagnosis = Diagnosis(
        covered=case != "outside",
        distance=closest.distance,
        tolerance=TOLERANCE,
        case=case,
        closest_gap=_l1(closest),
        capped_gap=None if cap is None else curve[0].l1,
        cap=cap,
        outsiders=int((data.counts[:, data.T == 0].sum(axis=1) > 0).sum()),
        labels=_labels(data, closest.weights, solved.weights),
        curve=curve,
        weighed_ess=_weighed_ess(data),
        asked=ess,
        chosen_by="lam" if lam is not None else "ess" if ess is not None else "rule",
        rule=RULE,
        carriers=_carriers(data, solved.weights),
        certified=bool(solved.certified and closest.certified),
        claim=_claim(data, solved, ess) if cap is None else None,
        interval=_interval(data, bootstrap, seed),
    )
    return replace(diagnosis, verdict=_verdict(diagnosis, data, normalise and not normalise_target))


def _verdict(diagnosis: Diagnosis, data: _Data, counted: bool) -> tuple[str, ...]:
    empty = [shown(name) for name, n in zip(data.clients, data.n, strict=True) if n == 0]
    left_out = [f"Left out, since they have no example: {', '.join(empty)}."] if empty else []
    return (*sentences(diagnosis), *[COUNTED] * counted, *left_out)


def _are_counts(target: ArrayLike) -> bool:
    """Whether the target is whole numbers that sum to more than 1."""
    try:
        given = numbers(target)
    except ValueError:
        return False  # `pals_weights` says what is wrong
    return bool(np.isfinite(given).all() and (given == np.rint(given)).all() and given.sum() > 1)


def distance_interval(
    label_counts: ArrayLike,
    target: ArrayLike,
    *,
    draws: int = 200,
    level: float = 0.95,
    seed: int = 0,
) -> Interval:
    """[d - q, d + q] for the hull distance d, taking each client's counts as a multinomial sample.

    d^ = ||T - S^^T a^|| with S^ [M, K] estimated from counts, and q the `level` quantile of
    ||(S* - S^)^T a^|| over `draws` resamples S* of the clients that a^ weighs. With the true S and
    its projection a, |d - d^| <= max(||(S^ - S)^T a||, ||(S^ - S)^T a^||): each a is one choice
    in the other's minimum. The usual bootstrap, which solves again per resample, is slower and
    covers worse: d^ is biased upward where T is (nearly) covered, as noise moves the hull off T
    and a distance is never negative, and resampling adds that bias a second time; far outside,
    the nearest of many noisy clients biases it downward. Measured coverage at 95 %: 95 to 100 %,
    so it is wider than need be; too narrow (72 %) only where n_i < K and few clients make up T.

    Raises `InputError` as `pals_weights` does, and for draws < 20 or a level outside (0, 1).
    """
    in_range = is_whole(draws) and 20 <= draws <= MOST_DRAWS
    if not in_range or not 0.0 < number(level) < 1.0:
        raise InputError(
            f"bootstrap: draws={described(draws)}, level={described(level)}; at least 20 draws, a "
            f"whole number up to {MOST_DRAWS}, and 0 < level < 1"
        )
    # Imported here: it loads torch, which a diagnosis without a bootstrap does not need.
    from fedshift.seeds import numpy_generator

    closest = pals_weights(label_counts, target, lam=0.0)
    counts = numbers(label_counts)
    rng = numpy_generator("diagnose", "bootstrap", seed)
    shifts = np.zeros((draws, counts.shape[1]))
    for i in np.flatnonzero(closest.weights > 0):
        S_i = counts[i] / counts[i].sum()
        # Counts may be fractions, as of weighted examples; a multinomial needs a whole number.
        n_i = min(max(1, round(counts[i].sum())), MOST_DRAWN)
        shifts += closest.weights[i] * (rng.multinomial(n_i, S_i, size=draws) / n_i - S_i)
    q = float(np.quantile(np.linalg.norm(shifts, axis=1), level))
    return Interval(max(0.0, closest.distance - q), closest.distance + q, level, draws)


def _interval(data: _Data, draws: int, seed: int) -> Interval | None:
    # All but the whole number 0 goes to `distance_interval`, which refuses what is no count.
    if is_whole(draws) and draws == 0:
        return None
    return distance_interval(data.counts, data.T, draws=draws, seed=seed)


@dataclass(frozen=True)
class _Data:
    """Checked input: counts [M, K], sizes n [M], marginals S [M, K] (0 without data), T [K]."""

    counts: Floats
    n: Floats
    S: Floats
    T: Floats
    classes: tuple[str, ...]
    clients: tuple[str, ...]


def _data(
    label_counts: ArrayLike,
    target: ArrayLike,
    classes: Sequence[str] | None,
    clients: Sequence[str] | None,
    normalise: bool,
) -> _Data:
    """The arrays that `pals_weights` has accepted, with names for their axes."""
    counts, T = numbers(label_counts), numbers(target)
    n = counts.sum(axis=1)
    S = np.divide(counts, n[:, None], out=np.zeros_like(counts), where=n[:, None] > 0)
    return _Data(
        counts,
        n,
        S,
        rescaled(T) if normalise else T,
        _names("classes", classes, counts.shape[1]),
        _names("clients", clients, counts.shape[0]),
    )


def _names(what: str, names: Sequence[str] | None, count: int) -> tuple[str, ...]:
    if names is None:
        return tuple(str(i) for i in range(count))
    if isinstance(names, str):
        raise InputError(f'{what}: give a list of names, not the one text "{shown(names)}"')
    if not hasattr(names, "__len__") or not hasattr(names, "__getitem__"):
        raise InputError(f"{what}: give a list of {count} names; got {type(names).__name__}")
    if others := [name for name in names if not isinstance(name, str)]:
        raise InputError(
            f"{what}: names are text, not {described(others[0])}; give [str(i) for i in ...]"
        )
    if len(names) != count:
        raise InputError(f"{what}: {len(names)} names for {count} {what} in label_counts")
    name, repeats = Counter(names).most_common(1)[0]
    if repeats > 1:
        raise InputError(f'{what}: names must differ; "{shown(name)}" is given {repeats} times')
    return tuple(names)


def _curve(
    data: _Data, closest: PalsWeights, lam: float | None, ess: float | None, cap: float | None
) -> tuple[tuple[CurvePoint, ...], PalsWeights]:
    """The points from lambda = 0 to the largest ESS with one marked as chosen, and its weights."""
    given = None
    if lam is not None or ess is not None:
        given = pals_weights(data.counts, data.T, lam=lam, ess=ess, cap=cap)
    nearest = closest if cap is None else pals_weights(data.counts, data.T, lam=0.0, cap=cap)
    largest_ess = pals_weights(data.counts, data.T, lam=math.inf, cap=cap)
    # Fractions below the closest mixture's ESS would all give that mixture again.
    between = [f for f in FRACTIONS if nearest.ess_fraction < f < largest_ess.ess_fraction]
    grid = [nearest, *ess_curve(data.counts, data.T, between, cap=cap), largest_ess]
    names = ["λ = 0", *(f"{f:.0%}" for f in between), f"{largest_ess.ess_fraction:.0%}"]
    if given is not None:
        grid, names = [*grid, given], [*names, "given"]
    costs = [cost(_l1(w), w.ess, data.T.size) for w in grid]
    # Rounding must not decide between equal settings: of those, the largest ESS is preferred.
    level = min(costs) + 1e-9
    recommended = max(
        range(len(grid)), key=lambda i: (costs[i] <= level, round(grid[i].ess_fraction, 9), i)
    )
    chosen = recommended if given is None else len(grid) - 1
    rows = zip(grid, names, costs, strict=True)
    points = [_point(w, name, price, i == chosen) for i, (w, name, price) in enumerate(rows)]
    return tuple(sorted(points, key=lambda p: p.ess_fraction)), grid[chosen]


def cost(l1: float, ess: float, classes: int) -> float:
    """L1 / 2 + sqrt(K / ESS): the bias of training on another mixture, and its statistical error.

    Under label shift no model's accuracy differs by more than L1 / 2 between the mixture and the
    target, because the class-conditional distributions are the same; K numbers estimated from ESS
    examples err by the order of sqrt(K / ESS). Our choice, for want of validation data: the paper
    trains a model per ESS and selects on validation (App. B.3). A rule on the distance alone would
    spend nearly all of the examples on the last bit of a distance that stays large.

    Raises InputError for an l1 beyond 0 to 2, an ess that is not above 0, and less than one class.
    """
    if not (0.0 <= number(l1) <= 2.0 + 1e-6 and number(ess) > 0.0 and number(classes) >= 1.0):
        raise InputError(
            f"cost: l1={described(l1)}, ess={described(ess)}, classes={described(classes)}; l1 is "
            "between shares, 0 to 2, ess is in examples, above 0, and there is a class or more"
        )
    return l1 / 2 + math.sqrt(classes / ess)


def _point(w: PalsWeights, name: str, price: float, chosen: bool) -> CurvePoint:
    distance, largest = float(np.linalg.norm(w.residual)), float(w.weights.max())
    return CurvePoint(name, w.lam, w.ess, w.ess_fraction, distance, _l1(w), price, largest, chosen)


def _l1(w: PalsWeights) -> float:
    return float(np.abs(w.residual).sum())


def _weighed_ess(data: _Data) -> float:
    """1 / sum_y T_y^2 / n_y over the labels that clients have, T rescaled to these."""
    n = data.counts.sum(axis=0)
    reached = (data.T > 0) & (n > 0)
    T = data.T[reached]
    return float(T.sum() ** 2 / (T**2 / n[reached]).sum()) if reached.any() else 0.0


def _case(data: _Data, closest: PalsWeights) -> Literal["inside", "face", "outside"]:
    if closest.distance > TOLERANCE:
        return "outside"
    return "inside" if _smallest_weight(data, closest.weights) > _ALL_TAKE_PART else "face"


def _smallest_weight(data: _Data, weights: Floats) -> float:
    """max M min_i a_i over all a with the mixture of `weights`: 0 on a face, 1 at the centroid.

    Linear programme in b_i = a_i - s / M >= 0 and s: sum_i b_i S_i + s c = S^T weights, c the
    centroid. Rows are divided by c, so that a label of only a few clients is not lost below
    the solver's tolerance.
    """
    S = data.S[data.n > 0]
    c = S.mean(axis=0)
    present = c > 0
    rows = np.column_stack([(S[:, present] / c[present]).T, np.ones(int(present.sum()))])
    goal = (weights @ data.S)[present] / c[present]
    cost = np.append(np.zeros(len(S)), -1.0)
    result = scipy.optimize.linprog(cost, A_eq=rows, b_eq=goal, bounds=(0, None), method="highs")
    return float(result.x[-1]) if result.status == 0 else 0.0


def _labels(data: _Data, closest: Floats, chosen: Floats) -> tuple[Label, ...]:
    mixtures = [w @ data.S for w in (data.n / data.n.sum(), chosen, closest)]
    holders = (data.counts > 0).sum(axis=0)
    columns = np.column_stack([data.T, *mixtures]).tolist()
    return tuple(
        Label(name, T, fedavg, pals, nearest, int(count))
        for name, (T, fedavg, pals, nearest), count in zip(
            data.classes, columns, holders, strict=True
        )
    )


def _carriers(data: _Data, weights: Floats) -> tuple[Carrier, ...]:
    # Stable: clients of equal weight stay in the order in which they were given.
    order = [int(i) for i in np.argsort(-weights, kind="stable") if data.n[i] > 0]
    N = float(data.n.sum())
    return tuple(
        Carrier(
            data.clients[i],
            float(data.n[i]),
            float(data.n[i]) / N,
            float(weights[i]),
            # Each needs a projection of its own, so only those that matter most.
            _without(data, i) if rank < _LEAVE_OUT else None,
        )
        for rank, i in enumerate(order)
    )


def _claim(data: _Data, solved: PalsWeights, ess: float | None) -> Claim | None:
    """What a lie gains: the client of least weight claims N examples with the target's labels."""
    clients = [int(i) for i in np.flatnonzero(data.n > 0)]
    if len(clients) < 2:
        return None
    # The client of least weight, because it has the most to gain.
    least = min(clients, key=lambda i: (solved.weights[i], -i))
    claimed, examples = data.counts.copy(), float(data.n.sum())
    claimed[least] = examples * data.T
    # The setting stays what the user chose: lambda or an ESS.
    lam = solved.lam if ess is None else None
    gained = pals_weights(claimed, data.T, lam=lam, ess=ess).weights[least]
    return Claim(data.clients[least], float(solved.weights[least]), examples, float(gained))


def _without(data: _Data, client: int) -> float | None:
    """The hull distance without one client; None if no other client has data."""
    others = np.delete(data.counts, client, axis=0)
    return pals_weights(others, data.T, lam=0.0).distance if others.any() else None
