"""How many bytes a reply on Flower may have, and a check that a method's replies have room."""

from __future__ import annotations

import math
from collections.abc import Iterable

from fedshift.algorithms.method import Method
from fedshift.engine.checks.gate import Gate
from fedshift.errors import InputError
from fedshift.tree import Params, Parts, size_in_bytes

# Bytes allowed beside the model's: headers, names, and reports, which count with tiny models.
ROOM = 1 << 20


def most_bytes(times: float, params: Params, buffers: Params, sent: Iterable[Parts] = ()) -> int:
    """The limit: `times` the bytes of the model or of the largest message, and `ROOM` beside."""
    model = {"params": params, "buffers": buffers}
    return ROOM + int(times * max(map(size_in_bytes, [model, *sent])))


def check_room(algorithm: Method, params: Params, buffers: Params, gate: Gate) -> None:
    """Raise InputError for a method whose replies are so large that all would be refused."""
    needed = algorithm.most_sent(params)
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
