"""Ctrl-C and SIGTERM while a run trains: finish the round, keep it, then end."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator

from fedshift.cli.loading import INTERRUPTED, TERMINATED, wants_json
from fedshift.experiments.progress import Asked

CODES = {signal.SIGINT: INTERRUPTED, signal.SIGTERM: TERMINATED}


@contextlib.contextmanager
def asked_to_stop() -> Iterator[Asked]:
    """The exit code of the first Ctrl-C or SIGTERM, None before; a second one ends at once."""
    heard: list[int] = []

    def hear(number: int, frame: object) -> None:
        if heard:
            raise KeyboardInterrupt(CODES[signal.Signals(number)])
        heard.append(CODES[signal.Signals(number)])
        if not wants_json(sys.argv):
            # Not `print`: the signal may have come in the middle of one. Nobody need hear it.
            with contextlib.suppress(OSError):
                os.write(2, b"stopping after this round; once more stops at once\n")

    before = {number: signal.signal(number, hear) for number in CODES}
    try:
        yield lambda: heard[0] if heard else None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
