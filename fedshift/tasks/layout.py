"""Packing several tensors of an example into one row of numbers, which the network unpacks."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from fedshift.errors import InputError, shown

# Whole numbers up to this one are exact in float32.
LARGEST = 1 << 24
# The type of images, whose bytes become floats from -1 to 1 when they are packed.
PIXELS = "pixels"


@dataclass(frozen=True)
class Part:
    """One tensor of an example: its name, and its shape without the batch.

    dtype: the type that a network gets: "float32", "int64", "bool", or PIXELS for float32 made of
    bytes.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"

    @property
    def size(self) -> int:
        """How many numbers of a row the part takes."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """Where the parts of an example are in its row x [n, D] float32, one after the other.

    form     what a network gets: "one" tensor, a "tuple" of tensors or a "dict" by name
    targets  whether the last part is the truth to predict, in regression and with several labels
             per example; no network gets it

    So engine, backends and messages see plain rows, whatever inputs the network has.

    >>> import torch
    >>> from fedshift.tasks.layout import Layout, Part
    >>> both = Layout((Part("ids", (3,), "int64"), Part("mask", (3,), "bool")), "tuple")
    >>> row = both.pack((torch.tensor([[5, 7, 0]]), torch.tensor([[True, True, False]])))
    >>> row.tolist()
    [[5.0, 7.0, 0.0, 1.0, 1.0, 0.0]]
    >>> both.unpack(row)[0].tolist()
    [[5, 7, 0]]
    """

    parts: tuple[Part, ...]
    form: str = "one"
    targets: bool = False

    @property
    def width(self) -> int:
        """D, how many numbers a row has."""
        return sum(part.size for part in self.parts)

    @property
    def inputs(self) -> tuple[Part, ...]:
        """The parts that a network gets."""
        return self.parts[:-1] if self.targets else self.parts

    def pack(self, given: Any) -> Tensor:
        """Tensors [n, *shape] of all parts as x [n, D]; a tensor, a tuple or a dict of them.

        Raises InputError for whole numbers beyond 2^24, which float32 would change.
        """
        values = list(given.values()) if isinstance(given, Mapping) else given
        values = [values] if isinstance(values, Tensor) else values
        pairs = zip(self.parts, values, strict=True)
        return torch.cat([_flat(part, v) for part, v in pairs], dim=1)

    def unpack(self, x: Tensor) -> Any:
        """The network's inputs from x [n, D]: a tensor, or a tuple or dict of them, [n, *shape]."""
        values, start = [], 0
        for part in self.inputs:
            values.append(_shaped(part, x[:, start : start + part.size]))
            start += part.size
        if self.form == "dict":
            return {part.name: v for part, v in zip(self.inputs, values, strict=True)}
        return values[0] if self.form == "one" else tuple(values)

    def target(self, x: Tensor) -> Tensor:
        """The truth in x [n, D]: [n, *shape]. Raises InputError if the truth is y instead."""
        if not self.targets:
            raise InputError("this layout has no part to predict; the labels y are what is due")
        last = self.parts[-1]
        return _shaped(last, x[:, self.width - last.size :])

    def to_json(self) -> str:
        """The layout as JSON."""
        parts = [[p.name, list(p.shape), p.dtype] for p in self.parts]
        return json.dumps({"parts": parts, "form": self.form, "targets": self.targets})

    @classmethod
    def from_json(cls, text: str) -> Layout:
        """The layout that `to_json` wrote. Raises ValueError for what it cannot have written."""
        from pydantic import TypeAdapter  # a task needs it here alone

        read = json.loads(text)
        if not isinstance(read, dict) or read.keys() != {f.name for f in fields(cls)}:
            raise ValueError("it has not the keys of a layout")
        read["parts"] = [
            dict(zip(("name", "shape", "dtype"), p, strict=True)) for p in read["parts"]
        ]
        return TypeAdapter(cls).validate_python(read)


def part_of(name: str, v: Tensor, *, images: bool = False) -> Part:
    """The Part for a tensor [n, *shape]; images: whether it holds images as bytes.

    Raises InputError for complex numbers.
    """
    if images:
        return Part(name, tuple(v.shape[1:]), PIXELS)
    if v.is_complex():
        raise InputError(f'"{shown(name)}" holds complex numbers; give two real parts of it')
    kind = "bool" if v.dtype == torch.bool else "float32" if v.is_floating_point() else "int64"
    return Part(name, tuple(v.shape[1:]), kind)


def _flat(part: Part, v: Tensor) -> Tensor:
    if tuple(v.shape[1:]) != part.shape:
        raise InputError(
            f'"{shown(part.name)}" has examples of shape {tuple(v.shape[1:])}; the task\'s have '
            f"{part.shape}"
        )
    if part.dtype == "int64" and v.numel() and int(v.abs().max()) > LARGEST:
        raise InputError(
            f'"{shown(part.name)}" holds a whole number beyond 2^24, which 32-bit numbers change; '
            "number the values anew from 0"
        )
    v = scaled(v) if part.dtype == PIXELS else v
    return v.reshape(len(v), -1).float()


def scaled(x: Tensor) -> Tensor:
    """Bytes 0..255 as (x/255 - 0.5) / 0.5 in float32, as in FedPALS' code; floats unchanged."""
    return x.float().div_(127.5).sub_(1.0) if x.dtype == torch.uint8 else x


def _shaped(part: Part, columns: Tensor) -> Tensor:
    v = columns.reshape(len(columns), *part.shape)
    if part.dtype in ("float32", PIXELS):
        return v
    return v != 0 if part.dtype == "bool" else v.long()
