"""What nodes answered, from Flower's messages to replies: nothing that arrives can end a run."""

from __future__ import annotations

import io
import math
import tokenize
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Message, RecordDict
from torch import Tensor

from fedshift.engine.backends import Reply
from fedshift.engine.checks.gate import Dropped
from fedshift.errors import InputError, shown
from fedshift.flower.records import failure_of, fields_of
from fedshift.tree import Parts

MOST_TENSORS = 100_000
STYPE = "numpy.ndarray"
# What NumPy lets through of headers that are no Python: it splits them into words, and reads these.
ODD_HEADERS = (tokenize.TokenError, RecursionError, MemoryError)
HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


class Arrived(NamedTuple):
    """Replies as they were read, in any order, and clients of whom one could not be read."""

    replies: list[Reply]
    unread: list[Dropped]


def arrived(
    messages: Iterable[Message], client_of: Callable[[Message], int | None], max_bytes: int
) -> Arrived:
    """Read the answers of one round. Messages of nodes that are nobody's are left out."""
    replies, unread, headers = [], {}, Headers()
    for message in messages:
        client = client_of(message)
        if client is None:
            continue
        try:
            if (why := failure_of(message)) is not None:
                raise InputError(why)
            parts = read_arrays(message.content.array_records, max_bytes, headers)
            replies.append(Reply(client, parts, {}, round_of(message.content)))
        except Exception as e:
            # Bytes from elsewhere: whatever they make a decoder raise is the reason.
            told = str(e) if isinstance(e, InputError) else f"{type(e).__name__}: {e}"
            unread[client] = " ".join(told.split())[:500]
    kept = [reply for reply in replies if reply.client not in unread]
    return Arrived(kept, [Dropped(*one) for one in sorted(unread.items())])


def round_of(content: RecordDict) -> int:
    """The round that an answer is for. Raises InputError where it does not say so."""
    t = fields_of(content, "run").get("round")
    if not isinstance(t, int):
        raise InputError(f"an answer to round {t!r}")
    return t


class Header(NamedTuple):
    """What an array's first bytes say of the others, which begin at `start`."""

    shape: tuple[int, ...]
    fortran: bool
    dtype: np.dtype[Any]
    start: int


class Headers:
    """Headers by their bytes: the same ones come from every client, and to read one takes longer
    than to copy a small array."""

    def __init__(self) -> None:
        self.known: dict[bytes, Header] = {}

    def of(self, data: bytes) -> Header:
        """The header of an array. Raises InputError for one that is not NumPy's."""
        first = data[: 10 + int.from_bytes(data[8:10], "little")]
        if first not in self.known:
            found = _header(data)
            if found.start != len(first):  # of another version, whose length is elsewhere
                return found
            self.known[first] = found
        return self.known[first]


def read_arrays(records: Mapping[str, ArrayRecord], max_bytes: int, headers: Headers) -> Parts:
    """The parts of a message, each array in memory of torch's own.

    Raises InputError for more bytes or tensors than allowed, and for headers that lie: a header
    alone makes NumPy set memory aside, so what it promises must be there, of a plain type of
    number.
    """
    arrays = [array for record in records.values() for array in record.values()]
    size = sum(len(array.data) for array in arrays)
    if size > max_bytes or len(arrays) > MOST_TENSORS:
        raise InputError(
            f"{len(arrays)} arrays of {size} bytes; allowed: {MOST_TENSORS} and {max_bytes}"
        )
    return {
        part: {name: _tensor(array, headers) for name, array in record.items()}
        for part, record in records.items()
    }


def _tensor(array: Array, headers: Headers) -> Tensor:
    if array.stype != STYPE:
        raise InputError(f"an array that is not NumPy's but {array.stype}")
    shape, fortran, dtype, start = headers.of(array.data)
    held = len(array.data) - start
    if dtype.kind not in "fiubc" or math.prod(shape) * dtype.itemsize != held:
        raise InputError(f"an array of {dtype} {shape} in {held} bytes")
    order: Literal["F", "C"] = "F" if fortran else "C"
    view = np.frombuffer(array.data, np.uint8)[start:].view(dtype).reshape(shape, order=order)
    # Copied into memory of torch's own: NumPy aligns less, and kernels may then round otherwise.
    found = torch.empty(shape, dtype=torch.from_numpy(np.empty(0, dtype)).dtype)
    np.copyto(found.numpy(), view)
    return found


def _header(data: bytes) -> Header:
    stream = io.BytesIO(data)
    try:
        shape, fortran, dtype = HEADERS[np.lib.format.read_magic(stream)](stream)
    except (LookupError, ValueError, TypeError, SyntaxError, EOFError, *ODD_HEADERS) as e:
        raise InputError(f"an array that is not NumPy's: {shown(str(e), 200)}") from None
    return Header(shape, fortran, dtype, stream.tell())
