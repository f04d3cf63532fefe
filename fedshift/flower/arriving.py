"""What nodes answered, from Flower's messages to replies: nothing that arrives can end a run."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
from flwr.app import Array, ArrayRecord, Message, RecordDict

from fedshift.engine.backends import Reply
from fedshift.engine.gate import Dropped
from fedshift.errors import InputError
from fedshift.flower.records import failure_of, fields_of, parts_of

MOST_TENSORS = 100_000
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
    replies, unread = [], {}
    for message in messages:
        client = client_of(message)
        if client is None:
            continue
        try:
            content = _content(message, max_bytes)
            replies.append(Reply(client, parts_of(content), {}, round_of(content)))
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


def _content(message: Message, max_bytes: int) -> RecordDict:
    """The content, if its arrays are what they say. Raises InputError."""
    if (why := failure_of(message)) is not None:
        raise InputError(why)
    content = message.content
    check_arrays(content.array_records.values(), max_bytes)
    return content


def check_arrays(records: Iterable[ArrayRecord], max_bytes: int) -> None:
    """Raise InputError for more bytes or tensors than allowed, and for headers that lie.

    A header alone makes NumPy set memory aside, so it is read first: what it promises must be
    there, of a plain type of number.
    """
    arrays = [array for record in records for array in record.values()]
    size = sum(len(array.data) for array in arrays)
    if size > max_bytes or len(arrays) > MOST_TENSORS:
        raise InputError(
            f"{len(arrays)} arrays of {size} bytes; allowed: {MOST_TENSORS} and {max_bytes}"
        )
    for array in arrays:
        _check_header(array)


def _check_header(array: Array) -> None:
    stream = io.BytesIO(array.data)
    try:
        shape, _, dtype = HEADERS[np.lib.format.read_magic(stream)](stream)
    except (KeyError, ValueError, TypeError, SyntaxError, EOFError) as e:
        raise InputError(f"an array that is not NumPy's: {e}") from None
    held = len(array.data) - stream.tell()
    if dtype.kind not in "fiub" or math.prod(shape) * dtype.itemsize != held:
        raise InputError(f"an array of {dtype} {shape} in {held} bytes")
