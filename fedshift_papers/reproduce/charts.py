"""The charts of a table's cells."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from fedshift.recipes import traits_of
from fedshift.report.charts import Axis, BarChart, Bars, LineChart, Series, SideBars
from fedshift.report.intervals import Moments, moments
from fedshift.report.looks import GREY, Look, look_of
from fedshift.report.means import with_intervals
from fedshift.sweeps.store import Store
from fedshift_papers.protocols.study import Column, Metric, Printed, Row, Study
from fedshift_papers.reproduce.results import Cell, mean_curve
from fedshift_papers.reproduce.round_charts import absent_labels, by_round, with_looks
from fedshift_papers.reproduce.routing_charts import Drawn, routing_charts

PROJECTION = "projection distance, ||T - S'a||²"
AXES = {
    "C": "labels per client, C",
    "beta": "Dirichlet concentration, beta",
    "delta": "delta",
    "E": "local epochs, E",
    "M": "clients, M",
    "common": "labels common to all clients",
    "connectivity": "algebraic connectivity of the graph of labels",
}


def charts(study: Study, cells: Sequence[Cell], store: Store) -> dict[str, Drawn]:
    """File name -> chart, in the order in which a page shows them."""
    return _of_cells(study, cells, store) | by_round(study, cells, store)


def _of_cells(study: Study, cells: Sequence[Cell], store: Store) -> dict[str, Drawn]:
    if study.plot == "bars":
        return _bars(study, cells)
    if study.plot == "rows":
        return _rows(study, cells)
    if study.plot == "routing":
        return _rows(study, cells) | routing_charts(study, cells, store)
    if study.plot == "lines":
        return _sweeps(study, cells, dict.fromkeys(row.key for row in study.rows))
    if study.plot == "curves":
        return _curves(study, cells, store)
    if study.plot == "absent":
        return absent_labels(study, cells, store)
    if study.plot == "projection":
        return _projections(study, cells)
    if study.plot == "panels":
        return _projection_panels(study, cells) | _sweeps(study, cells, panel="(b) ")
    # A sweep over a parameter of the split gets a second chart, over the distances that it causes.
    return _sweeps(study, cells) | (_distances(study, cells) if study.plot == "sweep" else {})


def _bars(study: Study, cells: Sequence[Cell]) -> dict[str, Drawn]:
    drawn: dict[str, Drawn] = {}
    for metric, rows in _by_metric(study, study.rows).items():
        end = "" if metric.name == study.metric.name else f"-{metric.key}"
        alike = replace(study, rows=tuple(rows), metric=metric)
        drawn |= {f"{name}{end}.svg": chart for name, chart in _alike(alike, cells).items()}
    return drawn


def _alike(study: Study, cells: Sequence[Cell]) -> dict[str, Drawn]:
    """The bar charts of rows that share a unit: ours, and the printed numbers."""
    groups = tuple(column.heading for column in study.columns)
    axis, drawn = Axis(study.metric.name), {}
    printed = {_place(c): None if c.printed is None else _printed(c.printed) for c in cells}
    # Two charts, since ours and the paper's bars side by side would be too thin to compare.
    for name, words, of in (
        ("plot", "here", _moments(cells)),
        ("printed", "as printed", printed),
    ):
        title = f"{study.title}: {words}"
        chart = BarChart(title, groups, _side(study, of), axis)
        if name == "plot" or any(of.values()):
            drawn[name] = Drawn(chart, title + _whiskers(of.values()))
    return drawn


def _rows(study: Study, cells: Sequence[Cell]) -> dict[str, Drawn]:
    """A chart for each column, with a bar for each row; for tables of many rows."""
    drawn, at = {}, _moments(cells)
    for column in study.columns:
        of = [at[column.key, row.label] for row in study.rows]
        base = at.get((column.key, study.baseline))
        title = f"{column.heading}: {study.metric.name}"
        caption = title + (f"; the line: {study.baseline}" if base is not None else "")
        names, methods = (tuple(getattr(r, k) for r in study.rows) for k in ("label", "method"))
        mark = None if base is None else base.mean
        mean, low, high = with_intervals(of)
        chart = SideBars(title, names, mean, Axis(study.metric.name), mark, low, high, methods)
        drawn[f"{column.file}.svg"] = Drawn(chart, caption + _whiskers(of))
    return drawn


def _whiskers(of: Iterable[Moments | None]) -> str:
    return "; error bars: 95 % intervals" * any(m is not None and m.low is not None for m in of)


def _printed(cell: Printed) -> Moments:
    """A printed cell as Moments, without an interval: papers print deviations."""
    return Moments(0, cell.mean, cell.sd, None, None)


def _place(cell: Cell) -> tuple[str, str]:
    return cell.column.key, cell.row.label


def _moments(cells: Sequence[Cell]) -> dict[tuple[str, str], Moments | None]:
    return {_place(c): c.moments for c in cells}


def _side(study: Study, of: Mapping[tuple[str, str], Moments | None]) -> tuple[Bars, ...]:
    return tuple(
        Bars(
            row.label,
            *with_intervals([of[c.key, row.label] for c in study.columns]),
            look_of(row.method) if with_looks(study) else None,
        )
        for row in study.rows
    )


def _groups(study: Study) -> dict[tuple[str, str], list[Column]]:
    """(data set, axis) -> its columns, in order along the axis."""
    groups: dict[tuple[str, str], list[Column]] = {}
    for column in study.columns:
        if column.x is not None:
            groups.setdefault((column.dataset, column.axis), []).append(column)
    return {key: sorted(group, key=lambda c: c.x or 0.0) for key, group in groups.items()}


def _sweeps(
    study: Study, cells: Sequence[Cell], methods: Iterable[str | None] = (None,), panel: str = ""
) -> dict[str, Drawn]:
    """A line for each row, over each axis of a data set.

    There is a chart for each of the given methods (None: for all together) and each unit.
    """
    drawn, at = {}, _moments(cells)
    for (dataset, axis), group in _groups(study).items():
        x = [float(c.x or 0.0) for c in group]
        for key in methods:
            rows = [row for row in study.rows if key in (None, row.key)]
            for metric, alike in _by_metric(study, rows).items():
                series = [_line(row, x, [at[c.key, row.label] for c in group]) for row in alike]
                of, end = ("", "") if key is None else (f"{key}, ", f"-{key}")
                end += "" if metric.name == study.metric.name else f"-{metric.key}"
                title = f"{panel}{study.title}: {of}{group[0].title}"
                across = Axis(AXES.get(axis, axis), log=axis in study.log_axes)
                chart = LineChart(title, tuple(series), across, Axis(metric.name))
                drawn[f"{dataset}-{axis}{end}.svg"] = Drawn(chart, title + _bands(series))
    return drawn


def _by_metric(study: Study, rows: Iterable[Row]) -> dict[Metric, list[Row]]:
    """The rows by their metric, since rows that share a unit can share an axis."""
    groups: dict[str, tuple[Metric, list[Row]]] = {}
    for row in rows:
        metric = study.metric_of(row)
        groups.setdefault(metric.name, (metric, []))[1].append(row)
    return dict(groups.values())


def _distances(study: Study, cells: Sequence[Cell]) -> dict[str, Drawn]:
    """Every seed as a point: its value over the distance of its target from the clients' hull."""
    drawn = {}
    for dataset in dict.fromkeys(c.dataset for c in study.columns):
        series = []
        for row in study.rows:
            points = [
                (v.distance, v.value)
                for c in cells
                if c.column.dataset == dataset and c.row.label == row.label
                for v in c.values
                if v.distance is not None
            ]
            x, y = tuple(p[0] for p in points), tuple(p[1] for p in points)
            series.append(Series(row.label, x, y, look=look_of(row.method), line=False))
        title = f"{study.metric.name} by projection distance: {dataset}"
        across = Axis("distance of T from the clients' hull", percent=False)
        chart = LineChart(title, tuple(series), across, Axis(study.metric.name))
        drawn[f"{dataset}-distance.svg"] = Drawn(chart, title)
    return drawn


def _projection_panels(study: Study, cells: Sequence[Cell]) -> dict[str, Drawn]:
    """The mean projection distance of the seeds' splits, over each axis of a data set."""
    drawn = {}
    for (dataset, axis), group in _groups(study).items():
        over = [list(_projection(column, cells).values()) for column in group]
        mean, low, high = with_intervals([moments(d) if d else None for d in over])
        x = tuple(float(c.x or 0.0) for c in group)
        # No interval of a distance goes below 0.
        low = tuple(v if v is None else max(0.0, v) for v in low)
        series = Series("projection distance", x, mean, low, high, Look(GREY), points=True)
        title = f"(a) projection distance: {group[0].title}"
        chart = LineChart(title, (series,), Axis(AXES.get(axis, axis)), Axis(PROJECTION))
        drawn[f"{dataset}-{axis}-projection.svg"] = Drawn(chart, title + _bands([series]))
    return drawn


def _projection(column: Column, cells: Sequence[Cell]) -> dict[int, float]:
    """||T - S^T a||^2 at its optimum (FedPALS, Equation 7), by seed.

    It depends on the clients alone, which all rows share. The oracle's are left out: its clients
    follow the target.
    """
    return {
        v.seed: v.distance**2
        for cell in cells
        if cell.column is column and not traits_of(cell.row.method).follows_target
        for v in cell.values
        if v.distance is not None
    }


def _projections(study: Study, cells: Sequence[Cell]) -> dict[str, Drawn]:
    """A line for each row over its columns' projection distance: mean and deviation of the runs."""
    drawn = {}
    for (dataset, _), group in _groups(study).items():
        series = []
        for row in study.rows:
            over = {c.column.key: c.moments for c in cells if c.row is row}
            pairs = [(_projection(c, cells), over[c.key]) for c in group]
            points = [(fmean(d.values()), m) for d, m in pairs if d and m is not None]
            series.append(_deviations(row, sorted(points, key=lambda point: point[0])))
        title = f"{study.title}: {group[0].title}"
        chart = LineChart(title, tuple(series), Axis(PROJECTION), Axis(study.metric.name))
        some = any(v is not None for s in series for v in s.low)
        words = "; bands: one standard deviation of the runs" * some
        drawn[f"{dataset}-projection.svg"] = Drawn(chart, title + words)
    return drawn


def _deviations(row: Row, points: Sequence[tuple[float, Moments]]) -> Series:
    """A line of means within one standard deviation on either side."""
    x, over = tuple(at for at, _ in points), [m for _, m in points]
    low, high = (
        tuple(None if m.sd is None else m.mean + sign * m.sd for m in over) for sign in (-1, 1)
    )
    mean = tuple(m.mean for m in over)
    return Series(row.label, x, mean, low, high, look_of(row.method), points=True)


def _curves(study: Study, cells: Sequence[Cell], store: Store) -> dict[str, Drawn]:
    drawn = {}
    for column in study.columns:
        series = []
        for row in study.rows:
            cell = next(c for c in cells if c.column is column and c.row is row)
            curve = mean_curve(cell, store, study.metric)
            series.append(_line(row, list(curve), list(curve.values()), points=False))
        title = f"{study.title}: {column.heading}"
        # Once along plain axes and, with `log_log`, once more along logarithmic ones.
        for log in (False, True)[: 1 + study.log_log]:
            axes = Axis("round", log=log), Axis(study.metric.name, log=log)
            caption = title + ", logarithmic axes" * log + _bands(series)
            chart = LineChart(title + ", logarithmic axes" * log, tuple(series), *axes)
            drawn[f"{column.file}{'-log' * log}.svg"] = Drawn(chart, caption)
    return drawn


def _line(
    row: Row, x: Sequence[float], of: Sequence[Moments | None], *, points: bool = True
) -> Series:
    return Series(row.label, tuple(x), *with_intervals(of), look_of(row.method), points=points)


def _bands(series: Iterable[Series]) -> str:
    return "; bands: 95 % intervals" * any(v is not None for s in series for v in s.low)
