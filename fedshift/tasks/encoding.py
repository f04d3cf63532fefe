"""Encoding raw rows as inputs of a network, with numbers fitted on training rows alone."""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedshift.errors import InputError, shown
from fedshift.tasks.layout import Layout, scaled
from fedshift.tasks.names import Coded, Ints, coded, listed
from fedshift.tasks.rows import Columns, Inputs, Numbers, check_column, inputs_of
from fedshift.tasks.tensors import Tensors, inputs_like
from fedshift.tasks.values import MARKS, alike, reader_of

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Column:
    """How one column of a table becomes numbers.

    Numbers become (v - mean) / sd, and 0, the pooled mean, if they are missing. Categories are
    one-hot, with an extra place for all others.

    indicator  an extra place says whether the value is missing
    wide       numbers stay float64 until they are standardised; others are rounded to float32 first
    """

    name: str
    mean: float = 0.0
    sd: float = 1.0
    categories: tuple[str, ...] | None = None
    indicator: bool = False
    wide: bool = False

    @property
    def width(self) -> int:
        """How many numbers the column becomes."""
        return (1 if self.categories is None else len(self.categories) + 1) + self.indicator


@dataclass(frozen=True)
class Encoding:
    """Makes a network's inputs of raw rows. It is saved with the model, which needs it to predict.

    classes  names of the labels, in the order of the network's outputs
    kind     "classification", "regression" or "multilabel"
    columns  of a table, () for tensors
    shape    of one example, for a single tensor; else None
    pixels   whether bytes 0..255 become (v/255 - 0.5) / 0.5
    layout   how several tensors are packed into x, None if they are not
    missing  "refuse" raises InputError for a missing value

    >>> from fedshift.tasks.encoding import Column, Encoding
    >>> age = Encoding(("no", "yes"), columns=(Column("age", mean=40.0, sd=10.0),))
    >>> age.apply({"age": [30.0, 45.0]}).tolist()
    [[-1.0], [0.5]]
    >>> Encoding.from_json(age.to_json()) == age
    True
    """

    classes: tuple[str, ...]
    kind: str = "classification"
    columns: tuple[Column, ...] = ()
    shape: tuple[int, ...] | None = None
    pixels: bool = False
    layout: Layout | None = None
    missing: str = "mean"

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the predicted numbers or labels; () in classification."""
        return () if self.kind == "classification" else self.classes

    def apply(self, raw: Any) -> Tensor:
        """Raw rows (DataFrame, dict of columns, list of dicts, arrays) as x [n, ...].

        Warns of columns that hold nothing that training had. Raises InputError for a column that
        is missing, or holds text where numbers are due.
        """
        if self.layout is not None and not self.columns:
            return self.encoded(rows := inputs_like(raw, self.layout), np.arange(len(rows)))
        if isinstance(raw, str | os.PathLike):
            raise InputError(f'rows = "{shown(str(raw))}": give the rows, as pd.read_csv(path)')
        inputs = inputs_of(raw)
        if isinstance(inputs, Tensors) == bool(self.columns):
            due = "a table with named columns" if self.columns else "an array or tensors"
            raise InputError(f"these rows are not what the task was made of: give {due}")
        x = self.encoded(inputs, np.arange(len(inputs)))
        for note in self._about(inputs) if isinstance(inputs, Columns) else ():
            warnings.warn(note, UserWarning, stacklevel=2)
        return x

    def _about(self, table: Columns) -> Iterator[str]:
        """Sentences on columns of which training had no such value."""
        for column in self.columns:
            given, name = table.of[column.name], f'Column "{shown(column.name)}"'
            if column.categories is None:
                absent = np.isnan(_as_numbers(column.name, given))
                if len(absent) and absent.all() and not column.indicator:
                    yield f"{name} has no value in any row; the mean of training stands for it."
                continue
            texts, codes = coded(given), codes_in(given, column.categories)
            if count := int((codes == len(column.categories)).sum()):
                odd = texts.names[texts.codes[codes == len(column.categories)][0]]
                yield (
                    f'{name}: {count:,} of {len(codes):,} values, such as "{shown(odd)}", are none '
                    f"of the categories that training had ({listed(column.categories)}); they "
                    'count as "other".'
                )
            elif len(codes) and (codes < 0).all() and not column.indicator:
                yield f'{name} has no value in any row, which counts as "other".'

    def encoded(self, inputs: Inputs, rows: Ints) -> Tensor:
        """Inputs x [m, ...] of the examples at `rows`."""
        if isinstance(inputs, Columns):
            return torch.from_numpy(self._table(inputs, rows))
        chosen = torch.from_numpy(rows)
        if self.layout is not None:
            parts = [scaled(v[chosen]) if self.pixels else v[chosen] for v in inputs.of.values()]
            return replace(self.layout, parts=self.layout.inputs, targets=False).pack(parts)
        x = next(iter(inputs.of.values()))[chosen]
        if self.shape is not None and tuple(x.shape[1:]) != self.shape:
            raise InputError(f"examples are {tuple(x.shape[1:])}; the task's are {self.shape}")
        return scaled(x) if self.pixels else x

    def _table(self, table: Columns, rows: Ints) -> Floats:
        out = np.zeros((len(rows), sum(c.width for c in self.columns)), np.float32)
        at = 0
        for column in self.columns:
            check_column(column.name, list(table.of), "these rows have")
            values = self._values(column, table.of[column.name], rows)
            _fill(out[:, at : at + column.width], column, values)
            at += column.width
        return out

    def _values(self, column: Column, given: Numbers | Coded, rows: Ints) -> NDArray[Any]:
        """A column's numbers at `rows`, or the codes of their categories."""
        if column.categories is None:
            values: NDArray[Any] = _as_numbers(column.name, given)[rows]
            values = values if column.wide else values.astype(np.float32, copy=False)
            absent = np.isnan(values)
        else:
            values = codes_in(given, column.categories)[rows]
            absent = values < 0
        if self.missing == "refuse" and absent.any():
            raise refused(column.name, int(absent.sum()))
        return values

    def to_json(self) -> str:
        """The encoding as JSON text."""
        written = asdict(self) | {"layout": self.layout and self.layout.to_json()}
        return json.dumps(written, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Encoding:
        """The encoding that `to_json` wrote. Raises ValueError for what it cannot have written."""
        from pydantic import TypeAdapter  # a task needs it here alone

        read = json.loads(text)
        if not isinstance(read, dict) or not read.keys() <= {f.name for f in fields(cls)}:
            raise ValueError("it has not the keys of an encoding")
        if read.get("layout") is not None:
            read["layout"] = Layout.from_json(str(read["layout"]))
        made = TypeAdapter(cls).validate_python(read)
        for column in made.columns:
            if not (math.isfinite(column.mean) and 0 < column.sd < math.inf):
                raise ValueError(f"column {column.name}: mean {column.mean}, sd {column.sd}")
        return made


def _fill(places: Floats, column: Column, values: NDArray[Any]) -> None:
    """Write a column's numbers, or one-hot categories, to its `places` [rows, width]."""
    if column.categories is None:
        v = values.astype(np.float64)
        v -= column.mean
        v /= column.sd
        absent = np.isnan(v)
        if absent.any():
            v[absent] = 0.0
        places[:, 0] = v
        if column.indicator:
            places[:, 1] = absent
    else:
        # A missing value has its own place if training had missing values; else it is "other".
        missing = len(column.categories) + column.indicator
        places[np.arange(len(values)), np.where(values < 0, missing, values)] = 1.0


def codes_in(values: Numbers | Coded, categories: Sequence[str]) -> Ints:
    """The index of each value's category: len(categories) for any other, -1 for a missing value."""
    given = coded(values)
    place = {name: i for i, name in enumerate(categories)}
    # Names of the same truth value are alike; one that is a category itself keeps its place.
    for name, i in [*place.items()]:
        place = dict.fromkeys(alike(name), i) | place
    codes = [place.get(name, len(categories)) for name in given.names]
    # A missing value has the code -1, which picks the last entry.
    return np.array([*codes, -1], dtype=np.int64)[given.codes]


def refused(name: str, count: int) -> InputError:
    """The error for missing values in a column, with missing="refuse"."""
    return InputError(
        f'column "{shown(name)}" has no value in {count:,} rows; fill them in, or give '
        'missing="mean": the pooled mean, and a column that says so'
    )


def _as_numbers(name: str, values: Numbers | Coded) -> Numbers:
    if not isinstance(values, Coded):
        return values
    numbers = [*map(reader_of(values.names), values.names)]
    odd = [n for n, v in zip(values.names, numbers, strict=True) if not math.isfinite(v)]
    if others := [text for text in odd if text.lower() not in MARKS]:
        raise InputError(
            f'column "{shown(name)}" holds "{shown(others[0])}"; it is a column of numbers: '
            "give one with a decimal point, or leave the cell empty"
        )
    return np.array([*numbers, math.nan])[values.codes]
