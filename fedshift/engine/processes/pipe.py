"""Send objects between processes of one machine: a pickle, with the bytes of tensors beside it.

Tensors go through shared memory if they fit, and only the pickle goes through the pipe. A pipe
takes a large message in pieces, and for each the two ends wake and wait for one another. Pickle's
own out-of-band buffers (protocol 5) do not fit. Tensors must arrive as views of one block, because
other code asks of a view how much memory it keeps alive (`fedshift.tree.compact`).
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import select
import time
from array import array
from functools import partial
from math import prod
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

# Bytes of shared memory for each worker. A page takes memory from its first use on.
SHARED = 1 << 24
# In place of shared memory where there is none.
NOWHERE = memoryview(b"")
# Tensors are aligned as by torch's own allocator. Kernels treat unaligned memory differently, and
# may round differently: results would not be those of the loop, bit for bit.
ALIGN = 64
# Buffers per call of `writev`; Linux takes at most 1,024.
MANY = 512
GAP = memoryview(bytes(ALIGN))
# A message begins with so many 8-byte numbers: the size of its pickle, the size of its tensors, and
# whether these are in shared memory.
HEAD = 3


class UnsentError(Exception):
    """The object cannot be pickled; nothing was sent."""


def share_memory() -> memoryview:
    """Memory that this process shares with processes forked from it later.

    Empty if the system refuses it; then everything goes through the pipe.
    """
    try:
        return memoryview(mmap.mmap(-1, SHARED))
    except OSError:
        return NOWHERE


def can_send(thing: Any) -> bool:
    """Whether an object can be sent; pickle finds its classes and functions only in modules."""
    try:
        _pickled(thing)
    except UnsentError:
        return False
    return True


def send(
    connection: Connection, thing: Any, room: memoryview = NOWHERE, end: float | None = None
) -> None:
    """Send an object.

    room  shared memory of both ends (`share_memory`). It needs no lock, because they take turns:
          each waits for the other's answer before it sends again
    end   TimeoutError if the other end has not taken everything by then (`time.monotonic`)

    Raises UnsentError, and OSError if the other end is gone.
    """
    pickled, size, views = _pickled(thing)
    near = size <= len(room)
    if near:
        end_of_last = 0
        for view in views:
            room[end_of_last : end_of_last + len(view)] = view
            end_of_last += len(view)
    head = memoryview(array("q", [len(pickled), size, near]).tobytes() + pickled)
    _write(connection.fileno(), [head, *([] if near else views)], end)


def receive(connection: Connection, room: memoryview = NOWHERE, end: float | None = None) -> Any:
    """Receive an object; its tensors are views of one block of memory.

    Raises EOFError if the other end is gone, TimeoutError if not everything has come by `end`.
    """
    descriptor = connection.fileno()
    head = memoryview(bytearray(8 * HEAD))
    _read(descriptor, head, end)
    length, size, near = head.cast("q")
    pickled = bytearray(length)
    _read(descriptor, memoryview(pickled), end)
    block = torch.empty(size, dtype=torch.uint8)
    if near:
        block.numpy().data[:] = room[:size]
    else:
        _read(descriptor, block.numpy().data, end)
    # Safe to unpickle: `send` wrote it, in a process that was forked from this program.
    return _Unpickler(io.BytesIO(pickled), block).load()


class _Pickler(pickle.Pickler):
    """Keeps the bytes of plain tensors out of the pickle; torch pickles all others.

    torch.multiprocessing is not used: it hands tensors over by a thread, which prints errors if the
    other process ends meanwhile.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.size, self.views = 0, list[memoryview]()

    def reducer_override(self, given: Any) -> Any:
        if isinstance(given, torch.Generator):
            return _generator, (given.device, given.get_state().numpy().tobytes())
        if type(given) is not Tensor or given.requires_grad or given.layout != torch.strided:
            return NotImplemented
        plain = given.detach().cpu().resolve_conj().resolve_neg().contiguous()
        start, gap = self.size, -plain.nbytes % ALIGN
        if plain.nbytes:
            self.views.append(plain.reshape(-1).view(torch.uint8).numpy().data)
        if gap:
            self.views.append(GAP[:gap])
        self.size += plain.nbytes + gap
        return _tensor, (start, given.dtype, tuple(given.shape))


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, block: Tensor) -> None:
        super().__init__(file)
        self._tensor = partial(_tensor, block=block)

    def find_class(self, module: str, name: str) -> Any:
        ours = module == __name__ and name == "_tensor"
        return self._tensor if ours else super().find_class(module, name)


def _tensor(start: int, dtype: torch.dtype, shape: tuple[int, ...], block: Tensor) -> Tensor:
    """A tensor of the block."""
    data = block[start : start + prod(shape) * dtype.itemsize]
    # Torch refuses to view 0 bytes as another type.
    return (data.view(dtype) if len(data) else data.new_empty(0, dtype=dtype)).view(shape)


def _generator(device: torch.device, state: bytes) -> torch.Generator:
    """A generator in this state."""
    made = torch.Generator(device)
    # From a tensor of its own: of a view, torch would read the state from its block's start.
    made.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    return made


def _pickled(thing: Any) -> tuple[bytes, int, list[memoryview]]:
    """(the pickle, the bytes of its tensors in all, views of these)."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    try:
        pickler.dump(thing)
    except Exception as e:  # which error it is depends on the object that cannot be pickled
        raise UnsentError(str(e) or type(e).__name__) from e
    return file.getvalue(), pickler.size, pickler.views


def _read(descriptor: int, left: memoryview, end: float | None) -> None:
    """Read into memory without a copy; `Connection.recv_bytes_into` would make two."""
    while left:
        _await(descriptor, select.POLLIN, end)
        count = os.readv(descriptor, [left])
        if not count:
            raise EOFError
        left = left[count:]


def _write(descriptor: int, views: list[memoryview], end: float | None) -> None:
    """Write buffers in turn, many per call, without joining them first."""
    first = 0
    # With a deadline, a call must return once the pipe is full, so that the clock is looked at.
    os.set_blocking(descriptor, end is None)
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
    """Wait until the descriptor can be read or written; TimeoutError at the end."""
    if end is not None:
        waiting = select.poll()
        waiting.register(descriptor, event)
        if not waiting.poll(max(0.0, end - time.monotonic()) * 1000):
            raise TimeoutError
