"""A task's examples before they are cut and encoded: columns of a table, or tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedshift.errors import InputError, nearest, shown
from fedshift.tasks.layout import LARGEST as EXACT
from fedshift.tasks.names import Coded, Mask, coded, listed, plain, reordered
from fedshift.tasks.tensors import Tensors, is_row, tensors_of
from fedshift.tasks.values import plain_column

Numbers = NDArray[np.floating[Any]]
LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True, eq=False)
class Columns:
    """A table by columns: numbers (NaN if missing), or names of categories."""

    of: dict[str, Numbers | Coded]

    def __len__(self) -> int:
        first = next(iter(self.of.values()), ())
        return len(first.codes if isinstance(first, Coded) else first)

    def joined(self, other: Columns) -> Columns:
        """These rows with the other table's behind them, which must have the same columns."""
        if lacking := [name for name in self.of if name not in other.of]:
            raise InputError(
                f"the target's table has no column {listed(lacking)}; it needs all of "
                f"{listed(list(self.of))}"
            )
        pairs = {name: (mine, other.of[name]) for name, mine in self.of.items()}
        return Columns({name: _joined(name, *pair) for name, pair in pairs.items()})


Inputs = Columns | Tensors


def inputs_of(x: Any, aside: Mask | None = None) -> Inputs:
    """Examples as users have them, as columns or tensors.

    A DataFrame, a dict of columns and a list of dicts are a table. An array, a tensor and a list of
    rows are one tensor; a tuple or a dict of these are several. Sequences of unequal length are
    padded with zeros, and get a mask. Raises InputError for anything else. aside: rows that must
    not influence how columns are read, such as a target's (`column_of`).
    """
    if isinstance(x, Columns | Tensors):
        return x
    if hasattr(x, "columns") and hasattr(x, "iloc"):
        return Columns(
            {str(name): column_of(str(name), x[name], aside) for name in single(x.columns)}
        )
    if isinstance(x, Mapping):
        if not x:
            raise InputError("x is an empty dict; give columns, or tensors, by name")
        if not any(is_row(v) for v in x.values()):
            return inputs_of([x])
        if not any(_is_deep(v) for v in x.values()):
            return _columns({str(name): column_of(str(name), v, aside) for name, v in x.items()})
        return tensors_of({str(name): v for name, v in x.items()}, "dict")
    if isinstance(x, tuple):
        return tensors_of({f"input {i}": v for i, v in enumerate(x)}, "tuple")
    if isinstance(x, list) and x and isinstance(x[0], Mapping):
        names = list(dict.fromkeys(str(name) for row in x for name in row))
        return Columns({n: column_of(n, [row.get(n) for row in x], aside) for n in names})
    return tensors_of({"x": x}, "one")


def column_of(
    name: str, values: Any, aside: Mask | None = None, *, wide: bool = False
) -> Numbers | Coded:
    """One column: categories, or numbers in float32, or in float64 if float32 is too coarse.

    aside [n]: rows, such as a target's, that have no influence on this choice. wide: always use
    float64.
    """
    if isinstance(values, Coded):
        return values
    values = plain(values)
    kind = getattr(getattr(values, "dtype", None), "kind", "O")
    if kind not in "iufb":
        values = plain_column(name, values)
        kind = values.dtype.kind
    if kind in "iufb":
        numbers = _numbers(values, aside, wide)
        # Larger numbers would become infinity in float32.
        beyond = np.flatnonzero(np.abs(numbers) > LARGEST)
        if len(beyond):
            raise InputError(
                f'column "{shown(name)}" holds infinity, or a number beyond 3.4e38, in row '
                f"{beyond[0] + 1}; leave such rows out"
            )
        return numbers
    return coded(values, f'column "{shown(name)}"')


def _numbers(values: Any, aside: Mask | None, wide: bool) -> Numbers:
    if hasattr(values, "to_numpy"):
        numeric = getattr(values.dtype, "na_value", None) is not None and values.hasnans
        values = values.to_numpy(np.float64, na_value=np.nan) if numeric else values.to_numpy()
    array = np.asarray(values)
    judged = array if aside is None or len(aside) != len(array) else array[~aside]
    with np.errstate(over="ignore"):  # `column_of` refuses what is beyond float32
        narrow = not wide and fits_float32(judged)
        return array.astype(np.float32 if narrow else np.float64, copy=False)


def fits_float32(array: NDArray[Any]) -> bool:
    """Whether float32 keeps whole numbers exact, and differences of other numbers visible.

    It does not if numbers are large and differ by little, such as dates and row numbers.
    """
    kind = array.dtype.kind
    numbers = array[~np.isnan(array)] if kind == "f" else array
    if kind == "b" or array.dtype == np.float32 or not len(numbers):
        return True
    low, high = float(numbers.min()), float(numbers.max())
    return span_fits_float32(low, high) if kind == "f" else max(abs(low), abs(high)) <= EXACT


def span_fits_float32(low: float, high: float) -> bool:
    """`fits_float32` of fractions, from their least and largest value."""
    most = max(abs(low), abs(high))
    return most <= EXACT and high - low >= 1e-4 * most


def take_columns(table: Columns, keep: Sequence[str] | None, drop: Sequence[str]) -> Columns:
    """The columns in `keep`, or all columns, without those in `drop`."""
    for name in (*(keep or ()), *drop):
        check_column(name, list(table.of))
    names = [n for n in table.of if (keep is None or n in keep) and n not in drop]
    if not names:
        raise InputError("no column is left to learn from; drop fewer, or name some in columns=")
    return Columns({name: table.of[name] for name in names})


def check_column(name: object, names: Sequence[str], of: str = "the table has") -> None:
    """Raise InputError, with the nearest name, if the column is missing; of: begins the message."""
    if name not in names:
        raise InputError(
            f'{of} no column "{shown(str(name))}"; the columns are {listed(names, 12)}.'
            f"{nearest(str(name), names)}"
        )


def _columns(of: dict[str, Numbers | Coded]) -> Columns:
    lengths = {name: len(v.codes if isinstance(v, Coded) else v) for name, v in of.items()}
    if len(set(lengths.values())) > 1:
        short = min(lengths, key=lengths.__getitem__)
        most = max(lengths.values())
        raise InputError(
            f'columns of unequal length: "{shown(short)}" has {lengths[short]} rows, others {most}'
        )
    return Columns(of)


def single(names: Any) -> list[Any]:
    """The names of columns. Raises InputError if two are the same text."""
    texts = [str(name) for name in names]
    if twice := [name for name in texts if texts.count(name) > 1]:
        raise InputError(f'two columns are named "{shown(twice[0])}"; give each its own name')
    return list(names)


def _is_deep(v: Any) -> bool:
    """Whether each row of a column has more than one value."""
    if hasattr(v, "ndim"):
        return bool(v.ndim > 1)
    return isinstance(v, list | tuple) and bool(len(v)) and is_row(v[0])


def _joined(name: str, mine: Numbers | Coded, other: Numbers | Coded) -> Numbers | Coded:
    if isinstance(mine, Coded) != isinstance(other, Coded):
        kinds = ["categories" if isinstance(c, Coded) else "numbers" for c in (mine, other)]
        raise InputError(
            f'column "{shown(name)}" holds {kinds[0]} at the clients and {kinds[1]} in the '
            "target's table; give both alike"
        )
    if isinstance(mine, Coded) and isinstance(other, Coded):
        names = tuple(dict.fromkeys([*mine.names, *other.names]))
        moved = reordered(other, names, "category") if other.names else other
        return Coded(np.concatenate([mine.codes, moved.codes]), names)
    return np.concatenate([mine, other])
