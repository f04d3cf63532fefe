"""Fit a table's encoding: sums over the clients' training rows, which clients may share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedshift.errors import InputError, shown
from fedshift.tasks.encoding import Column, refused
from fedshift.tasks.names import Coded, Ints, coded, cure_of
from fedshift.tasks.rows import Columns, Numbers, fits_float32

# A column of text with more different values than MANY is taken for free text, or for names; so is
# one of more than FEW where most rows have one of their own.
MANY, FEW = 100, 20
FEWEST = 20  # in fewer rows, numbers may differ by chance
IDS = ("", "id", "index", "row", "unnamed: 0")  # as a spreadsheet or pandas names row numbers


@dataclass(frozen=True)
class Rules:
    """What a user says about columns; missing: "mean" or "refuse"."""

    categories: tuple[str, ...] = ()
    missing: str = "mean"


def fit_columns(
    table: Columns, trains: Sequence[Ints], rules: Rules
) -> tuple[tuple[Column, ...], list[str]]:
    """(how each column is encoded, notes on those left out or odd), of each client's training rows.

    Mean and deviation come of n and sum x, and then of sum (x - mean)^2: in float64, added in the
    order of the clients. (With sum x^2 years or dates would lose their digits.) A column that does
    not vary is left out, and so are free text and row numbers.
    Raises InputError where no column is left.
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
            if rules.missing == "refuse" and column.indicator:
                raise refused(name, int(_absent(values)[rows].sum()))
        else:
            notes.append(column)
    if not made:
        raise InputError(f"no column is left to learn from. {' '.join(notes)}")
    return tuple(made), notes


def _numbers(name: str, values: Numbers, starts: Ints) -> Column | str:
    """values [n] of all clients' training rows, each client's from its start on."""
    # Rows of the target may have asked for 64 bits in vain; these rows alone decide.
    wide = values.dtype == np.float64 and not fits_float32(values)
    v = values.astype(np.float64 if wide else np.float32).astype(np.float64)
    absent = np.isnan(v)
    count = len(v) - int(absent.sum())
    if not count:
        return number_column(name, 0, len(v), 0.0, 0.0, wide=wide)
    some = count < len(v)
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
    """A column of numbers by its moments: count values in so many rows; or why it is left out."""
    if not count:
        return f'Column "{shown(name)}" is empty in training; it was left out.'
    if variance <= 1e-24 * mean * mean:  # what rounding the mean leaves of a constant
        if count == rows:
            return f'Column "{shown(name)}" is constant in training; it was left out.'
        variance = 1.0
    return Column(name, mean, float(np.sqrt(variance)), None, count < rows, wide)


def _pooled(v: Numbers, starts: Ints) -> float:
    """Each client's sum, one added after the other, as a server adds them."""
    return float(sum(np.add.reduceat(v, starts).tolist()))


def _counts_rows(name: str, v: Numbers) -> bool:
    return is_id(name) and len(v) > 2 and _numbers_rows(v)


def is_id(name: str) -> bool:
    """Whether a column's name is one that columns of row numbers have."""
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


def category_column(name: str, names: tuple[str, ...], absent: bool) -> Column | str:
    """A column of these categories, some value of which may be absent; or why it is left out."""
    if len(names) + absent < 2:
        what = "constant" if names else "empty"
        return f'Column "{shown(name)}" is {what} in training; it was left out.'
    return Column(name, categories=names, indicator=absent)


def is_free_text(kinds: int, rows: int) -> bool:
    """Whether a column of so many different texts in so many rows is no category."""
    return kinds > MANY or (kinds > FEW and 2 * kinds > rows)


def _absent(values: Numbers | Coded) -> np.ndarray[Any, np.dtype[np.bool_]]:
    return values.codes < 0 if isinstance(values, Coded) else np.isnan(values)
