"""Label sets in a run's results: who holds each label, when it was absent, and central tuning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from fedshift.algorithms.method import Method
from fedshift.algorithms.tuning import CentralTuning
from fedshift.engine.run import Round
from fedshift.record.summary import LabelSets, Optima, SetRound
from fedshift.server.optima import MEASURED
from fedshift.tree import Params, Parts

# A loss that rises by less, relative or in nats, may have risen by rounding in float32.
RISES, NATS = 1e-4, 1e-6
# So many clients are named.
MOST = 5
# A gain within so many standard errors may be none.
ERRORS = 2.0
PAGE = "docs/methods/central_tuning.md"
BLIND = (
    "Will tuning pay? This run cannot tell: give server.validation, or compare with the same run "
    'under tune = "none".'
)
DOUBT = (
    'with mode = "private" the optima of mse and pairwise did not tell in our runs whether tuning '
    f"gains; that of kl did ({PAGE})"
)
DISCOURAGED = (
    'tune = "kl" moves the head alone here, in every round, which gained nothing in our runs; '
    f'tune_part = "all" with tune_rounds = 3 gained where averaging is poor ({PAGE}).'
)


def set_round(current: Round, algorithm: Method) -> tuple[SetRound, ...]:
    """What the server has recorded on label sets in a round; () for a method without label sets.

    Losses are given only if the stage of this round tunes: in later stages the server's state
    still has the numbers of the last tuning.
    """
    server = current.server
    # Recognised by the server's state, so that a new method with label sets works without a change
    # here.
    if "absent" not in server:
        return ()
    absent, tuning = int(server["absent"]["now"].sum()), server.get("tuning", {})
    optima = _optima(tuning) if "accuracy" in tuning else None
    rules = algorithm.at(current.t).label_rules()
    if not tuning or rules is None or rules["tune"] == "none":
        return (SetRound(current.t, absent, optima=optima),)
    (loss, loss_after), (outside, outside_after) = (
        tuning[name].tolist() for name in ("loss", "outside")
    )
    return (SetRound(current.t, absent, loss, loss_after, outside, outside_after, optima),)


def _optima(tuning: Params) -> Optima:
    aggregate, mse, pairwise, kl = tuning["accuracy"].tolist()
    errors = dict(zip(MEASURED[1:], tuning["gain_se"].tolist(), strict=True))
    return Optima(aggregate, mse, pairwise, kl, errors)


def tuned_early(current: Round, algorithm: Method, rounds: int) -> tuple[SetRound, ...]:
    """`set_round` of a round that a run records even if it is not evaluated; else ().

    Round 1 if optima are measured: its forecasts are those that were tested. And rounds that tune,
    if the last of all `rounds` does not: by the first evaluation the tuning may be over.
    """
    if current.t == 1 and "accuracy" in current.server.get("tuning", {}):
        return set_round(current, algorithm)
    now, at_end = (algorithm.at(t).label_rules() for t in (current.t, rounds))
    if now is None or at_end is None or now["tune"] == "none" or at_end["tune"] != "none":
        return ()
    return set_round(current, algorithm)


def final_values(rounds: Sequence[SetRound]) -> dict[str, float | None]:
    """The last evaluated round's values, by their names in "final" of summary.json."""
    if not rounds:
        return {}
    last = asdict(rounds[-1])
    last.pop("round")
    optima = last.pop("optima") or {}
    optima.pop("gain_se", None)
    last |= {f"optimum_{k}" if k != "aggregate" else k: v for k, v in optima.items()}
    return {f"sets_{name}": value for name, value in last.items()}


def described(algorithm: Method, server: Parts, rounds: Sequence[SetRound]) -> LabelSets | None:
    """The summary's part on label sets; None for a method without them.

    If the server takes no tuning steps, tune is "none" and tune_over None.
    """
    if not rounds:
        return None
    rules, tuning = algorithm.label_rules(), _tuning(algorithm)
    labelled = None if tuning is None or tuning.labelled is None else len(tuning.labelled)
    return LabelSets(
        **(rules or {"mode": None, "tune": "none", "tune_over": None}),
        labelled=labelled,
        holders=tuple(server["sets"]["held"].sum(0).tolist()),
        absent_rounds=tuple(server["absent"]["rounds"].tolist()),
        single=tuple((server["sets"]["held"].sum(1) == 1).nonzero().flatten().tolist()),
        rounds=tuple(rounds),
    )


def _tuning(algorithm: Any) -> CentralTuning | None:
    """The method itself, or the one that it wraps, if that tunes; else None."""
    if algorithm is None or isinstance(algorithm, CentralTuning):
        return algorithm
    return _tuning(getattr(algorithm, "inner", None))


def sentences(
    sets: LabelSets, classes: Sequence[str], algorithm: Method | None = None
) -> list[str]:
    """Sentences on labels that are missing, always or at times, and on what tuning did."""
    last, lines = sets.rounds[-1], list[str]()
    # A label without a holder is absent in every round: its number of rounds would say nothing.
    without_holder = [c for c, n in zip(classes, sets.holders, strict=True) if not n]
    if without_holder:
        lines.append(f"No client holds {_named(without_holder)}: {_rows_without_holder(sets)}.")
    at_times = [
        f'"{c}" ({n})'
        for c, n, holders in zip(classes, sets.absent_rounds, sets.holders, strict=True)
        if n and holders
    ]
    if at_times:
        lines.append(
            f"Rounds of {last.round} in which no client of the cohort held a label: "
            f"{', '.join(at_times)}."
        )
    if sets.single and sets.mode == "private":
        whose = ", ".join(f"client {i}" for i in sets.single[:MOST])
        whose += f" and {n} more" if (n := len(sets.single) - MOST) > 0 else ""
        lines.append(
            f"A single label is at {whose}: among its own labels such a client is always right, "
            "so its loss and its gradient are 0, and its examples teach the model nothing."
        )
    if last.outside_after is not None and last.absent:
        lines.append(
            f"In the last round central tuning moved the mass on the {last.absent} absent "
            f"label{'s' * (last.absent > 1)} from {last.outside_before:.1%} to "
            f"{last.outside_after:.1%}."
        )
    return lines + _rise(sets.rounds) + _prospects(sets) + _discouraged(sets, algorithm)


def _rise(rounds: Sequence[SetRound]) -> list[str]:
    """A sentence on the worst round, if central tuning raised its own loss in any recorded one."""
    tuned = [(r.loss_before, r.loss_after, r.round) for r in rounds if r.loss_before is not None]
    rises = [
        (after - before, before, after, t)
        for before, after, t in tuned
        if after is not None and after > before * (1 + RISES) + NATS
    ]
    if not rises:
        return []
    _, before, after, t = max(rises)
    often = f", the most of {len(rises)} such rounds of {len(tuned)}" if len(rises) > 1 else ""
    return [
        f"Central tuning raised its loss from {before:.4g} to {after:.4g} in round {t}{often}; "
        "lower tune_lr."
    ]


def _discouraged(sets: LabelSets, algorithm: Method | None) -> list[str]:
    """A sentence where the run tunes as our runs advise against."""
    tuning = _tuning(algorithm)
    if tuning is None or (sets.mode, sets.tune) != ("private", "kl"):
        return []
    return [DISCOURAGED] if tuning.part == "head" and not tuning.rounds else []


def _prospects(sets: LabelSets) -> list[str]:
    """Whether central tuning will pay: the loss's optimum in the first round that measured it."""
    first = next((r for r in sets.rounds if r.optima), None)
    if first is None or first.optima is None:
        return [BLIND] if sets.tune not in (None, "none") else []
    # A method that does not tune has no loss of its own; "kl" predicts best whether it would gain.
    optima, loss = first.optima, sets.tune if sets.tune in first.optima.gains else "kl"
    texts = {k: f"{k} {optima.gain_text(k)}" for k in optima.gains}
    others = ", ".join(text for k, text in texts.items() if k != loss)
    late = " Forecasts were tried for round 1 alone." if first.round > 1 else ""
    doubt = f" W{DOUBT[1:]}." if sets.mode == "private" and loss == "kl" else ""
    examples = "" if sets.labelled is None else f"{sets.labelled:,} "
    return [
        f"Will tuning pay? {_answer(sets, optima, loss)}. In round {first.round} the aggregate has "
        f"{optima.aggregate:.1%} on the server's {examples}labelled examples, and the optimum of "
        f"each loss, in points more, with its standard error: {texts[loss]}; beside it {others}."
        f"{late}{doubt}"
    ]


def _answer(sets: LabelSets, optima: Optima, loss: str) -> str:
    """Yes, no or cannot tell, by the optimum of one loss; and why not."""
    gain, error = optima.gains[loss], (optima.gain_se or {}).get(loss)
    if sets.mode == "private" and loss != "kl":
        return f"Cannot tell: {DOUBT}"
    # One of 0 is no certainty: all examples did the same.
    if not error:
        return f"Cannot tell: {'the gain has no standard error' if gain else 'no example changed'}"
    if abs(gain) <= ERRORS * error:
        return "Cannot tell: the gain is within two standard errors"
    return "Yes" if gain > 0 else "No: this loss leads away from the truth"


def _rows_without_holder(sets: LabelSets) -> str:
    """What happens to the rows of labels that no client holds."""
    movers = []
    if sets.mode == "public":
        movers.append('every client\'s softmax is over all labels (mode = "public")')
    if sets.tune_over == "all":
        movers.append('central tuning moves all rows (tune_over = "all")')
    if not movers:
        return "the rows of the head stay as they began"
    return f"no example trains them, yet the rows of the head move, as {' and '.join(movers)}"


def _named(classes: Sequence[str]) -> str:
    return ", ".join(f'"{c}"' for c in classes)
