"""How many bytes a reply on Flower may have, and methods that would need more."""

from __future__ import annotations

import math
from collections.abc import Iterable

from fedshift.algorithms.base import Algorithm, Capabilities, ask
from fedshift.engine.checks.gate import Gate
from fedshift.errors import InputError
from fedshift.tree import Params, Parts, size_in_bytes

# Bytes of a reply beside its numbers: headers, names, and reports of a very small model.
ROOM = 1 << 20


def most_bytes(times: float, params: Params, buffers: Params, sent: Iterable[Parts] = ()) -> int:
    """What a reply may have: so many times the largest of the model and what clients were sent."""
    model = {"params": params, "buffers": buffers}
    return ROOM + int(times * max(map(size_in_bytes, [model, *sent])))


def check_room(algorithm: Algorithm, params: Params, buffers: Params, gate: Gate) -> None:
    """Raise InputError for a method with replies that are all refused, for the bytes they have."""
    needed = ask(algorithm, Capabilities.most_sent, params)
    allowed = min(most_bytes(gate.max_reply, params, buffers), gate.max_bytes)
    if needed <= allowed:
        return
    least = math.ceil(needed / size_in_bytes({"params": params, "buffers": buffers}))
    fits = needed <= gate.max_bytes
    raise InputError(
        f"a client's statistics in this method have {needed:,} bytes, and the server takes "
        f"{allowed:,}; give {f'training.max_reply = {least}, or ' if fits else ''}a model with "
        "fewer features"
    )
