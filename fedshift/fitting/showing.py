"""The main numbers of a result in a few lines, as text and as HTML."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import NamedTuple

from fedshift.errors import visible
from fedshift.record.headline import (
    NOTHING,
    Headline,
    headline,
    percent,
    serves_own,
    without_rows,
)
from fedshift.record.rounds import ESTIMATES
from fedshift.record.summary import Summary


class Facts(NamedTuple):
    """What a result shows: a title, numbers by name in order, and sentences."""

    title: str
    numbers: Mapping[str, str]
    notes: tuple[str, ...]


# The sentence that explains the two numbers of a corrected model; {} is `training.prior`.
SERVED = (
    'The model that answers is corrected for the target\'s labels (prior="{}"); prior="none" '
    "leaves it as trained."
)


def headline_of(summary: Summary, *, corrected: bool) -> Headline:
    """The main number of the model that answers, and its estimate."""
    main, final = headline(summary), summary.final
    if not corrected:
        return main
    estimate, error = final.estimated_accuracy_corrected, final.estimated_se_corrected
    near = NOTHING if estimate is None else f"{percent(estimate)} ± {percent(error)}"
    return Headline(main.name, percent(final.target_accuracy_corrected), near)


def facts_of(
    summary: Summary, target: str, metrics: Mapping[str, float], notes: tuple[str, ...], *,
    corrected: bool = False,
) -> Facts:  # fmt: skip
    """What to show of a run; target: in words; metrics: the user's own.

    corrected: whether the model that answers is corrected, see `training.prior`.
    """
    final, many = summary.final, len(summary.weights)
    main = headline_of(summary, corrected=corrected)
    rows = ", on the clients' test rows, drawn to its shares" * without_rows(target)
    numbers = {"target": target, main.name: f"{main.value}{rows}"}
    if corrected and summary.corrected is not None:
        numbers["as trained"] = f"{headline(summary).value}, uncorrected"
        notes = (SERVED.format(summary.corrected.form), *notes)
    if main.estimate != NOTHING:
        from_what = "rows" if summary.kind == "regression" else "counts"
        numbers["estimated"] = f"{main.estimate}, from the clients' validation {from_what}"
    others = summary.final.others
    if serves_own(summary) and others.get("system_accuracy") is not None:
        routed = others.get("router_accuracy") is not None
        by = "the router's choice" if routed else "the vote"
        numbers["system accuracy"] = f"{percent(others['system_accuracy'])}, by {by} of all models"
    if summary.ess is not None and summary.ess_fraction is not None:
        of_all = percent(summary.ess_fraction, 0)
        numbers["ESS"] = f"{float(summary.ess):.0f} examples, {of_all} of all"
    if summary.distance is not None:
        numbers["gap to the target"] = f"{summary.distance:.3f}"
    if chosen := summary.selection:
        numbers["chosen"] = f"{chosen.chosen} of {len(chosen.candidates)} by {chosen.rule}"
    if serving := summary.serving:
        accuracies = [v for v in serving.client_accuracy or () if v is not None]
        numbers["worst client"] = percent(min(accuracies, default=None))
    whose = ", as trained" * corrected
    numbers |= {
        name: f"{value:.4g}{whose}"
        for name, value in metrics.items()
        if name not in (*ESTIMATES, "rmse")
    }
    title = f"{summary.method} on {summary.dataset}: {many} clients, after round {final.round}"
    return Facts(title, numbers, (*summary.why, *notes))


def text_of(facts: Facts) -> str:
    """The facts as text: a number on each line, then the sentences."""
    wide = max(map(len, facts.numbers))
    rows = (f"  {name:<{wide}}  {value}" for name, value in facts.numbers.items())
    return visible("\n".join([facts.title, *rows, *(f"  {n}" for n in facts.notes)]), keep="\n")


def html_of(facts: Facts) -> str:
    """The facts as HTML: a table and a list."""
    rows = "".join(
        f"<tr><th style='text-align:left'>{escape(name)}</th><td>{escape(value)}</td></tr>"
        for name, value in facts.numbers.items()
    )
    notes = "".join(f"<li>{escape(note)}</li>" for note in facts.notes)
    return f"<table><caption>{escape(facts.title)}</caption>{rows}</table><ul>{notes}</ul>"
