"""Read clients' replies from Flower's messages. No message, however invalid, can end a run."""

from __future__ import annotations

import io
import math
import tokenize
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
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
# NumPy itself refuses longer ones.
LONGEST_HEADER = 10_000


class Arrived(NamedTuple):
    """The replies that could be read, in any order, and the clients with unreadable replies."""

    replies: list[Reply]
    unread: list[Dropped]


def arrived(
    messages: Iterable[Message], client_of: Callable[[Message], int | None], max_bytes: int
) -> Arrived:
    """Read the replies of one round. Messages of nodes that are no client are left out."""
    replies, unread = [], dict[int, Dropped]()
    for message in messages:
        client = client_of(message)
        # Other nodes may be connected to the SuperLink; ignore what they send.
        if client is None:
            continue
        if (bad := failed_client(client, message)) is not None:
            unread[client] = bad
            continue
        try:
            parts = read_arrays(message.content.array_records, max_bytes)
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


def read_arrays(records: Mapping[str, ArrayRecord], max_bytes: int) -> Parts:
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
        part: {name: _tensor(array) for name, array in record.items()}
        for part, record in records.items()
    }


def _tensor(array: Array) -> Tensor:
    """The tensor of one array. Raises InputError if its header does not fit its bytes."""
    if array.stype != STYPE:
        raise InputError(f"an array that is not NumPy's but {array.stype}")
    # The length of the header is in bytes 8 and 9.
    start = 10 + int.from_bytes(array.data[8:10], "little")
    if start > LONGEST_HEADER:
        raise InputError(f"an array with a header of {start} bytes")
    shape, fortran, dtype = _header(array.data[:start])
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


# All clients send the same headers, and parsing one takes longer than copying a small array.
@lru_cache(maxsize=256)
def _header(data: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """(shape, whether by columns, type) of a header. Raises InputError for one not NumPy's."""
    stream = io.BytesIO(data)
    try:
        # np.load would not be safe here: it also opens archives and pickles.
        if np.lib.format.read_magic(stream) != (1, 0):
            raise ValueError("a header of another version than 1.0")
        return np.lib.format.read_array_header_1_0(stream)
    except (LookupError, ValueError, TypeError, SyntaxError, EOFError, *ODD_HEADERS) as e:
        raise InputError(f"an array that is not NumPy's: {shown(str(e), 200)}") from None
