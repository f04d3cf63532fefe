"""A diagnosis as plain sentences, built from its numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fedshift.diagnosis import NOTICEABLE, Diagnosis, Label

# A match is called close to exact up to one percent of misplaced mass, which is half the L1
# distance.
NEARLY = 2 * NOTICEABLE
# Warn of a client with more than this share of the weight.
DOMINANT = 1 / 3


def sentences(d: Diagnosis) -> tuple[str, ...]:
    """The verdict: coverage, labels, FedAvg, the chosen weights, largest clients, the risk."""
    # In order of importance: first what decides whether to train at all, last the risks.
    parts = (
        _coverage(d),
        _missing(d),
        _beyond(d),
        _outsiders(d),
        _interval(d),
        _cap(d),
        _fedavg(d),
        _first(d),
        _chosen(d),
        _cost(d),
        _weighed(d),
        _carriers(d),
        _alone(d),
        _exposure(d),
        _certainty(d),
    )
    return tuple(p for p in parts if p)


def _coverage(d: Diagnosis) -> str:
    if d.case == "inside":
        return (
            "Covered: the clients can be mixed into exactly the target's label distribution, with "
            "every client taking part."
        )
    if d.case == "face":
        return (
            "Covered, at the edge: the clients can be mixed into exactly the target's label "
            "distribution, but only by leaving at least one of them out."
        )
    if d.closest_gap <= NEARLY:
        return (
            "Not covered, but nearly: the closest mixture of the clients misplaces only "
            f"{_share(d.closest_gap / 2)} of the label mass (hull distance {_distance(d)})."
        )
    return (
        "Not covered: no weighting of the clients gives the target's label distribution; the "
        f"closest mixture misplaces {_share(d.closest_gap / 2)} of the label mass (hull distance "
        f"{_distance(d)})."
    )


def _missing(d: Diagnosis) -> str:
    if not d.missing:
        return ""
    mass = sum(label.target for label in d.labels if label.name in d.missing)
    return (
        f"No client has any example of {_list(d.missing)}, {_share(mass)} of the target: no "
        "weighting can make up for that; the model cannot learn "
        f"{'these labels' if len(d.missing) > 1 else 'this label'} here."
    )


def _beyond(d: Diagnosis) -> str:
    """Labels out of reach other than the missing ones, which have their own sentence."""
    short = [name for name in d.deficit if name not in d.missing]
    parts = []
    if short:
        parts.append(f"too little of {_list(_worst(d, short))}")
    if d.surplus:
        parts.append(f"too much of {_list(_worst(d, d.surplus))}")
    return f"Even the closest mixture has {' and '.join(parts)}." if parts else ""


def _outsiders(d: Diagnosis) -> str:
    if not (d.covered and d.outsiders):
        return ""
    return (
        f"{d.outsiders} of {d.clients} clients have labels that the target does not have; an exact "
        "match must give them weight 0."
    )


def _interval(d: Diagnosis) -> str:
    if d.interval is None:
        return ""
    return (
        f"Taking each client's counts as a sample of its own label distribution, the hull distance "
        f"lies between {d.interval.low:.3g} and {d.interval.high:.3g} ({d.interval.level:.0%} "
        f"bootstrap interval, {d.interval.draws} draws)."
    )


def _cap(d: Diagnosis) -> str:
    if d.cap is None or d.capped_gap is None:
        return ""
    return (
        f"With no weight above {d.cap:g}, the closest mixture misplaces "
        f"{_share(d.capped_gap / 2)} of the label mass."
    )


def _fedavg(d: Diagnosis) -> str:
    if d.fedavg_gap <= NEARLY:
        return (
            f"FedAvg already trains on nearly the target's labels (it misplaces "
            f"{_share(d.fedavg_gap / 2)}): target-aware weights have little to gain."
        )
    under = [x for x in d.labels if x.target - x.fedavg > NOTICEABLE]
    over = [x for x in d.labels if x.fedavg - x.target > NOTICEABLE]
    # The largest differences first: only the first few are named.
    under.sort(key=lambda x: x.fedavg - x.target)
    over.sort(key=lambda x: x.target - x.fedavg)
    parts = []
    if under:
        parts.append(f"it under-weights {_list([_instead(x) for x in under])}")
    if over:
        parts.append(f"over-weights {_list([_instead(x) for x in over])}")
    detail = (
        f": {' and '.join(parts)}" if parts else f", no label by more than {_share(NOTICEABLE)}"
    )
    return f"FedAvg misplaces {_share(d.fedavg_gap / 2)} of the label mass{detail}."


def _first(d: Diagnosis) -> str:
    """What docs/which-method.md says to try before any weights: to correct the prior."""
    if d.fedavg_gap <= NEARLY:
        return ""
    return (
        'First try FedAvg with a corrected prior (training.prior = "calibrated"): it needs no '
        "weights and no further training. Judge weights by what they add to it, corrected alike."
    )


def _chosen(d: Diagnosis) -> str:
    c = d.chosen
    prefixes = {"rule": "Recommended", "lam": "With the lambda given", "ess": "With the ESS given"}
    lam = "lambda infinite" if c.lam == float("inf") else f"lambda {c.lam:.4g}"
    return (
        f"{prefixes[d.chosen_by]}: effective sample size {_share(c.ess_fraction)} ({lam}), which "
        f"misplaces {_share(c.l1 / 2)} of the label mass, against FedAvg's "
        f"{_share(d.fedavg_gap / 2)}; {c.ess:.0f} of {d.examples:.0f} examples' worth of precision."
        f"{_needless(d)}"
    )


def _needless(d: Diagnosis) -> str:
    """A note if the requested ESS is below that of lambda 0, which is then used."""
    if d.asked is None or d.chosen.lam or d.chosen.ess_fraction <= d.asked * (1 + 1e-9):
        return ""
    return (
        f" You asked for {_share(d.asked)}: the closest mixture has more, so that changes nothing."
    )


def _cost(d: Diagnosis) -> str:
    least = d.curve[0]
    if least.ess_fraction >= 0.25:
        return ""
    return (
        "Matching the labels as closely as possible (lambda 0) has the precision of only "
        f"{_share(least.ess_fraction)} of the examples."
    )


def _weighed(d: Diagnosis) -> str:
    if not d.weighed_ess:
        return ""
    where = "on the target's other labels" if d.missing else "at gap 0"
    return (
        f"Re-weighting examples (fedpals_joint) would give an effective sample size of "
        f"{d.weighed_ess:.0f} examples {where}; clients would learn the target's label shares."
    )


def _carriers(d: Diagnosis) -> str:
    used = [c for c in d.carriers if c.weight > 0]
    # The fewest clients that carry 90 % of the weight; `carriers` is sorted by weight.
    count, total = 0, 0.0
    while total < 0.9 and count < len(used):
        total += used[count].weight
        count += 1
    first = used[0]
    idle = d.clients - len(used)
    rest = f" {idle} of {d.clients} get weight 0 and need not train." if idle else ""
    shares = f"{_share(first.weight)} ({_share(first.n_share)} of the examples)"
    carry = "carries" if count == 1 else "carry"
    return (
        f"{count} of {d.clients} clients {carry} {_share(total)} of the weight; the largest is "
        f'"{first.name}" with {shares}.{rest}'
    )


def _alone(d: Diagnosis) -> str:
    """Clients that the match depends on: without them the distance rises noticeably."""
    needed = [
        f'"{c.name}" ({_distance(d)} to {c.without:.3g})'
        for c in d.carriers
        if c.without is not None and c.without > d.distance + NOTICEABLE
    ]
    return f"The hull distance rises without {_list(needed)}." if needed else ""


def _exposure(d: Diagnosis) -> str:
    warning = (
        " A single client decides a third or more of every update: consider a cap or a larger ESS."
        if d.largest_weight >= DOMINANT and d.clients > 3
        else ""
    )
    return (
        f"{_dishonest(d)} Noise for differential privacy must be {d.noise_factor:.3g} times that "
        f"of equal weights.{warning}"
    )


def _dishonest(d: Diagnosis) -> str:
    """What one client gains by false counts, and what bounds it."""
    if d.cap is not None:
        return (
            f"Whatever a dishonest client claims, the cap leaves it at most {_share(d.cap)} of the "
            "average."
        )
    if d.claim is None:
        return "One client has all of the average."
    more = ", and more by claiming more" if d.claim.gains < 0.999 else ""
    # Rounded up: a cap below the largest weight, if only by rounding, would change that weight.
    lie, limit = d.claim, math.ceil(1000 * d.largest_weight) / 1000
    cap = (
        f"cap = {limit:g} leaves these weights as they are, and no client more than {_share(limit)}"
        if limit < 1
        else f"one below 1, which takes some from {_share(d.largest_weight)}, the largest weight"
    )
    return (
        "Nothing here bounds the weight of a dishonest client: by claiming "
        f"{lie.examples:.0f} examples distributed as the target, as many as all have together, "
        f'"{lie.name}" would have {_share(lie.gains)} of the average instead of '
        f"{_share(lie.weight)}{more}. Only a cap does: {cap}."
    )


def _certainty(d: Diagnosis) -> str:
    return "" if d.certified else "These weights are not certified to be the exact optimum."


def _instead(label: Label) -> str:
    return f"{label.name} ({_share(label.fedavg)} instead of {_share(label.target)})"


def _worst(d: Diagnosis, names: Sequence[str]) -> list[str]:
    """Names with both masses, the largest difference first."""
    rows = [label for label in d.labels if label.name in names]
    rows.sort(key=lambda x: -abs(x.closest - x.target))
    return [f"{x.name} ({_share(x.closest)} instead of {_share(x.target)})" for x in rows]


def _list(names: Sequence[str], limit: int = 4) -> str:
    """`a, b and c`, or the first few and how many more."""
    first = list(names[:limit])
    if len(names) > limit:
        return f"{', '.join(first)} and {len(names) - limit} more"
    return " and ".join([", ".join(first[:-1]), first[-1]]) if len(first) > 1 else first[0]


def _distance(d: Diagnosis) -> str:
    """The hull distance; 0 if it is zero within rounding."""
    # A distance of 1e-17 is rounding, and would look like a finding.
    return "0" if d.covered else f"{d.distance:.3g}"


def _share(value: float) -> str:
    """A share of one in percent; a small one is never rounded down to nothing."""
    if value == 0:
        return "0 %"
    return "less than 0.1 %" if 0 < value < 0.0005 else f"{100 * value:.1f} %"
