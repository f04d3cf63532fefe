"""The cells as drawings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedshift.experiments.reproduce.results import Cell, mean_curve
from fedshift.experiments.reproduce.store import Store
from fedshift.experiments.reproduce.study import Column, Row, Study
from fedshift.report.svg import PALETTE, Axis, Bars, Series, grouped_bars, line_chart

AXES = {
    "C": "labels per client, C",
    "beta": "Dirichlet concentration, beta",
    "delta": "delta",
    "E": "local epochs, E",
    "M": "clients, M",
}


def charts(study: Study, cells: Sequence[Cell], store: Store) -> dict[str, str]:
    """File name -> SVG text, in the order to show them."""
    if study.plot == "bars":
        return _bars(study, cells)
    if study.plot == "curves":
        return _curves(study, cells, store)
    drawn = _sweeps(study, cells) if study.plot == "sweep" else {}
    return drawn | _distances(study, cells)


def _bars(study: Study, cells: Sequence[Cell]) -> dict[str, str]:
    groups = [f"{c.title} {c.split}" for c in study.columns]
    ours = {
        (c.column.key, c.row.label): None if c.moments is None else c.moments.mean for c in cells
    }
    theirs = {
        (c.column.key, c.row.label): None if c.printed is None else c.printed.mean for c in cells
    }
    axis = Axis(study.metric.name)
    drawn = {"plot.svg": grouped_bars(f"{study.title}: here", groups, _side(study, ours), axis)}
    if any(v is not None for v in theirs.values()):
        title = f"{study.title}: as printed"
        drawn["printed.svg"] = grouped_bars(title, groups, _side(study, theirs), axis)
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
    found: dict[tuple[str, str], list[Column]] = {}
    for column in study.columns:
        if column.x is not None:
            found.setdefault((column.dataset, column.axis), []).append(column)
    return {key: sorted(group, key=lambda c: c.x or 0.0) for key, group in found.items()}


def _sweeps(study: Study, cells: Sequence[Cell]) -> dict[str, str]:
    means = {
        (c.column.key, c.row.label): None if c.moments is None else c.moments.mean for c in cells
    }
    drawn = {}
    for (dataset, axis), group in _groups(study).items():
        series = [
            _line(
                row,
                i,
                [float(c.x or 0.0) for c in group],
                [means[c.key, row.label] for c in group],
            )
            for i, row in enumerate(study.rows)
        ]
        title = f"{study.title}: {group[0].title}"
        across = Axis(AXES.get(axis, axis))
        chart = line_chart(title, series, across, Axis(study.metric.name))
        drawn[f"{dataset}-{axis}.svg"] = chart
    return drawn


def _distances(study: Study, cells: Sequence[Cell]) -> dict[str, str]:
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
        drawn[f"{dataset}-distance.svg"] = line_chart(
            title, series, across, Axis(study.metric.name)
        )
    return drawn


def _curves(study: Study, cells: Sequence[Cell], store: Store) -> dict[str, str]:
    drawn = {}
    for column in study.columns:
        series = []
        for i, row in enumerate(study.rows):
            cell = next(c for c in cells if c.column is column and c.row is row)
            curve = mean_curve(cell, store, study.metric)
            series.append(_line(row, i, list(curve), list(curve.values()), points=False))
        title = f"{study.title}: {column.title} {column.split}"
        name = f"{column.dataset}-{column.split}.svg"
        drawn[name] = line_chart(title, series, Axis("round"), Axis(study.metric.name))
    return drawn


def _line(
    row: Row, place: int, x: Sequence[float], y: Sequence[float | None], *, points: bool = True
) -> Series:
    """A row's line; colours that come round again are dashed."""
    dash = place // len(PALETTE)
    return Series(row.label, tuple(x), tuple(y), place % len(PALETTE), dash, points=points)
