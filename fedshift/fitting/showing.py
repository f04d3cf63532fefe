"""A result in a few lines, as text and as HTML."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING

from fedshift.errors import visible

if TYPE_CHECKING:
    from fedshift.fitting.result import Result


def text_of(result: Result) -> str:
    """Its main numbers, one per line, and its notes."""
    rows = _rows(result)
    wide = max(len(name) for name, _ in rows)
    lines = [_title(result), *(f"  {name:<{wide}}  {value}" for name, value in rows)]
    return visible("\n".join([*lines, *(f"  {note}" for note in _notes(result))]), keep="\n")


def html_of(result: Result) -> str:
    """The same as a table."""
    rows = "".join(
        f"<tr><th style='text-align:left'>{escape(name)}</th><td>{escape(value)}</td></tr>"
        for name, value in _rows(result)
    )
    notes = "".join(f"<li>{escape(note)}</li>" for note in _notes(result))
    return f"<table><caption>{escape(_title(result))}</caption>{rows}</table><ul>{notes}</ul>"


def _title(result: Result) -> str:
    summary = result.summary
    many, round_ = len(result.clients), summary.final.round
    return f"{summary.method} on {summary.dataset}: {many} clients, after round {round_}"


def _rows(result: Result) -> list[tuple[str, str]]:
    summary, (estimate, error) = result.summary, result.estimate
    rows = [("target", result.target), ("target accuracy", _percent(result.accuracy))]
    if not math.isnan(estimate):
        how = "from the clients' validation counts"
        rows.append(("estimated", f"{_percent(estimate)} ± {_percent(error)}, {how}"))
    if summary.ess is not None and summary.ess_fraction is not None:
        size = f"{float(summary.ess):.0f}"
        rows.append(("ESS", f"{size} examples, {_percent(summary.ess_fraction, 0)} of all"))
    if summary.distance is not None:
        rows.append(("gap to the target", f"{summary.distance:.3f}"))
    if chosen := summary.selection:
        rows.append(("chosen", f"{chosen.chosen} of {len(chosen.candidates)} by {chosen.rule}"))
    if serving := summary.serving:
        worst = min((v for v in serving.client_accuracy or () if v is not None), default=math.nan)
        rows.append(("worst client", _percent(worst)))
    return [*rows, *((name, f"{value:.4g}") for name, value in result.metrics.items())]


def _notes(result: Result) -> list[str]:
    return [*result.summary.why, *result.notes]


def _percent(share: float, digits: int = 1) -> str:
    return "–" if math.isnan(share) else f"{100 * share:.{digits}f} %"
