"""Trees of tensors as one block of bytes, for pipes between processes of one machine.

What fits lies in memory that both processes see, and only its layout takes the pipe: through that
all would go piece by piece, one end writing what it holds and waiting for the other to read.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import select
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from fedshift.randomness import one_at_a_time
from fedshift.tree import Params, Parts, same_parts

T = TypeVar("T")

# Bytes of that memory. Those that were never used take no room; others do, as long as it lives.
SHARED = 1 << 24
NOWHERE = memoryview(b"")
# Tensors start where torch's own allocator would put them: elsewhere kernels may round otherwise.
ALIGN = 64
# Pieces to a call; the system takes no more than 1,024.
MANY = 512
# Bytes that say how long is what is said about trees.
LENGTH = 8
# Bytes of a tree that is copied to those beside it before they are sent, where its tensors are of
# these types: a call for each would cost more.
LITTLE = 1 << 12
COPIED = {torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int64, torch.uint8}

SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


class UnsentError(Exception):
    """What cannot be sent, for it cannot be pickled; nothing went out."""


class Piece(NamedTuple):
    """Where a tensor lies in a record, and what it is."""

    part: str
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


class Layout(NamedTuple):
    """What a tree's record looks like: its parts, their tensors, bytes from one to the next."""

    parts: tuple[str, ...]
    pieces: tuple[Piece, ...]
    size: int


def under(prefix: str, parts: Mapping[str, Params]) -> Parts:
    """The parts with a prefix before their names, so that several trees travel together."""
    return {f"{prefix}/{part}": tree for part, tree in parts.items()}


def inside(prefix: str, parts: Mapping[str, Params]) -> Parts:
    """The parts whose names have the prefix, without it."""
    start = f"{prefix}/"
    return {k.removeprefix(start): tree for k, tree in parts.items() if k.startswith(start)}


def shared() -> memoryview:
    """Memory that this process has in common with those that are forked from it later.

    None of it where the system refuses; then all takes the pipe.
    """
    try:
        return memoryview(mmap.mmap(-1, SHARED))
    except OSError:
        return NOWHERE


def send(
    connection: Connection, about: Any, trees: Sequence[Parts], room: memoryview = NOWHERE,
    end: float | None = None,
) -> None:  # fmt: skip
    """Send trees, one after the other, and something small about them that can be pickled.

    room: what `shared` gave, if both ends have it; they take turns, each waiting for the other's
    answer before it sends again. end: TimeoutError where the other end has not taken all by then,
    on the clock of `time.monotonic`. Raises UnsentError, and OSError where the other end is gone.
    """
    runs: list[tuple[Layout, int]] = []  # trees of one layout in a row, and how many
    views: list[memoryview] = []
    for alike in in_a_row(trees, _same):
        layout = _layout(alike[0])
        runs.append((layout, len(alike)))
        kinds = {piece.dtype for piece in layout.pieces}
        if len(alike) > 1 and layout.size <= LITTLE and kinds <= COPIED:
            views.append(_bytes(_records(layout, alike)))
        else:
            views += _pieces(layout, alike)
    views = [view for view in views if len(view)]
    near = sum(map(len, views)) <= len(room)
    said = _pickled((about, runs, near))
    if near:
        _put(views, room)
    said = len(said).to_bytes(LENGTH) + said
    _write(connection.fileno(), [memoryview(said), *([] if near else views)], end)


def receive(
    connection: Connection, room: memoryview = NOWHERE, end: float | None = None
) -> tuple[Any, list[Parts]]:
    """(what was said about them, the trees). Raises EOFError where the other end is gone.

    end: TimeoutError where not all has come by then.
    """
    length = int.from_bytes(_taken(connection, LENGTH, end))
    # Written by `send`, of this very program.
    about, runs, near = pickle.loads(_taken(connection, length, end))  # noqa: S301
    block = torch.empty(sum(layout.size * count for layout, count in runs), dtype=torch.uint8)
    if near:
        block.numpy().data[:] = room[: len(block)]
    else:
        _read(connection.fileno(), block.numpy().data, end)
    trees: list[Parts] = []
    for layout, count in runs:
        size = layout.size * count
        trees += _trees(layout, block[:size].view(count, layout.size))
        block = block[size:]
    return about, trees


def _taken(connection: Connection, count: int, end: float | None) -> bytearray:
    found = bytearray(count)
    _read(connection.fileno(), memoryview(found), end)
    return found


def _pickled(said: Any) -> bytes:
    """Not as processes of one machine usually do it: they hand over tensors by a thread of their
    own, which has errors to print where the other process ends meanwhile.
    """
    buffer = io.BytesIO()
    try:
        with one_at_a_time():  # a pass has other tensors in a network's places
            _Pickler(buffer, protocol=-1).dump(said)
        return buffer.getvalue()
    except Exception as e:  # pickle has a kind of error for each kind of object
        raise UnsentError(str(e) or type(e).__name__) from e


class _Pickler(pickle.Pickler):
    """Pickles tensors of whole numbers without a sign, too, which torch could not read again."""

    def reducer_override(self, given: Any) -> Any:
        if type(given) is Tensor and given.dtype in SIGNED:
            return Tensor.view, (given.detach().view(SIGNED[given.dtype]), given.dtype)
        return NotImplemented


def in_a_row(many: Sequence[T], alike: Callable[[T, T], bool]) -> Iterator[Sequence[T]]:
    """Cut where one is not like the first since the cut before."""
    first = 0
    for i in range(1, len(many) + 1):
        if i == len(many) or not alike(many[first], many[i]):
            yield many[first:i]
            first = i


def _same(one: Parts, other: Parts) -> bool:
    """Whether trees have one layout."""
    ordered = tuple(one) == tuple(other)
    ordered = ordered and all(tuple(one[part]) == tuple(other[part]) for part in one)
    return ordered and same_parts(one, other)


def _layout(tree: Parts) -> Layout:
    pieces, end = [], 0
    for part, leaves in tree.items():
        for name, v in leaves.items():
            start = _aligned(end)
            end = start + v.numel() * v.element_size()
            pieces.append(Piece(part, name, v.dtype, tuple(v.shape), start, end))
    return Layout(tuple(tree), tuple(pieces), _aligned(end))


def _aligned(end: int) -> int:
    return -(-end // ALIGN) * ALIGN


def _trees(layout: Layout, records: Tensor) -> list[Parts]:
    """The trees of records [n, size], views of them."""
    found: list[Parts] = [{part: {} for part in layout.parts} for _ in records]
    for piece, leaves in _stacked(layout, records):
        for tree, leaf in zip(found, leaves.unbind(), strict=True):
            tree[piece.part][piece.name] = leaf
    return found


def _stacked(layout: Layout, records: Tensor) -> Iterator[tuple[Piece, Tensor]]:
    """Each piece as it lies in records [n, size]: a view [n, ...]."""
    for piece in layout.pieces:
        v = records[:, piece.start : piece.stop]
        # A view of nothing in another type is refused.
        v = v.view(piece.dtype) if v.numel() else v.new_empty(0, dtype=piece.dtype)
        yield piece, v.view(len(records), *piece.shape)


def _pieces(layout: Layout, trees: Sequence[Parts]) -> Iterator[memoryview]:
    """The records of trees, from where their tensors lie."""
    for tree in trees:
        end = 0
        for piece in layout.pieces:
            yield _gap(piece.start - end)
            yield _bytes(tree[piece.part][piece.name])
            end = piece.stop
        yield _gap(layout.size - end)


def _records(layout: Layout, trees: Sequence[Parts]) -> Tensor:
    """The records of trees, copied; [n, size]."""
    records = torch.zeros(len(trees), layout.size, dtype=torch.uint8)
    for piece, v in _stacked(layout, records):
        v.copy_(torch.stack([tree[piece.part][piece.name].detach() for tree in trees]))
    return records


def _gap(count: int) -> memoryview:
    return memoryview(bytes(count))


def _bytes(v: Tensor) -> memoryview:
    plain = v.detach().cpu().resolve_conj().resolve_neg()
    return plain.contiguous().reshape(-1).view(torch.uint8).numpy().data


def _put(views: Sequence[memoryview], room: memoryview) -> None:
    """Copy one after the other."""
    end = 0
    for view in views:
        room[end : end + len(view)] = view
        end += len(view)


def _read(descriptor: int, left: memoryview, end: float | None) -> None:
    """Straight to its place: `Connection.recv_bytes_into` takes two copies more."""
    while left:
        _await(descriptor, select.POLLIN, end)
        count = os.readv(descriptor, [left])
        if not count:
            raise EOFError
        left = left[count:]


def _write(descriptor: int, views: list[memoryview], end: float | None) -> None:
    """Write one after the other, many to a call, from where they lie."""
    first = 0
    os.set_blocking(descriptor, end is None)  # or a call would wait until all of it is taken
    try:
        while first < len(views):
            _await(descriptor, select.POLLOUT, end)
            count = os.writev(descriptor, views[first : first + MANY])
            while first < len(views) and count >= len(views[first]):
                count -= len(views[first])
                first += 1
            if count:
                views[first] = views[first][count:]
    finally:
        os.set_blocking(descriptor, True)


def _await(descriptor: int, event: int, end: float | None) -> None:
    """TimeoutError unless something can be read or written before the end."""
    if end is not None:
        waiting = select.poll()
        waiting.register(descriptor, event)
        if not waiting.poll(max(0.0, end - time.monotonic()) * 1000):
            raise TimeoutError
