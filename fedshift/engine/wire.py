"""Parts as one block of bytes, for pipes between processes of one machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedshift.tree import Params, Parts

# Tensors start where torch's own allocator would put them: elsewhere kernels may round otherwise.
ALIGN = 64
# Pieces to a call; the system takes no more than 1,024.
MANY = 512


class Piece(NamedTuple):
    """Where a tensor lies in a block, and what it is."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


def under(prefix: str, parts: Mapping[str, Params]) -> Parts:
    """The parts with a prefix before their names, so that several trees travel together."""
    return {f"{prefix}/{part}": tree for part, tree in parts.items()}


def inside(prefix: str, parts: Mapping[str, Params]) -> Parts:
    """The parts whose names have the prefix, without it."""
    start = f"{prefix}/"
    return {k.removeprefix(start): tree for k, tree in parts.items() if k.startswith(start)}


def apart(parts: Mapping[str, Params], count: int) -> list[Parts]:
    """The parts under "0", "1", ..., one after the other: all of `inside(str(i), parts)`."""
    found: list[Parts] = [{} for _ in range(count)]
    for name, tree in parts.items():
        i, _, rest = name.partition("/")
        found[int(i)][rest] = tree
    return found


def send(connection: Connection, about: Any, parts: Parts) -> None:
    """Send parts, and something small about them that can be pickled."""
    layout: dict[str, list[Piece]] = {part: [] for part in parts}
    views: list[memoryview] = []
    end = 0
    for part, tree in parts.items():
        for name, v in tree.items():
            start = -(-end // ALIGN) * ALIGN
            views += [memoryview(bytes(start - end)), _bytes(v)]
            end = start + v.numel() * v.element_size()
            layout[part].append(Piece(name, v.dtype, tuple(v.shape), start, end))
    connection.send((about, layout, end))
    _write(connection.fileno(), [view for view in views if len(view)])


def receive(connection: Connection) -> tuple[Any, Parts]:
    """(what was said about them, the parts). Raises EOFError where the other end is gone."""
    about, layout, size = connection.recv()
    block = torch.empty(size, dtype=torch.uint8)
    # Straight to its place: `Connection.recv_bytes_into` takes two copies more.
    left = block.numpy().data
    while left:
        count = os.readv(connection.fileno(), [left])
        if not count:
            raise EOFError
        left = left[count:]
    return about, {
        part: {p.name: block[p.start : p.stop].view(p.dtype).view(p.shape) for p in pieces}
        for part, pieces in layout.items()
    }


def _bytes(v: Tensor) -> memoryview:
    return v.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _write(descriptor: int, views: list[memoryview]) -> None:
    """Write one after the other, many to a call, from where they lie."""
    first = 0
    while first < len(views):
        count = os.writev(descriptor, views[first : first + MANY])
        while first < len(views) and count >= len(views[first]):
            count -= len(views[first])
            first += 1
        if count:
            views[first] = views[first][count:]
