"""Messages: parts of tensors as Flower's array records, and back."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from fedshift.errors import InputError, from_elsewhere
from fedshift.tree import Params, Parts

FAILURE = "failure"


def to_record(tree: Params) -> ArrayRecord:
    """One part as an array record; tensors are copied to the CPU and made contiguous.

    Raises InputError for a type that NumPy does not have (bfloat16).
    """
    try:
        return ArrayRecord(
            {k: Array(v.detach().cpu().contiguous().numpy()) for k, v in tree.items()}
        )
    except TypeError as e:
        raise InputError(
            f"{e}: Flower's arrays are NumPy's; train in float32, float64 or float16"
        ) from e


def to_records(parts: Parts, prefix: str = "") -> dict[str, ArrayRecord]:
    """`{part: tree}` as `{prefix + part: record}`; empty parts are kept."""
    return {prefix + part: to_record(tree) for part, tree in parts.items()}


def to_shared_records(many: Mapping[int, Parts]) -> dict[int, dict[str, ArrayRecord]]:
    """`to_records` of each; parts with the same tensor objects are converted once and shared."""
    written: dict[tuple[tuple[str, int], ...], ArrayRecord] = {}

    def record(tree: Params) -> ArrayRecord:
        # ids are unique here, because all tensors are alive in `many`.
        key = tuple((name, id(v)) for name, v in tree.items())
        if key not in written:
            written[key] = to_record(tree)
        return written[key]

    return {i: {part: record(tree) for part, tree in parts.items()} for i, parts in many.items()}


def to_parts(records: Mapping[str, ArrayRecord], prefix: str = "") -> Parts:
    """The inverse of `to_records`, for the records whose name starts with the prefix.

    Tensors are copied into memory of torch: NumPy's is less aligned, and kernels may then round
    differently.
    """
    return {
        name.removeprefix(prefix): {k: v.clone() for k, v in record.to_torch_state_dict().items()}
        for name, record in records.items()
        if name.startswith(prefix)
    }


def parts_of(content: RecordDict) -> Parts:
    """All array records of a message."""
    return to_parts(content.array_records)


def fields_of(content: RecordDict, name: str) -> dict[str, Any]:
    """A record of numbers and words. Raises InputError if the message lacks it."""
    if name not in content:
        raise InputError(
            f'a message without "{name}": is the other side a fedshift app of the same version?'
        )
    return dict(cast(Mapping[str, Any], content[name]))


def bytes_of(message: Message) -> int:
    """Bytes of a message's arrays, as NumPy writes them (about 130 bytes of header for each)."""
    if not message.has_content():
        return 0
    records = message.content.array_records.values()
    return sum(len(array.data) for record in records for array in record.values())


def failed(why: str) -> RecordDict:
    """The answer of a client that failed."""
    return RecordDict({FAILURE: ConfigRecord({"reason": why})})


KILLED = "the actor that it ran in was killed, perhaps for lack of memory; give fewer --actors"


def failure_of(message: Message) -> str | None:
    """Why a client failed, in one line; None if it did not.

    Our own clients give a reason; otherwise it is Flower's text, without frames and classes.
    """
    if not message.has_error():
        record = message.content.config_records.get(FAILURE)
        if record is None:
            return None
        return from_elsewhere(str(record.get("reason", "it did not say why")))
    text = from_elsewhere(message.error.reason or f"error {message.error.code}", 2000)
    # Replace Ray's own text, a dozen lines about its workers.
    if re.match(r"<class 'ray\.exceptions\.(ActorDied|OutOfMemory|WorkerCrashed)Error'>", text):
        return KILLED
    # Flower wraps the text of an exception in one of these two ways.
    for frame in (r"Message: (.*?)(?:'>)?$", r"""^<class '[^']*'>:<'(.*)'>$"""):
        if matches := re.findall(frame, text):
            return from_elsewhere(str(matches[-1]))
    return from_elsewhere(text)
