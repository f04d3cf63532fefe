"""Runs whose clients serve models of their own, and shared pieces of their report."""

from __future__ import annotations

from collections.abc import Sequence

from fedshift.record.folder import RunResult
from fedshift.record.summary import Serving
from fedshift.report.shapes import escape
from fedshift.report.splits import client_names
from fedshift.report.tables import MISSING, Table


def serving_runs(
    runs: Sequence[RunResult], labels: Sequence[str]
) -> list[tuple[RunResult, str, Serving]]:
    """The runs whose clients serve their own models, with labels."""
    pairs = zip(runs, labels, strict=True)
    return [(r, b, r.summary.serving) for r, b in pairs if r.summary.serving is not None]


def by_client(
    run: RunResult,
    columns: Sequence[str],
    values: Sequence[Sequence[float | None]],
    spec: str = ".1%",
    caption: str = "",
) -> Table:
    """A row per client under the names of `columns`."""
    rows = tuple((n, *row) for n, row in zip(client_names(run), values, strict=True))
    return Table(("Client", *columns), rows, ("", *[spec] * len(columns)), caption)


def percent(value: float | None) -> str:
    """With one decimal; a dash for None."""
    return MISSING if value is None else f"{value:.1%}"


def run_heading(runs: Sequence[RunResult], label: str) -> str:
    """A heading with the run's label; "" for a single run."""
    return f"<h3>{escape(label)}</h3>" if len(runs) > 1 else ""
