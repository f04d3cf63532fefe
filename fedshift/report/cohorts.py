"""Runs whose rounds draw a cohort each: what `summary.json` and a page say of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

if TYPE_CHECKING:
    from fedshift.report.run_folder import RunResult

Number = Annotated[int, Field(ge=1)]


@dataclass(frozen=True)
class Cohorts:
    """How many clients a round draws, and over how many rounds the weights are means."""

    clients: Number
    rounds: Number


def cohort_note(runs: Sequence[RunResult], labels: Sequence[str]) -> str:
    """What ESS, gap and weights are of such runs; empty where there are none."""
    drawn = [
        f"{label} ({s.cohorts.clients} of {len(s.weights)} clients a round, {s.cohorts.rounds} "
        "rounds)"
        for s, label in zip((r.summary for r in runs), labels, strict=True)
        if s.cohorts is not None
    ]
    if not drawn:
        return ""
    return (
        f" Every round of {', '.join(drawn)} draws a cohort and weighs it anew: ESS, its share (of "
        "the cohort's examples), gap and each client's weight are means over the rounds that were "
        "played; who is not drawn has weight 0."
    )
