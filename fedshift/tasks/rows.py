"""What a task holds of its examples before they are cut and encoded: columns, or tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedshift.errors import InputError, nearest, shown
from fedshift.tasks.layout import Layout
from fedshift.tasks.names import Coded, Mask, coded, listed, plain, reordered

Numbers = NDArray[np.floating[Any]]
# A column of whole numbers up to this one is exact in float32.
EXACT = 1 << 24
LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True, eq=False)
class Columns:
    """A table by column: numbers (NaN: missing), or names of categories."""

    of: dict[str, Numbers | Coded]

    def __len__(self) -> int:
        first = next(iter(self.of.values()), ())
        return len(first.codes if isinstance(first, Coded) else first)

    def joined(self, other: Columns) -> Columns:
        """These rows and then the other table's, which must have the same columns."""
        if lacking := [name for name in self.of if name not in other.of]:
            raise InputError(
                f"the target's table has no column {listed(lacking)}; it needs all of "
                f"{listed(list(self.of))}"
            )
        pairs = {name: (mine, other.of[name]) for name, mine in self.of.items()}
        return Columns({name: _joined(name, *pair) for name, pair in pairs.items()})


@dataclass(frozen=True, eq=False)
class Tensors:
    """Examples as tensors [n, ...] by name; form: as in `fedshift.tasks.layout.Layout`."""

    of: dict[str, Tensor]
    form: str = "one"

    def __len__(self) -> int:
        return len(next(iter(self.of.values())))

    def joined(self, other: Tensors) -> Tensors:
        """These examples and then the others, which must be of the same shapes; padded alike."""
        if padded := [name for name in self.of if mask_of(name) in self.of]:
            length = max(t.of[n].shape[1] for t in (self, other) for n in padded if n in t.of)
            return self._padded(padded, length)._joined(
                other._like(self, padded)._padded(padded, length)
            )
        return self._joined(other)

    def _like(self, first: Tensors, names: Sequence[str]) -> Tensors:
        """Sequences of equal length were taken for rows of float32: these in the first's type."""
        typed = {n: self.of[n].to(first.of[n].dtype) for n in names if n in self.of}
        same = {n: v for n, v in typed.items() if torch.equal(v.to(self.of[n].dtype), self.of[n])}
        return Tensors(self.of | same, self.form)

    def _padded(self, names: Sequence[str], length: int) -> Tensors:
        """Sequences of these names at this length; those that came without a mask are whole."""
        made = dict(self.of)
        for name in names:
            if name in made and made[name].ndim > 1:
                whole = torch.ones(made[name].shape[:2], dtype=torch.bool)
                for one, v in ((name, made[name]), (mask_of(name), made.get(mask_of(name), whole))):
                    made[one] = _filled(v, length)
        return Tensors(made, self.form)

    def _joined(self, other: Tensors) -> Tensors:
        for name, mine in self.of.items():
            given = other.of.get(name)
            if given is None or given.shape[1:] != mine.shape[1:] or given.dtype != mine.dtype:
                what = "nothing" if given is None else f"{given.dtype} {tuple(given.shape[1:])}"
                raise InputError(
                    f"the target's \"{shown(name)}\" is {what} per example; the clients' is "
                    f"{mine.dtype} {tuple(mine.shape[1:])}"
                )
        pairs = {name: torch.cat([mine, other.of[name]]) for name, mine in self.of.items()}
        return Tensors(pairs, self.form)


def mask_of(name: str) -> str:
    """The name of the mask beside padded sequences."""
    return f"{name} mask"


def inputs_like(x: Any, layout: Layout) -> Tensors:
    """Examples as the inputs of a layout: matched by name, and padded as those of the task were.

    Raises InputError for inputs that are missing or not the task's, and for longer sequences.
    """
    shapes = {part.name: part.shape for part in layout.inputs}
    by_name = set(x) if isinstance(x, Mapping) else set[str]()
    if isinstance(x, tuple) and len(x) == len(shapes):  # masks and all
        by_name = set(shapes)
    padded = [n for n in shapes if mask_of(n) in shapes and mask_of(n) not in by_name]
    masks = set(map(mask_of, padded))
    made: dict[str, Tensor] = {}
    for name, values in _named(x, [n for n in shapes if n not in masks], layout.form).items():
        if name in padded:
            made[name], made[mask_of(name)] = _padded_to(name, values, shapes[name][0])
        elif layout.form == "one":
            made[name] = as_numbers(name, _tensor(name, values))
        else:
            made[name] = _tensor(name, values)
    return Tensors({name: made[name] for name in shapes}, layout.form)


def _named(x: Any, names: Sequence[str], form: str) -> dict[str, Any]:
    """The inputs of these names, and no others."""
    if form != "dict":
        values = list(x) if isinstance(x, tuple) else [x]
        if len(values) != len(names):
            raise InputError(f"{len(values)} inputs, and the task has {len(names)}: give as many")
        return dict(zip(names, values, strict=True))
    if not isinstance(x, Mapping):
        raise InputError(f"these rows are no dict; give the inputs {listed(names)} by name")
    if foreign := [name for name in x if name not in names]:
        text = shown(str(foreign[0]))
        hint = nearest(str(foreign[0]), names)
        raise InputError(f'the task has no input "{text}"; it has {listed(names)}.{hint}')
    if lacking := [name for name in names if name not in x]:
        raise InputError(f"these rows lack the input {listed(lacking)}; give {listed(names)}")
    return {name: x[name] for name in names}


def _padded_to(name: str, rows: Any, length: int) -> tuple[Tensor, Tensor]:
    v, mask = _padded(list(rows))
    if v.shape[1] > length:
        raise InputError(
            f'"{shown(name)}" has a sequence of {v.shape[1]}, and the longest of the task has '
            f"{length}; cut it to that"
        )
    return _filled(v, length), _filled(mask, length)


def _filled(v: Tensor, length: int) -> Tensor:
    """v [n, L, ...] with zeros up to [n, length, ...]."""
    return torch.cat([v, v.new_zeros((len(v), length - v.shape[1], *v.shape[2:]))], dim=1)


Inputs = Columns | Tensors


def inputs_of(x: Any, aside: Mask | None = None) -> Inputs:
    """Examples as users have them, as columns or tensors.

    A DataFrame, a dict of columns and a list of dicts are a table. An array, a tensor, and a list
    of rows are one tensor; a tuple or a dict of those are several. Sequences of unequal length
    are padded with zeros, and a mask comes beside them. Raises InputError for anything else.
    aside: rows by which nothing is decided, as a target's (`column_of`).
    """
    if isinstance(x, Columns | Tensors):
        return x
    if hasattr(x, "columns") and hasattr(x, "iloc"):
        return Columns(
            {str(name): column_of(str(name), x[name], aside) for name in _single(x.columns)}
        )
    if isinstance(x, Mapping):
        if not x:
            raise InputError("x is an empty dict; give columns, or tensors, by name")
        if not any(_is_row(v) for v in x.values()):
            return inputs_of([x])
        if not any(_is_deep(v) for v in x.values()):
            return _columns({str(name): column_of(str(name), v, aside) for name, v in x.items()})
        return _tensors({str(name): v for name, v in x.items()}, "dict")
    if isinstance(x, tuple):
        return _tensors({f"input {i}": v for i, v in enumerate(x)}, "tuple")
    if isinstance(x, list) and x and isinstance(x[0], Mapping):
        names = list(dict.fromkeys(str(name) for row in x for name in row))
        return Columns({n: column_of(n, [row.get(n) for row in x], aside) for n in names})
    return _tensors({"x": x}, "one")


def column_of(name: str, values: Any, aside: Mask | None = None) -> Numbers | Coded:
    """One column: numbers, float32 or where that is too little float64, or categories.

    aside [n]: rows, such as a target's, that have no part in this choice.
    """
    if isinstance(values, Coded):
        return values
    values = plain(values)
    kind = getattr(getattr(values, "dtype", None), "kind", "O")
    if kind not in "iufb":
        import pandas as pd

        values = pd.Series(values).infer_objects()
        kind = values.dtype.kind
    if kind in "iufb":
        numbers = _numbers(values, aside)
        # float32 takes what is larger for infinity.
        beyond = np.flatnonzero(np.abs(numbers) > LARGEST)
        if len(beyond):
            raise InputError(
                f'column "{shown(name)}" holds infinity, or a number beyond 3.4e38, in row '
                f"{beyond[0] + 1}; leave such rows out"
            )
        return numbers
    return coded(values)


def _numbers(values: Any, aside: Mask | None) -> Numbers:
    if hasattr(values, "to_numpy"):
        numeric = getattr(values.dtype, "na_value", None) is not None and values.hasnans
        values = values.to_numpy(np.float64, na_value=np.nan) if numeric else values.to_numpy()
    array = np.asarray(values)
    judged = array if aside is None or len(aside) != len(array) else array[~aside]
    with np.errstate(over="ignore"):  # `column_of` refuses what is beyond float32
        return array.astype(np.float32 if fits_float32(judged) else np.float64, copy=False)


def fits_float32(array: NDArray[Any]) -> bool:
    """Whether float32 keeps whole numbers as they are, and what others differ by.

    It does not where numbers are large and differ by little, as dates and row numbers do.
    """
    kind = array.dtype.kind
    numbers = array[~np.isnan(array)] if kind == "f" else array
    if kind == "b" or array.dtype == np.float32 or not len(numbers):
        return True
    low, high = float(numbers.min()), float(numbers.max())
    most = max(abs(low), abs(high))
    return most <= EXACT and (kind != "f" or high - low >= 1e-4 * most)


def take_columns(table: Columns, keep: Sequence[str] | None, drop: Sequence[str]) -> Columns:
    """The columns `keep`, or all, without those to `drop`."""
    for name in (*(keep or ()), *drop):
        check_column(name, list(table.of))
    names = [n for n in table.of if (keep is None or n in keep) and n not in drop]
    if not names:
        raise InputError("no column is left to learn from; drop fewer, or name some in columns=")
    return Columns({name: table.of[name] for name in names})


def check_column(name: object, names: Sequence[str], of: str = "the table") -> None:
    """Raise InputError, with the nearest name, for a column that is not there."""
    if name not in names:
        raise InputError(
            f'{of} has no column "{shown(str(name))}"; it has {listed(names, 12)}.'
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


def _single(names: Any) -> list[Any]:
    texts = [str(name) for name in names]
    if twice := [name for name in texts if texts.count(name) > 1]:
        raise InputError(f'two columns are named "{shown(twice[0])}"; give each its own name')
    return list(names)


def _is_deep(v: Any) -> bool:
    """Whether each row holds more than one value."""
    if hasattr(v, "ndim"):
        return bool(v.ndim > 1)
    return isinstance(v, list | tuple) and bool(len(v)) and _is_row(v[0])


def _is_row(v: Any) -> bool:
    return isinstance(v, Coded) or (
        hasattr(v, "__len__") and not isinstance(v, str | bytes) and getattr(v, "ndim", 1) > 0
    )


def _tensors(of: Mapping[str, Any], form: str) -> Tensors:
    made: dict[str, Tensor] = {}
    for name, values in of.items():
        if isinstance(values, np.ndarray) and values.dtype == object:
            values = list(values)
        if isinstance(values, list) and values and len({len(v) for v in values if _is_row(v)}) > 1:
            made[name], made[mask_of(name)] = _padded(values)
            form = "tuple" if form == "one" else form
        else:
            made[name] = _tensor(name, values)
    if len({len(v) for v in made.values()}) > 1:
        lengths = ", ".join(f"{shown(n)}: {len(v)}" for n, v in made.items())
        raise InputError(f"inputs of unequal length ({lengths}); give one row per example in each")
    alone = form == "one"
    return Tensors({n: as_numbers(n, v) if alone else v for n, v in made.items()}, form)


def _tensor(name: str, values: Any) -> Tensor:
    try:
        v = values.detach().cpu() if isinstance(values, Tensor) else tensor_of(values)
    except (TypeError, ValueError, RuntimeError) as e:
        if isinstance(values, list) and values and isinstance(values[0], np.ndarray | Tensor):
            return torch.stack([torch.as_tensor(one) for one in values])
        raise InputError(
            f'"{shown(name)}" is no tensor of numbers ({shown(str(e), 100)}); give an array '
            "[n, ...], or a table with named columns"
        ) from None
    if v.ndim > 1 and len(v) and not v.numel():
        raise InputError(f'"{shown(name)}" has shape {tuple(v.shape)}: it holds no numbers')
    if v.ndim == 0:
        raise InputError(f'"{shown(name)}" is a single number; give one row per example, [n, ...]')
    return v


def tensor_of(values: Any) -> Tensor:
    """`torch.as_tensor`; an array that is not to be written is copied, or torch would warn of it.

    Such are those of pandas, of Arrow and of mapped files.
    """
    locked = isinstance(values, np.ndarray) and not values.flags.writeable
    return torch.as_tensor(values.copy() if locked else values)


def as_numbers(name: str, v: Tensor) -> Tensor:
    """x alone: bytes of images stay [n, channels, height, width], all else is float32 [n, ...]."""
    if v.ndim == 1:
        v = v[:, None]
    if v.dtype == torch.uint8 and v.ndim in (3, 4):
        if v.ndim == 3:
            v = v[:, None]
        last = v.shape[1] not in (1, 3) and v.shape[3] in (1, 3)
        return v.permute(0, 3, 1, 2).contiguous() if last else v
    whole = not v.is_floating_point() and v.dtype != torch.bool
    if v.is_complex() or (whole and v.numel() and int(v.abs().max()) > EXACT):
        raise InputError(
            f'"{shown(name)}" holds numbers that 32-bit numbers change (complex, or beyond 2^24)'
        )
    return v.float().contiguous()


def _padded(rows: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """Sequences [L_i, ...] as one tensor [n, L, ...] with zeros at the end, and its mask [n, L]."""
    try:
        each = [torch.as_tensor(np.asarray(plain(row))) for row in rows]
    except (TypeError, ValueError) as e:
        raise InputError(
            f"a row is no sequence of numbers ({shown(str(e), 100)}); give a list of sequences"
        ) from None
    padded = torch.nn.utils.rnn.pad_sequence(each, batch_first=True)
    lengths = torch.tensor([len(row) for row in each])
    return padded, torch.arange(padded.shape[1]) < lengths[:, None]


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
