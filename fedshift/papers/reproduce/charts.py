"""The cells as drawings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from fedshift.papers.protocols.study import Column, Row, Study
from fedshift.papers.reproduce.results import Cell, mean_curve
from fedshift.papers.reproduce.routing_charts import Chart, routing_charts
from fedshift.report.svg import PALETTE, Axis, Bars, Series, grouped_bars, line_chart, side_bars
from fedshift.sweeps.store import Store

AXES = {
    "C": "labels per client, C",
    "beta": "Dirichlet concentration, beta",
    "delta": "delta",
    "E": "local epochs, E",
    "M": "clients, M",
    "common": "labels common to all clients",
}


def charts(study: Study, cells: Sequence[Cell], store: Store) -> dict[str, Chart]:
    """File name -> drawing, in the order to show them."""
    if study.plot == "bars":
        return _bars(study, cells)
    if study.plot == "routing":
        return _rows(study, cells) | routing_charts(study, cells, store)
    if study.plot == "lines":
        return _sweeps(study, cells, dict.fromkeys(row.key for row in study.rows))
    if study.plot == "curves":
        return _curves(study, cells, store)
    # A sweep over a parameter of the split is drawn over the distance that it causes, too.
    drawn = _sweeps(study, cells) if study.plot == "sweep" else {}
    return drawn | _distances(study, cells)


def _bars(study: Study, cells: Sequence[Cell]) -> dict[str, Chart]:
    groups = [column.heading for column in study.columns]
    ours = _means(cells)
    theirs = {_place(c): None if c.printed is None else c.printed.mean for c in cells}
    axis = Axis(study.metric.name)
    title = f"{study.title}: here"
    drawn = {"plot.svg": Chart(grouped_bars(title, groups, _side(study, ours), axis), title)}
    # A drawing of its own: bars of both side by side would be too thin to compare.
    if any(v is not None for v in theirs.values()):
        title = f"{study.title}: as printed"
        drawing = grouped_bars(title, groups, _side(study, theirs), axis)
        drawn["printed.svg"] = Chart(drawing, title)
    return drawn


def _rows(study: Study, cells: Sequence[Cell]) -> dict[str, Chart]:
    """A bar per row, for tables of many rows; a line marks the baseline."""
    drawn, means = {}, _means(cells)
    for column in study.columns:
        values = [means[column.key, row.label] for row in study.rows]
        base = means.get((column.key, study.baseline))
        title = f"{column.heading}: {study.metric.name}"
        caption = title + (f"; the line: {study.baseline}" if base is not None else "")
        names = [row.label for row in study.rows]
        drawing = side_bars(title, names, values, Axis(study.metric.name), mark=base)
        drawn[f"{column.file}.svg"] = Chart(drawing, caption)
    return drawn


def _place(cell: Cell) -> tuple[str, str]:
    return cell.column.key, cell.row.label


def _means(cells: Sequence[Cell]) -> dict[tuple[str, str], float | None]:
    return {_place(c): None if c.moments is None else c.moments.mean for c in cells}


def _side(study: Study, values: Mapping[tuple[str, str], float | None]) -> list[Bars]:
    return [
        Bars(row.label, tuple(values[c.key, row.label] for c in study.columns), i)
        for i, row in enumerate(study.rows)
    ]


def _groups(study: Study) -> dict[tuple[str, str], list[Column]]:
    """Columns of one data set along one axis, in order."""
    groups: dict[tuple[str, str], list[Column]] = {}
    for column in study.columns:
        if column.x is not None:
            groups.setdefault((column.dataset, column.axis), []).append(column)
    return {key: sorted(group, key=lambda c: c.x or 0.0) for key, group in groups.items()}


def _sweeps(
    study: Study, cells: Sequence[Cell], methods: Iterable[str | None] = (None,)
) -> dict[str, Chart]:
    """A line per row over each axis of a data set; of given methods, a drawing for each."""
    drawn, means = {}, _means(cells)
    for (dataset, axis), group in _groups(study).items():
        x = [float(c.x or 0.0) for c in group]
        for key in methods:
            rows = [row for row in study.rows if key in (None, row.key)]
            series = [
                _line(row, i, x, [means[c.key, row.label] for c in group])
                for i, row in enumerate(rows)
            ]
            of, end = ("", "") if key is None else (f"{key}, ", f"-{key}")
            title = f"{study.title}: {of}{group[0].title}"
            across = Axis(AXES.get(axis, axis))
            drawing = line_chart(title, series, across, Axis(study.metric.name))
            drawn[f"{dataset}-{axis}{end}.svg"] = Chart(drawing, title)
    return drawn


def _distances(study: Study, cells: Sequence[Cell]) -> dict[str, Chart]:
    """Every seed as a point over the distance of its target from the clients' hull."""
    drawn = {}
    for dataset in dict.fromkeys(c.dataset for c in study.columns):
        series = []
        for i, row in enumerate(study.rows):
            points = [
                (v.distance, v.value)
                for c in cells
                if c.column.dataset == dataset and c.row.label == row.label
                for v in c.values
                if v.distance is not None
            ]
            x, y = tuple(p[0] for p in points), tuple(p[1] for p in points)
            series.append(Series(row.label, x, y, i, line=False, points=True))
        title = f"{study.metric.name} by projection distance: {dataset}"
        across = Axis("distance of T from the clients' hull", percent=False)
        chart = line_chart(title, series, across, Axis(study.metric.name))
        drawn[f"{dataset}-distance.svg"] = Chart(chart, title)
    return drawn


def _curves(study: Study, cells: Sequence[Cell], store: Store) -> dict[str, Chart]:
    drawn = {}
    for column in study.columns:
        series = []
        for i, row in enumerate(study.rows):
            cell = next(c for c in cells if c.column is column and c.row is row)
            # Rounds in which densities are fitted come before those that the paper counts.
            before = row.rounds_before(cell.options)
            means = mean_curve(cell, store, study.metric)
            curve = {t - before: value for t, value in means.items() if t > before}
            series.append(_line(row, i, list(curve), list(curve.values()), points=False))
        title = f"{study.title}: {column.heading}"
        chart = line_chart(title, series, Axis("round"), Axis(study.metric.name))
        drawn[f"{column.file}.svg"] = Chart(chart, title)
    return drawn


def _line(
    row: Row, place: int, x: Sequence[float], y: Sequence[float | None], *, points: bool = True
) -> Series:
    """A row's line; colours that come round again are dashed."""
    dash = place // len(PALETTE)
    return Series(row.label, tuple(x), tuple(y), place % len(PALETTE), dash, points=points)
