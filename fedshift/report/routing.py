"""The part of the report on routers: where queries go, and what is gained by refusing some."""

from __future__ import annotations

from collections.abc import Sequence

from fedshift.record.folder import RunResult
from fedshift.record.summary import RouterDetails
from fedshift.report.heat_map import SENT, heat_map
from fedshift.report.layout import figure, fold, note, section, table
from fedshift.report.splits import (
    MOST_DRAWN,
    Split,
    by_client,
    left_out,
    looked_names,
    percent,
    run_heading,
    serving_runs,
)
from fedshift.report.svg import PALETTE, Axis, Series, line_chart
from fedshift.report.tables import Table

# Risk at less coverage comes from a handful of queries, and would dominate the scale.
LEAST_COVERAGE = 0.05
AUC_CAPTION = "Pairwise AUC: 1 where two clients' queries can be told apart, 0.5 where they cannot"


def shown_curve(
    coverage: Sequence[float], risk: Sequence[float]
) -> tuple[list[float], list[float]]:
    """The part of a curve that is drawn: from LEAST_COVERAGE on."""
    points = [(c, r) for c, r in zip(coverage, risk, strict=True) if c >= LEAST_COVERAGE]
    return [c for c, _ in points], [r for _, r in points]


def routing(runs: Sequence[RunResult], labels: Sequence[str]) -> str:
    """Where queries are sent, how errors fall with coverage, and calibration."""
    routed = [(r, b, s.router) for r, b, s in serving_runs(runs, labels) if s.router is not None]
    if not routed:
        return ""
    quality = Table(
        ("Run", "ECE", "Brier score", "AURC"),
        tuple((label, q.ece, q.brier, q.aurc) for _, label, q in routed),
        ("", ".4f", ".4f", ".4f"),
    )
    text = (
        "ECE: how far the router's probabilities are from how often it is right (0 best). Brier "
        "score: squared error of the probabilities (0 best, 2 worst). AURC: area under the curve "
        "of risk against coverage (0 best). All of the last round, before refitting."
    )
    parts = [table(quality), note(text), _risk([(label, q) for _, label, q in routed])]
    for run, label, q in routed:
        parts += [run_heading(runs, label), *_destinations(run, label, q)]
    return section("routing", "The router", *parts)


def _destinations(run: RunResult, label: str, q: RouterDetails) -> list[str]:
    alone = Split((run,), (label,), (0,))
    drawn = alone.drawn()
    names, short = looked_names(run), [c.name for c in run.clients]
    rows = [[q.sent[i][j] for j in drawn] for i in drawn]
    notes = [
        [f"from {names[i]} to {names[j]}: {percent(q.sent[i][j])}" for j in drawn] for i in drawn
    ]
    title = f"Where each client's queries are sent ({label})"
    columns = [short[j] for j in drawn]
    drawing = heat_map(title, [names[i] for i in drawn], columns, rows, notes=notes, shades=SENT)
    caption = "Rows: whose test example it is. Columns: the client that it is sent to. "
    parts = [figure(drawing, caption + left_out(alone))]
    if len(short) <= MOST_DRAWN:
        auc = by_client(run, short, q.auc, ".3f", AUC_CAPTION)
        parts += [fold(by_client(run, short, q.sent)), fold(auc)]
    return parts


def _risk(routed: Sequence[tuple[str, RouterDetails]]) -> str:
    series = []
    # From 1: the first colour is that of FedAvg's bars in the other charts.
    for i, (label, q) in enumerate(routed, start=1):
        x, y = shown_curve(q.coverage, q.risk)
        series.append(Series(label, tuple(x), tuple(y), i, dash=i // len(PALETTE)))
    caption = (
        "Queries are answered in the order of the router's largest posterior. To the left only "
        "those are answered of which the router is surest; on the right edge all are. Drawn from "
        f"{LEAST_COVERAGE:.0%} on."
    )
    return figure(risk_chart("Risk against coverage", series), caption)


def risk_chart(title: str, series: Sequence[Series]) -> str:
    """Errors among the answered queries over the share that is answered."""
    across = Axis("coverage: share of queries that are answered", percent=True, zero=True)
    return line_chart(title, series, across, Axis("risk: share of wrong answers", True, True))
