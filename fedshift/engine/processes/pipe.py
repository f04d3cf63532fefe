"""Objects through a pipe between processes of one machine: a pickle, and its tensors beside it.

Where the tensors fit they lie in memory that both processes see, and only the pickle takes the
pipe: through that, large messages would go piece by piece, each end waiting for the other. Pickle's
own buffers (protocol 5) do not fit: tensors have to arrive as views of one block, so that a view
tells how much memory it keeps alive.
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

# Bytes of the shared memory. Pages take room once they are used, and as long as it lives.
SHARED = 1 << 24
NOWHERE = memoryview(b"")
# Tensors start where torch's own allocator would put them: elsewhere kernels may round otherwise.
ALIGN = 64
# Pieces to a call; the system takes no more than 1,024.
MANY = 512
GAP = memoryview(bytes(ALIGN))
# A message begins with so many numbers: bytes of its pickle, of its tensors, and whether these lie
# in the shared memory.
HEAD = 3


class UnsentError(Exception):
    """The object cannot be pickled; nothing was sent."""


def shared() -> memoryview:
    """Memory that this process has in common with those that are forked from it later.

    Empty where the system refuses; then everything takes the pipe.
    """
    try:
        return memoryview(mmap.mmap(-1, SHARED))
    except OSError:
        return NOWHERE


def sendable(thing: Any) -> bool:
    """Whether an object can be sent: its classes and functions are those of modules."""
    try:
        _pickled(thing)
    except UnsentError:
        return False
    return True


def send(
    connection: Connection, thing: Any, room: memoryview = NOWHERE, end: float | None = None
) -> None:
    """Send an object.

    room: what `shared` gave, if both ends have it; they take turns, each waiting for the other's
    answer before it sends again. end: TimeoutError where the other end has not taken all by then,
    on the clock of `time.monotonic`. Raises UnsentError, and OSError where the other end is gone.
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
    """The object that was sent; its tensors are views of one block of memory.

    Raises EOFError where the other end is gone, TimeoutError where not all has come by `end`.
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
    # Written by `send`, of this very program.
    return _Unpickler(io.BytesIO(pickled), block).load()


class _Pickler(pickle.Pickler):
    """Collects the bytes of plain tensors; others, as those with a gradient, go as torch has it.

    Not as processes usually hand over tensors: that takes a thread, which has errors to print where
    the other process ends meanwhile.
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
    """A tensor of the block. Torch refuses a view of no bytes as another type."""
    data = block[start : start + prod(shape) * dtype.itemsize]
    return (data.view(dtype) if len(data) else data.new_empty(0, dtype=dtype)).view(shape)


def _generator(device: torch.device, state: bytes) -> torch.Generator:
    """A generator in that state. Torch would read a state that is a view from its block's start."""
    made = torch.Generator(device)
    made.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    return made


def _pickled(thing: Any) -> tuple[bytes, int, list[memoryview]]:
    """(the pickle, how many bytes its tensors take, and these)."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    try:
        pickler.dump(thing)
    except Exception as e:  # pickle has a kind of error for each kind of object
        raise UnsentError(str(e) or type(e).__name__) from e
    return file.getvalue(), pickler.size, pickler.views


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
