"""Spin briefly, then block, while waiting for another local process."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

# Seconds of spinning. Waking a blocked process takes time, most of all on virtual machines, and
# delays the process that wakes it as well. In a round of 7 ms (W3 of results/benchmarks.md) that
# shows. 3 ms are longer than the pause between two such rounds, and little in a round of large
# models.
SPIN = 0.003


def spin_seconds() -> float:
    """Seconds to spin."""
    return SPIN


def wait_for(
    connections: Sequence[Connection], end: float | None, patience: float = 0.0
) -> set[Connection]:
    """Wait for connections that have something to read, or whose other end is gone.

    Empty if there is none by `end` (on the clock of `time.monotonic`; None: no limit). patience:
    seconds to spin before blocking.
    """
    by_descriptor = {one.fileno(): one for one in connections}
    asked = select.poll()
    for descriptor in by_descriptor:
        asked.register(descriptor, select.POLLIN)
    soon = time.monotonic() + patience
    soon = soon if end is None else min(soon, end)
    while not (ready := asked.poll(0)) and time.monotonic() < soon:
        os.sched_yield()  # so that spinning never takes a core from a process that has work
    if not ready:
        ready = asked.poll(None if end is None else max(0.0, end - time.monotonic()) * 1000)
    return {by_descriptor[descriptor] for descriptor, _ in ready}
