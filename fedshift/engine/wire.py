"""Parts as one block of bytes, for pipes between processes of one machine."""

from __future__ import annotations

from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

from fedshift.tree import Params, Parts

# Tensors start where torch's own allocator would put them: elsewhere kernels may round otherwise.
ALIGN = 64


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
    end = 0
    for part, tree in parts.items():
        for name, v in tree.items():
            start = -(-end // ALIGN) * ALIGN
            end = start + v.numel() * v.element_size()
            layout[part].append(Piece(name, v.dtype, tuple(v.shape), start, end))
    block = torch.empty(end, dtype=torch.uint8)
    for part, pieces in layout.items():
        for p in pieces:
            flat = parts[part][p.name].detach().contiguous().reshape(-1)
            block[p.start : p.stop] = flat.view(torch.uint8)
    connection.send((about, layout, end))
    if end:
        connection.send_bytes(block.numpy().data)


def receive(connection: Connection) -> tuple[Any, Parts]:
    """(what was said about them, the parts). Raises EOFError where the other end is gone."""
    about, layout, size = connection.recv()
    block = torch.empty(size, dtype=torch.uint8)
    if size:
        connection.recv_bytes_into(block.numpy().data)
    return about, {
        part: {p.name: block[p.start : p.stop].view(p.dtype).view(p.shape) for p in pieces}
        for part, pieces in layout.items()
    }
