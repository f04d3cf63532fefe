"""Means and deviations over the seeds of a line, in tables and charts."""

from __future__ import annotations

from collections.abc import Sequence

from fedshift.report.charts import Values
from fedshift.report.intervals import Moments, bounds_of, moments
from fedshift.report.pools import Pool
from fedshift.report.tables import Cell, Table, show

# Larger values come from training that diverged; their squares would overflow.
LARGEST = 1e150


def moments_of(values: Sequence[float | None], name: str) -> Moments | None:
    """`moments` of the values that are not missing; None if all are.

    name: of the measurement, as "target_accuracy"; intervals of shares end at 0 and 1.
    """
    there = [v for v in values if v is not None and abs(v) < LARGEST]
    if not there:
        return None
    return moments(there, within=bounds_of(name, there))


def with_intervals(over: Sequence[Moments | None]) -> tuple[Values, Values, Values]:
    """(means, lower ends, upper ends of their intervals), for a chart."""
    mean = tuple(None if m is None else m.mean for m in over)
    low = tuple(None if m is None else m.low for m in over)
    return mean, low, tuple(None if m is None else m.high for m in over)


def mean_cell(values: Sequence[float | None], spec: str) -> Cell:
    """ "81.2% ± 1.3%"; with the number of seeds behind it if some have no value."""
    over = moments_of(values, "")
    if over is None:
        return None
    mean = show(over.mean, spec)
    text = mean if over.sd is None else f"{mean} ± {show(over.sd, spec)}"
    return text if over.n == len(values) else f"{text} ({over.n} of {len(values)})"


def pool_rows(each: Table, lines: Sequence[Pool]) -> Table:
    """From a table with a row for each run, one with a row for each line: mean ± sd over its seeds.

    The first column has the runs' names. Values that all seeds share are shown without a deviation.
    """
    if all(len(line.runs) == 1 for line in lines):
        return each
    rows, at = list[tuple[Cell, ...]](), 0
    for line in lines:
        block = each.rows[at : at + len(line.runs)]
        at += len(block)
        columns = zip(zip(*(row[1:] for row in block), strict=True), each.formats[1:], strict=True)
        rows.append((line.label, len(block), *(_cell(column, spec) for column, spec in columns)))
    head = (each.header[0], "Seeds", *each.header[1:])
    return Table(head, tuple(rows), (each.formats[0], "d", *each.formats[1:]), each.caption)


def mean_column(each: Sequence[Sequence[float | None]]) -> tuple[Cell, ...]:
    """A column of mean shares over the seeds, from a column for each seed."""
    return tuple(_cell(row, ".1%") for row in zip(*each, strict=True))


def _cell(values: Sequence[Cell], spec: str) -> Cell:
    if len({*values}) == 1:
        return values[0]
    numbers = [v for v in values if isinstance(v, int | float)]
    if len(numbers) < sum(v is not None for v in values):  # text, infinity included
        words = dict.fromkeys(show(v, spec) for v in values)
        return ", ".join(words) if len(words) <= 3 else "differs"
    if spec.endswith("d"):
        return f"{show(min(numbers), spec)} to {show(max(numbers), spec)}"
    return mean_cell([None if v is None else float(v) for v in values], spec)
