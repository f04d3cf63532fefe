"""Charts over the rounds of runs, in addition to those of a table's cells."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fedshift.report.charts import Axis, LineChart, Series
from fedshift.report.looks import look_of
from fedshift.report.means import with_intervals
from fedshift.sweeps.store import Store
from fedshift_papers.protocols.study import Column, Study
from fedshift_papers.reproduce.derived import absent_and_loss
from fedshift_papers.reproduce.results import Cell, mean_curve
from fedshift_papers.reproduce.routing_charts import Drawn

ABSENT = Axis("labels that no client of the cohort holds")
LOSS = Axis("loss of central tuning, before its steps")
ROUND = Axis("round")


def by_round(study: Study, cells: Sequence[Cell], store: Store) -> dict[str, Drawn]:
    """A chart for each metric of `study.by_round`; rows that read the same runs are one line."""
    drawn = {}
    for column in study.columns:
        for metric in study.by_round:
            series = []
            for cell in _distinct(cells, column):
                curve = mean_curve(cell, store, metric)
                values = with_intervals(list(curve.values()))
                name = cell.row.label.partition(",")[0]
                look = look_of(cell.row.method) if with_looks(study) else None
                series.append(Series(name, tuple(map(float, curve)), *values, look))
            title = f"{study.title}, {metric.name} by round: {column.heading}"
            chart = LineChart(title, tuple(series), Axis("round"), Axis(metric.name))
            drawn[f"{column.file}-{metric.key}.svg"] = Drawn(chart, title)
    return drawn


def with_looks(study: Study) -> bool:
    """Whether rows are drawn in their methods' colours; rows of one method get one each instead."""
    return len({row.method for row in study.rows}) > 1 or len(study.rows) == 1


def _distinct(cells: Sequence[Cell], column: Column) -> Iterator[Cell]:
    """The first cell of each group whose values come from the same runs."""
    seen = set[tuple[str, ...]]()
    for cell in (c for c in cells if c.column is column):
        runs = tuple(v.run.name for v in cell.values)
        if runs and runs not in seen:
            seen.add(runs)
            yield cell


def absent_labels(study: Study, cells: Sequence[Cell], store: Store) -> dict[str, Drawn]:
    """Three charts per column on absent labels and the loss of central tuning.

    One has a point for each round of all seeds, absent labels against loss. Two show both by round,
    for the first seed alone, since other seeds have absences in other rounds.
    """
    drawn = {}
    for column in study.columns:
        points, losses, absences = list[Series](), list[Series](), list[Series]()
        for cell in _distinct(cells, column):
            runs = [store.read(v.run).summary for v in cell.values]
            pairs = [pair for run in runs for pair in zip(*absent_and_loss(run), strict=True)]
            x, y = tuple(a for a, _ in pairs), tuple(b for _, b in pairs)
            absent, loss = absent_and_loss(runs[0])
            t = tuple(float(r["round"]) for r in runs[0]["label_sets"]["rounds"])[: len(loss)]
            # Without a look: all rows have the same method, so its colour would be the same.
            points.append(Series(cell.row.label, x, y, line=False))
            losses.append(Series(cell.row.label, t, tuple(loss)))
            absences = absences or [Series("absent labels", t, tuple(absent))]
        for end, title, series, axes in (
            ("", f"{study.title}, every round of all seeds", points, (ABSENT, LOSS)),
            ("-loss", f"{study.title}, tuning's loss by round, one seed", losses, (ROUND, LOSS)),
            (
                "-absent",
                f"{study.title}, absent labels by round, that seed",
                absences,
                (ROUND, ABSENT),
            ),
        ):
            words = f"{title}: {column.heading}"
            drawn[f"{column.file}{end}.svg"] = Drawn(LineChart(words, tuple(series), *axes), words)
    return drawn
