"""Examples as tensors: one or several arrays, images or sequences, as users have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedshift.errors import InputError, nearest, shown
from fedshift.tasks.layout import LARGEST, PIXELS, Layout
from fedshift.tasks.names import Coded, listed, plain


@dataclass(frozen=True, eq=False)
class Tensors:
    """Examples as tensors [n, ...] by name; form: as in `fedshift.tasks.layout.Layout`."""

    of: dict[str, Tensor]
    form: str = "one"

    def __len__(self) -> int:
        return len(next(iter(self.of.values())))

    def joined(self, other: Tensors) -> Tensors:
        """These examples with the others behind them; sequences are padded to a common length.

        Raises InputError if the others have other shapes.
        """
        if padded := [name for name in self.of if mask_of(name) in self.of]:
            length = max(t.of[n].shape[1] for t in (self, other) for n in padded if n in t.of)
            return self._padded(padded, length)._joined(
                other._like(self, padded)._padded(padded, length)
            )
        return self._joined(other)

    def _like(self, first: Tensors, names: Sequence[str]) -> Tensors:
        """Sequences in the type that `first` has for them, if this changes no number.

        Sequences that all had the same length were read as rows of float32.
        """
        typed = {n: self.of[n].to(first.of[n].dtype) for n in names if n in self.of}
        same = {n: v for n, v in typed.items() if torch.equal(v.to(self.of[n].dtype), self.of[n])}
        return Tensors(self.of | same, self.form)

    def _padded(self, names: Sequence[str], length: int) -> Tensors:
        """Sequences padded to this length; one without a mask gets a mask of ones."""
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
    """Examples as the inputs of a layout: matched by name, and padded as the task's were.

    Raises InputError for missing or unknown inputs, and for sequences longer than the task's.
    """
    shapes = {part.name: part.shape for part in layout.inputs}
    images = {part.name for part in layout.inputs if part.dtype == PIXELS}
    by_name = set(x) if isinstance(x, Mapping) else set[str]()
    if isinstance(x, tuple) and len(x) == len(shapes):  # the user gives the masks as well
        by_name = set(shapes)
    padded = [n for n in shapes if mask_of(n) in shapes and mask_of(n) not in by_name]
    masks = set(map(mask_of, padded))
    made: dict[str, Tensor] = {}
    for name, values in _named(x, [n for n in shapes if n not in masks], layout.form).items():
        if name in padded:
            made[name], made[mask_of(name)] = _padded_to(name, values, shapes[name][0])
        elif layout.form == "one" or name in images:
            made[name] = as_numbers(name, _tensor(name, values))
        else:
            made[name] = _tensor(name, values)
    return Tensors({name: made[name] for name in shapes}, layout.form)


def _named(x: Any, names: Sequence[str], form: str) -> dict[str, Any]:
    """The inputs by name. Raises InputError if they are not exactly these."""
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
    """v [n, L, ...] padded with zeros to [n, length, ...]."""
    return torch.cat([v, v.new_zeros((len(v), length - v.shape[1], *v.shape[2:]))], dim=1)


def is_row(v: Any) -> bool:
    """Whether an object holds several values, as a column or a sequence does."""
    return isinstance(v, Coded) or (
        hasattr(v, "__len__") and not isinstance(v, str | bytes) and getattr(v, "ndim", 1) > 0
    )


def tensors_of(of: Mapping[str, Any], form: str) -> Tensors:
    """Arrays and lists of sequences as tensors by name; sequences of unequal length get a mask."""
    made: dict[str, Tensor] = {}
    for name, values in of.items():
        if isinstance(values, np.ndarray) and values.dtype == object:
            values = list(values)
        if isinstance(values, list):
            _check_steps(name, values)
        if isinstance(values, list) and values and len({len(v) for v in values if is_row(v)}) > 1:
            made[name], made[mask_of(name)] = _padded(values)
            form = "tuple" if form == "one" else form  # the mask is a second input
        else:
            made[name] = _tensor(name, values)
    if len({len(v) for v in made.values()}) > 1:
        lengths = ", ".join(f"{shown(n)}: {len(v)}" for n, v in made.items())
        raise InputError(f"inputs of unequal length ({lengths}); give one row per example in each")
    return Tensors({n: _as_used(n, v, form, mask_of(n) in made) for n, v in made.items()}, form)


def _check_steps(name: str, rows: Sequence[Any]) -> None:
    """Raise InputError for rows that differ in more than their length."""
    shapes = [(i, tuple(v.shape)) for i, v in enumerate(rows) if getattr(v, "ndim", 0) > 0]
    for i, shape in shapes[1:]:
        first, like = shapes[0]
        if shape[1:] != like[1:]:
            raise InputError(
                f'"{shown(name)}": row {i} has shape {shape}, row {first} {like}; rows may differ '
                "in their length alone"
            )


def _as_used(name: str, v: Tensor, form: str, padded: bool) -> Tensor:
    """The tensor in the type that the network gets.

    A single tensor becomes float32, unless it is an image. With several inputs whole numbers and
    booleans stay, since they may be token ids and masks.
    """
    image = v.dtype == torch.uint8 and v.ndim in (3, 4) and not padded
    return as_numbers(name, v) if form == "one" or image else v


def is_images(inputs: Tensors, name: str) -> bool:
    """Whether an input holds images: bytes [n, channels, height, width], not padded sequences."""
    v = inputs.of[name]
    return v.dtype == torch.uint8 and v.ndim == 4 and mask_of(name) not in inputs.of


def _tensor(name: str, values: Any) -> Tensor:
    try:
        if isinstance(values, list) and all(isinstance(one, np.ndarray) for one in values):
            values = np.array(values)  # torch converts a list of arrays slowly, with a warning
        v = values.detach().cpu() if isinstance(values, Tensor) else tensor_of(values)
    except (TypeError, ValueError, RuntimeError) as e:
        arrays = isinstance(values, list) and values and isinstance(values[0], np.ndarray | Tensor)
        if arrays and str(values[0].dtype) != "object":
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
    """`torch.as_tensor`, after a copy if the array is read-only, of which torch would warn.

    Arrays of pandas, Arrow and mapped files may be read-only.
    """
    locked = isinstance(values, np.ndarray) and not values.flags.writeable
    return torch.as_tensor(values.copy() if locked else values)


def as_numbers(name: str, v: Tensor) -> Tensor:
    """A single input: bytes of images as [n, channels, height, width], all else as float32."""
    if v.ndim == 1:
        v = v[:, None]
    if v.dtype == torch.uint8 and v.ndim in (3, 4):
        if v.ndim == 3:
            v = v[:, None]
        # Channels may come last, as numpy and Pillow have them; networks take them first.
        last = v.shape[1] not in (1, 3) and v.shape[3] in (1, 3)
        return v.permute(0, 3, 1, 2).contiguous() if last else v
    whole = not v.is_floating_point() and v.dtype != torch.bool
    if v.is_complex() or (whole and v.numel() and int(v.abs().max()) > LARGEST):
        raise InputError(
            f'"{shown(name)}" holds numbers that 32-bit numbers change (complex, or beyond 2^24)'
        )
    return v.float().contiguous()


def _padded(rows: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """(sequences [L_i, ...] as a tensor [n, L, ...] padded with zeros, its mask [n, L])."""
    try:
        each = [torch.as_tensor(np.asarray(plain(row))) for row in rows]
    except (TypeError, ValueError) as e:
        raise InputError(
            f"a row is no sequence of numbers ({shown(str(e), 100)}); give a list of sequences"
        ) from None
    padded = torch.nn.utils.rnn.pad_sequence(each, batch_first=True)
    lengths = torch.tensor([len(row) for row in each])
    return padded, torch.arange(padded.shape[1]) < lengths[:, None]
