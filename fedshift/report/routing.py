"""The report's part on routers: where queries are sent, and the gain of refusing some."""

from __future__ import annotations

from collections.abc import Sequence

from fedshift.record.folder import RunResult
from fedshift.record.summary import RouterDetails
from fedshift.report.charts import SENT, Axis, HeatMap, LineChart, Series
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
from fedshift.report.tables import Table

# At less coverage, the risk is that of a handful of queries, and would dominate the scale.
LEAST_COVERAGE = 0.05
AUC_CAPTION = "Pairwise AUC: 1 where two clients' queries can be told apart, 0.5 where they cannot"


def shown_curve(
    coverage: Sequence[float], risk: Sequence[float]
) -> tuple[list[float], list[float]]:
    """The part of a curve that is drawn: from LEAST_COVERAGE on."""
    points = [(c, r) for c, r in zip(coverage, risk, strict=True) if c >= LEAST_COVERAGE]
    return [c for c, _ in points], [r for _, r in points]


def routing(runs: Sequence[RunResult], labels: Sequence[str]) -> str:
    """The section on routers: where queries are sent, risk by coverage, and calibration."""
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
    caption = (
        "Queries are answered in the order of the router's largest posterior. To the left only "
        "those are answered of which the router is surest; on the right edge all are. Drawn from "
        f"{LEAST_COVERAGE:.0%} on."
    )
    risk = figure(risk_of_runs([(label, q) for _, label, q in routed]), caption)
    parts = [table(quality), note(text), risk]
    for run, label, q in routed:
        parts += [run_heading(runs, label), *_destinations(run, label, q)]
    return section("routing", "The router", *parts)


def _destinations(run: RunResult, label: str, q: RouterDetails) -> list[str]:
    alone = Split((run,), (label,), (0,))
    drawn = alone.drawn(MOST_DRAWN)
    names, short = looked_names(run), [c.name for c in run.clients]
    rows = tuple(tuple(q.sent[i][j] for j in drawn) for i in drawn)
    notes = tuple(
        tuple(f"from {names[i]} to {names[j]}: {percent(q.sent[i][j])}" for j in drawn)
        for i in drawn
    )
    title = f"Where each client's queries are sent ({label})"
    clients, columns = (tuple(of[i] for i in drawn) for of in (names, short))
    drawing = HeatMap(title, clients, columns, rows, notes, SENT)
    caption = "Rows: whose test example it is. Columns: the client that it is sent to. "
    parts = [figure(drawing, caption + left_out(alone, MOST_DRAWN))]
    if len(short) <= MOST_DRAWN:
        auc = by_client(run, short, q.auc, ".3f", AUC_CAPTION)
        parts += [fold(by_client(run, short, q.sent)), fold(auc)]
    return parts


def risk_of_runs(routed: Sequence[tuple[str, RouterDetails]]) -> LineChart:
    """The risk of each run with a router, from LEAST_COVERAGE on."""
    curves = [(label, shown_curve(q.coverage, q.risk)) for label, q in routed]
    series = [Series(label, tuple(x), tuple(y)) for label, (x, y) in curves]
    return risk_chart("Risk against coverage", series)


def risk_chart(title: str, series: Sequence[Series]) -> LineChart:
    """Errors among the answered queries over the share that is answered."""
    across = Axis("coverage: share of queries that are answered", percent=True, zero=True)
    axis = Axis("risk: share of wrong answers", percent=True, zero=True)
    return LineChart(title, tuple(series), across, axis)
