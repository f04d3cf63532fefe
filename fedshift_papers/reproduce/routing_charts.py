"""Charts of methods with a router: accuracy by client and class, routing, risk by coverage.

All show means over the seeds of a cell, after the last round of their runs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedshift.experiments.task.feature_shift import look_names
from fedshift.record.summary import RouterDetails, Serving, parsed
from fedshift.report.charts import ACCURACY, SENT, Chart, HeatMap, Series, Shades
from fedshift.report.routing import LEAST_COVERAGE, risk_chart
from fedshift.sweeps.store import Run, Store
from fedshift_papers.protocols.study import Column, Study
from fedshift_papers.reproduce.results import Cell

Floats = NDArray[np.float64]
# Coverages at which curves of several seeds are averaged.
COVERAGES = tuple(np.linspace(LEAST_COVERAGE, 1.0, 39).tolist())


@dataclass(frozen=True)
class Drawn:
    """A chart of a table, and its caption."""

    chart: Chart
    caption: str


@dataclass(frozen=True)
class Routed:
    """The runs of one router, one for each seed, under the label of the first row that has them."""

    label: str
    runs: tuple[Run, ...]
    details: tuple[Serving, ...]
    classes: tuple[str, ...]

    @property
    def routers(self) -> list[RouterDetails]:
        """The measurements of each seed's router."""
        return [d.router for d in self.details if d.router is not None]


def routing_charts(study: Study, cells: Sequence[Cell], store: Store) -> dict[str, Drawn]:
    """For each column with runs: two heat maps of its first router, and the risk curves of all.

    Raises DataError for a damaged run folder.
    """
    drawn: dict[str, Drawn] = {}
    for column in study.columns:
        routers = routed([c for c in cells if c.column is column], store)
        if routers:
            drawn |= (
                _accuracy_maps(column, routers[0])
                | _routing_maps(column, routers[0])
                | _risk(column, routers)
            )
    return drawn


def routed(cells: Sequence[Cell], store: Store) -> list[Routed]:
    """The distinct routers in the cells of a column; rows that read the same runs share one."""
    by_names: dict[tuple[str, ...], Routed | None] = {}
    for cell in cells:
        names = tuple(v.run.name for v in cell.values)
        if names and names not in by_names:
            by_names[names] = _read(cell, store)
    return [one for one in by_names.values() if one is not None]


def _read(cell: Cell, store: Store) -> Routed | None:
    """The seeds of a cell whose run has details of a router; None if no seed has any."""
    pairs = [(v.run, _details(v.run, store)) for v in cell.values]
    usable = [
        (run, serving)
        for run, serving in pairs
        if serving is not None and serving.router is not None
    ]
    if not usable:
        return None
    runs, details = zip(*usable, strict=True)
    classes = tuple(store.read(runs[0]).summary["classes"])
    return Routed(cell.row.label.partition(",")[0], runs, details, classes)


def _details(run: Run, store: Store) -> Serving | None:
    """The part "serving" of a run's summary; None if the run's version did not write it."""
    summary = store.read(run).summary
    return None if "serving" not in summary else parsed(json.dumps(summary)).serving


def mean_defined(matrices: Sequence[Sequence[Sequence[float | None]]]) -> tuple[Floats, Floats]:
    """(mean over the seeds that have a value, NaN if none has; how many have one), by entry."""
    stacked = np.array(matrices, dtype=np.float64)
    defined = ~np.isnan(stacked)
    count = defined.sum(0)
    total = np.where(defined, stacked, 0.0).sum(0)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan), count


def _accuracy_maps(column: Column, one: Routed) -> dict[str, Drawn]:
    title = f"Accuracy of each client's own model by class: {one.label}, {column.heading}"
    # Which classes a client has differs from seed to seed.
    matrices = [d.class_accuracy for d in one.details]
    return {f"{column.file}-own.svg": _map(title, one, one.classes, matrices, ACCURACY)}


def _routing_maps(column: Column, one: Routed) -> dict[str, Drawn]:
    title = f"Where each client's queries (rows) are sent: {one.label}, {column.heading}"
    clients = [str(i) for i in range(len(one.details[0].class_accuracy))]
    matrices = [r.sent for r in one.routers]
    return {f"{column.file}-sent.svg": _map(title, one, clients, matrices, SENT)}


def _map(
    title: str,
    one: Routed,
    columns: Sequence[str],
    matrices: Sequence[Sequence[Sequence[float | None]]],
    shades: Shades,
) -> Drawn:
    mean, count = mean_defined(matrices)
    rows = tuple(_names(one))
    values = tuple(tuple(None if np.isnan(v) else float(v) for v in row) for row in mean)
    notes = tuple(
        tuple(
            f"{name}, {column}: {value:.1%} (seeds: {n:.0f})"
            for column, value, n in zip(columns, means, counts, strict=True)
        )
        for name, means, counts in zip(rows, mean, count, strict=True)
    )
    drawing = HeatMap(title, rows, tuple(columns), values, notes, shades)
    return Drawn(drawing, f"{title}; {_seeds(one)}{' that have a value' * (len(one.runs) > 1)}")


def _names(one: Routed) -> list[str]:
    clients = len(one.details[0].class_accuracy)
    config = one.runs[0].config
    seed = config.seeds.resolved().split
    looks = look_names(config.shift, config.data.name, clients, seed) or ("",) * clients
    return [f"client {i}" + (f": {look}" if look else "") for i, look in enumerate(looks)]


def _risk(column: Column, routers: Sequence[Routed]) -> dict[str, Drawn]:
    series = []
    for one in routers:
        y = tuple(mean_risk(one.routers).tolist())
        name = f"{one.label}, {_seeds(one)}"
        series.append(Series(name, COVERAGES, y))
    title = f"Risk against coverage, by the posterior of the trained router: {column.heading}"
    return {f"{column.file}-risk.svg": Drawn(risk_chart(title, series), title)}


def mean_risk(routers: Sequence[RouterDetails]) -> Floats:
    """Mean over seeds of the risk at COVERAGES, linear between the points that a run keeps."""
    # Runs have different numbers of queries, and so points at different coverages.
    curves = [np.interp(COVERAGES, r.coverage, r.risk) for r in routers]
    return np.mean(curves, axis=0)  # type: ignore[no-any-return]


def _seeds(one: Routed) -> str:
    return "one seed" if len(one.runs) == 1 else f"mean over {len(one.runs)} seeds"
