"""How much memory this process holds and has held, on Linux."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
from collections.abc import Callable
from pathlib import Path

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def _field(name: str) -> int:
    for line in STATUS.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"no {name} in {STATUS}: these figures need Linux")


def resident() -> int:
    """Bytes in memory now."""
    return _field("VmRSS")


def forget_peak() -> None:
    """Hand back what is free, and count the peak from here on."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    RESET.write_text("5")


def peak() -> int:
    """The most bytes in memory since `forget_peak`, or since the process began."""
    return _field("VmHWM")


def taken_by(what: Callable[[], object]) -> int:
    """The most bytes that a call takes beyond what is there, tried in a copy of this process.

    A copy, so that what an earlier call left free in the heap does not count as given.
    """
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        forget_peak()
        before = resident()
        what()
        os.write(write, json.dumps(peak() - before).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    if not text:
        raise SystemExit("the process that measured memory was ended")
    return int(json.loads(text))
