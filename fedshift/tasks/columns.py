"""Fitting a table's encoding from sums over training rows, which clients could share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedshift.errors import InputError, shown
from fedshift.tasks.encoding import Column, refused
from fedshift.tasks.names import Coded, Ints, about_spelling, are_dates, coded, cure_of
from fedshift.tasks.rows import Columns, Numbers, fits_float32
from fedshift.tasks.values import about_dates

# A text column counts as free text or names if it has more than MANY different values. With more
# than FEW it does if most rows have a value of their own.
MANY, FEW = 100, 20
FEWEST = 20  # in fewer rows, all numbers may be different by chance
IDS = ("", "id", "index", "row", "unnamed: 0")  # spreadsheets and pandas name row numbers so


@dataclass(frozen=True)
class Rules:
    """The user's choices on columns; missing: "mean" or "refuse"."""

    categories: tuple[str, ...] = ()
    missing: str = "mean"


def fit_columns(
    table: Columns, trains: Sequence[Ints], rules: Rules
) -> tuple[tuple[Column, ...], list[str]]:
    """(how each column is encoded, notes on columns left out or odd); trains: rows of each client.

    The mean is computed from n and sum x, and the deviation from sum (x - mean)^2 in a second pass,
    in float64, added in the order of the clients. (From sum x^2, years or dates would lose their
    digits.) Columns that do not vary, free text and row numbers are left out.

    Raises InputError if no column is left.
    """
    rows = np.concatenate(trains)
    starts = np.cumsum([0, *map(len, trains)])[:-1]
    made, notes = [], []
    for name, values in table.of.items():
        if name in rules.categories and not isinstance(values, Coded):
            values = coded(values)
        if isinstance(values, Coded):
            column = _categories(name, values, rows, name in rules.categories)
        else:
            column = _numbers(name, values[rows], starts)
            if isinstance(column, Column) and len(rows) >= FEWEST and _numbers_rows(values[rows]):
                what = "holds another whole number in every row, as numbers of rows or people do"
                cure = f'If these are such, give drop=["{shown(name)}"].'
                notes.append(f'Column "{shown(name)}" {what}. {cure}')
        if isinstance(column, Column):
            made.append(column)
            notes += _about_names(column)
            if rules.missing == "refuse" and column.indicator:
                raise refused(name, int(_absent(values)[rows].sum()))
        else:
            notes.append(column)
    if not made:
        raise InputError(f"no column is left to learn from. {' '.join(notes)}")
    return tuple(made), notes


def _numbers(name: str, values: Numbers, starts: Ints) -> Column | str:
    """The encoding of numbers [n] of all training rows; starts: where each client's rows begin."""
    # The column may be float64 because of rows outside training, but only training rows decide.
    wide = values.dtype == np.float64 and not fits_float32(values)
    v = values.astype(np.float64 if wide else np.float32).astype(np.float64)
    absent = np.isnan(v)
    count = len(v) - int(absent.sum())
    if not count:
        return number_column(name, 0, len(v), 0.0, 0.0, wide=wide)
    some = count < len(v)
    # A missing value must add 0 to each of the two sums.
    if some:
        v[absent] = 0.0
    mean = _pooled(v, starts) / count
    v -= mean
    if some:
        v[absent] = 0.0
    v *= v
    variance = _pooled(v, starts) / count
    if _counts_rows(name, values):
        return f'Column "{shown(name)}" numbers the rows; it was left out.'
    return number_column(name, count, len(v), mean, variance, wide=wide)


def number_column(
    name: str, count: int, rows: int, mean: float, variance: float, *, wide: bool
) -> Column | str:
    """A column of numbers from its moments, or the reason why it is left out.

    count: how many of the `rows` have a value.
    """
    if not count:
        return f'Column "{shown(name)}" is empty in training; it was left out.'
    if variance <= 1e-24 * mean * mean:  # a constant, up to the rounding of its mean
        if count == rows:
            return f'Column "{shown(name)}" is constant in training; it was left out.'
        # With missing values it stays, since its indicator may tell something.
        variance = 1.0
    return Column(name, mean, float(np.sqrt(variance)), None, count < rows, wide)


def _pooled(v: Numbers, starts: Ints) -> float:
    """The clients' sums, added one after the other, as a server would add them."""
    return float(sum(np.add.reduceat(v, starts).tolist()))


def _counts_rows(name: str, v: Numbers) -> bool:
    return is_id(name) and len(v) > 2 and _numbers_rows(v)


def is_id(name: str) -> bool:
    """Whether a column has a typical name of row numbers."""
    return name.lower() in IDS or name.lower().endswith(("_id", " id"))


def _numbers_rows(v: Numbers) -> bool:
    return bool((v == np.rint(v)).all()) and len(np.unique(v)) == len(v)


def _categories(name: str, values: Coded, rows: Ints, asked: bool) -> Column | str:
    counts = values.counts(rows)
    kinds = int((counts > 0).sum())
    absent = bool((values.codes[rows] < 0).any())
    names = tuple(n for n, count in zip(values.names, counts, strict=True) if count)
    if is_free_text(kinds, len(rows)) and not asked:
        return (
            f'Column "{shown(name)}" holds {kinds:,} different texts in {len(rows):,} rows, as '
            f'free text or names do; it was left out. categories=["{shown(name)}"] encodes it.'
            f"{cure_of(names)}"
        )
    return category_column(name, names, absent)


def _about_names(column: Column) -> list[str]:
    """Sentences on categories that are dates, or differ by case alone."""
    names = column.categories or ()
    dates = [about_dates(column.name)] if are_dates(names) else []
    return dates + about_spelling(f'Column "{shown(column.name)}": categories', names)


def category_column(name: str, names: tuple[str, ...], absent: bool) -> Column | str:
    """A column of these categories, or why it is left out; absent: some values are missing."""
    if len(names) + absent < 2:
        what = "constant" if names else "empty"
        return f'Column "{shown(name)}" is {what} in training; it was left out.'
    return Column(name, categories=names, indicator=absent)


def is_free_text(kinds: int, rows: int) -> bool:
    """Whether a column has too many different texts (`kinds`) in its rows to be a category."""
    return kinds > MANY or (kinds > FEW and 2 * kinds > rows)


def _absent(values: Numbers | Coded) -> np.ndarray[Any, np.dtype[np.bool_]]:
    return values.codes < 0 if isinstance(values, Coded) else np.isnan(values)
