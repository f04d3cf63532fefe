"""Read clients' replies from Flower's messages. No message, however invalid, can end a run."""

from __future__ import annotations

import io
import math
import tokenize
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.common.constant import ErrorCode
from torch import Tensor

from fedshift.engine.backends import Reply
from fedshift.engine.checks.gate import Dropped
from fedshift.errors import InputError, from_elsewhere, shown
from fedshift.flower.records import failure_of, fields_of
from fedshift.tree import Parts

MOST_TENSORS = 100_000
STYPE = "numpy.ndarray"
# Errors with which the SuperLink answers for a client. If a SuperNode is killed and soon started
# again, it is connected, but the message that it had fetched is never answered and expires.
MISSING: dict[int, Literal["lost", "timeout"]] = {
    ErrorCode.NODE_UNAVAILABLE: "lost",
    ErrorCode.MESSAGE_UNAVAILABLE: "timeout",
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE: "timeout",
}
# Plainer than Flower's texts, which mention heartbeats, and three causes of which only one applies.
WORDS = {"lost": "its node is no longer connected", "timeout": "no answer in time"}
# NumPy parses a header as Python; for an invalid one these exceptions get past its own checks.
ODD_HEADERS = (tokenize.TokenError, RecursionError, MemoryError)
# np.load would not be safe here: it also opens archives and pickles.
HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


class Arrived(NamedTuple):
    """The replies that could be read, in any order, and the clients with unreadable replies."""

    replies: list[Reply]
    unread: list[Dropped]


def arrived(
    messages: Iterable[Message], client_of: Callable[[Message], int | None], max_bytes: int
) -> Arrived:
    """Read the replies of one round. Messages of nodes that are no client are left out."""
    replies, unread, headers = [], dict[int, Dropped](), Headers()
    for message in messages:
        client = client_of(message)
        # Other nodes may be connected to the SuperLink; ignore what they send.
        if client is None:
            continue
        if (bad := failed_client(client, message)) is not None:
            unread[client] = bad
            continue
        try:
            parts = read_arrays(message.content.array_records, max_bytes, headers)
            replies.append(Reply(client, parts, {}, round_of(message.content)))
        except Exception as e:
            # The bytes come from another machine: any exception means that they are invalid.
            reason = str(e) if isinstance(e, InputError) else f"{type(e).__name__}: {e}"
            unread[client] = Dropped(client, from_elsewhere(reason), "reply")
    # A client with a valid and an invalid message drops out: we cannot know which one is right.
    readable = [reply for reply in replies if reply.client not in unread]
    return Arrived(readable, sorted(unread.values()))


def failed_client(client: int, message: Message) -> Dropped | None:
    """The drop-out if a message says that the client failed or is gone, else None."""
    if (why := failure_of(message)) is None:
        return None
    kind = MISSING.get(message.error.code) if message.has_error() else None
    return Dropped(client, WORDS[kind] if kind else from_elsewhere(why), kind or "error")


def round_of(content: RecordDict) -> int:
    """The round that a reply belongs to. Raises InputError if it does not say."""
    t = fields_of(content, "run").get("round")
    if not isinstance(t, int):
        raise InputError(f"an answer to round {t!r}")
    return t


class Header(NamedTuple):
    """The header of an array in NumPy's format: what its data are, from byte `start` on."""

    shape: tuple[int, ...]
    fortran: bool
    dtype: np.dtype[Any]
    start: int


class Headers:
    """A cache of headers by their bytes.

    All clients send the same headers, and parsing one takes longer than copying a small array.
    """

    def __init__(self) -> None:
        self.cache: dict[bytes, Header] = {}

    def of(self, data: bytes) -> Header:
        """The header of an array. Raises InputError for one that is not NumPy's."""
        first = data[: 10 + int.from_bytes(data[8:10], "little")]
        if first not in self.cache:
            header = _header(data)
            # Version 2 of the format stores the header's length in other bytes: do not cache it.
            if header.start != len(first):
                return header
            self.cache[first] = header
        return self.cache[first]


def read_arrays(records: Mapping[str, ArrayRecord], max_bytes: int, headers: Headers) -> Parts:
    """The parts of a message, with each array copied into memory of torch.

    Raises InputError for more bytes or tensors than allowed, for types that are not plain numbers,
    and for headers that do not match the data. (NumPy would allocate whatever a header claims.)
    """
    arrays = [array for record in records.values() for array in record.values()]
    # Check before anything is decoded.
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
    """The tensor of one array. Raises InputError if its header does not fit its bytes."""
    if array.stype != STYPE:
        raise InputError(f"an array that is not NumPy's but {array.stype}")
    shape, fortran, dtype, start = headers.of(array.data)
    size = len(array.data) - start
    # Plain numbers only, because object arrays would be unpickled.
    if dtype.kind not in "fiubc" or math.prod(shape) * dtype.itemsize != size:
        raise InputError(f"an array of {dtype} {shape} in {size} bytes")
    order: Literal["F", "C"] = "F" if fortran else "C"
    view = np.frombuffer(array.data, np.uint8)[start:].view(dtype).reshape(shape, order=order)
    # Copy into memory of torch: NumPy's is less aligned, and kernels may then round differently.
    tensor = torch.empty(shape, dtype=torch.from_numpy(np.empty(0, dtype)).dtype)
    np.copyto(tensor.numpy(), view)
    return tensor


def _header(data: bytes) -> Header:
    """Parse the header of an array. Raises InputError for one that is not NumPy's."""
    stream = io.BytesIO(data)
    try:
        shape, fortran, dtype = HEADERS[np.lib.format.read_magic(stream)](stream)
    except (LookupError, ValueError, TypeError, SyntaxError, EOFError, *ODD_HEADERS) as e:
        raise InputError(f"an array that is not NumPy's: {shown(str(e), 200)}") from None
    return Header(shape, fortran, dtype, stream.tell())
