"""From sums over each site's rows to one encoding, equal to that of a `Task` on the joined table.

A site sends three things before round 1, and no row: label counts and the ranges of its columns;
sums over its training rows, and names of categories; sums of squared deviations from the common
mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, NamedTuple

import numpy as np
import torch
from pydantic import Field

from fedshift.errors import InputError
from fedshift.experiments.config.data import Data
from fedshift.experiments.config.section import Section
from fedshift.holdout import hold_out_counts
from fedshift.tasks.columns import category_column, number_column
from fedshift.tasks.encoding import Column
from fedshift.tasks.names import Coded, Ints, as_number, ordered
from fedshift.tasks.rows import Columns, Numbers, span_fits_float32
from fedshift_deploy.sites.rows import LONGEST, MOST_TEXTS, SiteRows

# The server keeps a number for each row of a client, so an absurd claim would fill its memory.
MOST_ROWS = 10_000_000
# Squares of larger numbers overflow when they are added up.
LARGEST = 1e150
Finite = Annotated[float, Field(allow_inf_nan=False)]
# The relative error that float32 and the order of adding may leave in a mean.
ROUNDING = 1e-6
Rows = Annotated[int, Field(ge=0, le=MOST_ROWS)]
Text = Annotated[str, Field(max_length=LONGEST)]


class Survey(Section):
    """The first answer, on all rows of a site.

    labels  [K] number of rows of each class
    spans   least and largest value of each column of numbers that has any
    named   columns of categories of which at least one name is no number
    pixels  whether examples are images as bytes
    """

    labels: tuple[Rows, ...]
    spans: dict[str, tuple[Finite, Finite]]
    named: tuple[str, ...] = ()
    pixels: bool = False


class Total(Section):
    """A column of numbers over a site's training rows: how many values, their range, their sum.

    narrow: the sum of the values rounded to float32, which is how most columns are encoded;
    exact: the sum of the values as they are.
    """

    count: Rows
    least: Finite
    most: Finite
    narrow: Finite
    exact: Finite


class Totals(Section):
    """The second answer, on training rows; gaps: category columns with missing values."""

    numbers: dict[str, Total]
    names: dict[str, Annotated[tuple[Text, ...], Field(max_length=MOST_TEXTS)]]
    gaps: tuple[str, ...] = ()


class Taken(Section):
    """How many rows of each class [K] a site holds out for testing, and then for validation."""

    tests: tuple[Rows, ...]
    validation: tuple[Rows, ...]


class Mean(Section):
    """The common mean of a column of numbers, and whether it needs 64 bits (`Column.wide`)."""

    mean: Finite
    wide: bool


class Cut(NamedTuple):
    """The rows of a site, divided by their use."""

    trains: Ints
    validation: Ints
    tests: Ints


def cut_site(codes: Ints, taken: Taken, seed: int, client: int) -> Cut:
    """The rows that `fedshift.tasks.cutting` would choose for this client in the joined table."""
    part = np.flatnonzero(codes >= 0)
    tests = part[:0]
    if any(taken.tests):
        part, tests = hold_out_counts(codes, part, np.array(taken.tests), seed, "test", client)
    held_out = np.array(taken.validation)
    return Cut(*hold_out_counts(codes, part, held_out, seed, "validation", client), tests)


def survey(rows: SiteRows, classes: int) -> Survey:
    """A site's first answer."""
    labels = tuple(np.bincount(rows.codes[rows.codes >= 0], minlength=classes).tolist())
    if not isinstance(rows.inputs, Columns):
        x = next(iter(rows.inputs.of.values()))
        return Survey(labels=labels, spans={}, pixels=x.dtype == torch.uint8)
    columns = rows.inputs.of.items()
    named = [n for n, c in columns if isinstance(c, Coded) and any(map(_is_text, c.names))]
    spans = {n: span for n, c in columns if not isinstance(c, Coded) and (span := _span(c))}
    return Survey(labels=labels, spans=spans, named=tuple(named))


def totals(table: Columns, rows: Ints) -> Totals:
    """The second answer: sums over the training rows `rows`, in float64."""
    numbers, names, gaps = {}, {}, []
    for name, column in table.of.items():
        if isinstance(column, Coded):
            counts = column.counts(rows)
            names[name] = tuple(n for n, k in zip(column.names, counts, strict=True) if k)
            gaps += [name] if (column.codes[rows] < 0).any() else []
            continue
        values, (least, most) = column[rows], _span(column[rows]) or (0.0, 0.0)
        numbers[name] = Total(
            count=int((~np.isnan(values)).sum()),
            least=least,
            most=most,
            narrow=_sum(np.nan_to_num(_values(values, wide=False))),
            exact=_sum(np.nan_to_num(values)),
        )
    return Totals(numbers=numbers, names=names, gaps=tuple(gaps))


def squares(table: Columns, rows: Ints, means: Mapping[str, Mean]) -> dict[str, float]:
    """The sum of (v - mean)^2 over the rows, of each column of `means`."""
    made = {}
    for name, common in means.items():
        column = table.of[name]
        assert not isinstance(column, Coded)
        v = _values(column[rows], wide=common.wide) - common.mean
        v[np.isnan(v)] = 0.0
        made[name] = _sum(v * v)
    return made


def are_of_rows(one: Total, span: tuple[float, float] | None) -> bool:
    """Whether any rows could have this total: a check on what a site claims.

    span: the range that the site's survey gave for all its rows.
    """
    if not one.count:
        return one.narrow == one.exact == 0.0
    largest = max(abs(one.least), abs(one.most))
    room = ROUNDING * one.count * largest
    low, high = one.count * one.least - room, one.count * one.most + room
    inside = span is not None and span[0] <= one.least <= one.most <= span[1]
    return (
        inside
        and largest <= LARGEST
        and all(low <= total <= high for total in (one.narrow, one.exact))
    )


def are_squares(square: float, one: Total, mean: float) -> bool:
    """Whether rows with this total could have this sum of squared deviations from `mean`."""
    widest = max(abs(one.least - mean), abs(one.most - mean))
    return square <= one.count * (widest + ROUNDING * (widest + abs(mean))) ** 2


def means(surveys: Sequence[Survey], sums: Sequence[Totals], data: Data) -> dict[str, Mean]:
    """The mean over all sites of each column of numbers that has a value in training rows."""
    made = {}
    for name in numbers_of(data, sums):
        each = [one.numbers[name] for one in sums]
        if not (count := sum(one.count for one in each)):
            continue
        every = [one.spans[name] for one in surveys if name in one.spans]
        trained = [(one.least, one.most) for one in each if one.count]
        wide = not _fit_float32(every) and not _fit_float32(trained)
        total = float(sum([one.exact if wide else one.narrow for one in each]))
        made[name] = Mean(mean=total / count, wide=wide)
    return made


def columns_of(
    data: Data,
    surveys: Sequence[Survey],
    sums: Sequence[Totals],
    common: Mapping[str, Mean],
    deviations: Sequence[Mapping[str, float]],
    rows: int,
) -> tuple[tuple[Column, ...], list[str]]:
    """(how each column is encoded, notes on columns left out); rows: number of training rows.

    Raises InputError if no column is left, as `fit_columns` does.
    """
    made, notes = [], []
    for name in data.columns or ():
        if name in sums[0].numbers:
            count = sum(one.numbers[name].count for one in sums)
            of = common.get(name, Mean(mean=0.0, wide=False))
            variance = float(sum([one.get(name, 0.0) for one in deviations])) / max(count, 1)
            column = number_column(name, count, rows, of.mean, variance, wide=of.wide)
        else:
            names = _in_order({text for one in sums for text in one.names[name]}, name, surveys)
            names = (data.values or {}).get(name, names)
            column = category_column(name, names, any(name in one.gaps for one in sums))
        if isinstance(column, Column):
            made.append(column)
        else:
            notes.append(column)
    if not made:
        raise InputError(f"no column is left to learn from. {' '.join(notes)}")
    return tuple(made), notes


def numbers_of(data: Data, sums: Sequence[Totals]) -> list[str]:
    """The columns of numbers, in order."""
    return [name for name in data.columns or () if name in sums[0].numbers]


def _in_order(names: Iterable[str], column: str, surveys: Sequence[Survey]) -> tuple[str, ...]:
    """Categories sorted by number, or as texts if any site has one that is no number.

    Rows that do not train count for this choice, too, as they do in the joined table.
    """
    named = any(column in one.named for one in surveys)
    return tuple(sorted(names)) if named else ordered(names)


def _is_text(name: str) -> bool:
    return bool(np.isnan(as_number(name)))


def _span(values: Numbers) -> tuple[float, float] | None:
    present = values[~np.isnan(values)]
    return (float(present.min()), float(present.max())) if len(present) else None


def _fit_float32(spans: Sequence[tuple[float, float]]) -> bool:
    return not spans or span_fits_float32(min(a for a, _ in spans), max(b for _, b in spans))


def _values(values: Numbers, *, wide: bool) -> Numbers:
    return values if wide else values.astype(np.float32).astype(np.float64)


def _sum(v: Numbers) -> float:
    # reduceat adds in the order in which the joined table is summed: another order would change
    # the last bits.
    return float(np.add.reduceat(v, [0])[0]) if len(v) else 0.0
