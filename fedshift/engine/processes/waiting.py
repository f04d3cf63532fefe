"""How processes of one machine wait for one another: for a moment awake, then asleep."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

from fedshift.kernels.torch_private import plain

# Seconds awake. To be woken takes time, most on virtual machines, and who wakes another waits for
# it, too: much to a round of 7 ms (W3 of results/benchmarks.md). Longer than between two such
# rounds, and little to a round of large models, whose processes sleep.
AWAKE = 0.003


def awake() -> float:
    """`AWAKE`, unless FEDSHIFT_PLAIN=1: then they sleep at once."""
    return 0.0 if plain() else AWAKE


def heard(
    connections: Sequence[Connection], end: float | None, patience: float = 0.0
) -> set[Connection]:
    """Those that have something to read, or whose other end is gone; none where it is the end, on
    the clock of `time.monotonic`, or was before.

    For the first seconds, so many as there is patience, it asks again and again, and gives way to
    who wants its core. end None: as long as it takes.
    """
    known = {one.fileno(): one for one in connections}
    asked = select.poll()
    for descriptor in known:
        asked.register(descriptor, select.POLLIN)
    soon = time.monotonic() + patience
    soon = soon if end is None else min(soon, end)
    while not (found := asked.poll(0)) and time.monotonic() < soon:
        os.sched_yield()
    if not found:
        found = asked.poll(None if end is None else max(0.0, end - time.monotonic()) * 1000)
    return {known[descriptor] for descriptor, _ in found}
