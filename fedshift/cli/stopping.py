"""Ctrl-C and SIGTERM while a run trains: finish the round, write a checkpoint, then end."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator

from fedshift.cli.loading import INTERRUPTED, TERMINATED, wants_json
from fedshift.experiments.folder.progress import Asked

CODES = {signal.SIGINT: INTERRUPTED, signal.SIGTERM: TERMINATED}


@contextlib.contextmanager
def asked_to_stop() -> Iterator[Asked]:
    """A function that gives the exit code of the first Ctrl-C or SIGTERM, and None before.

    A second signal ends the process at once.
    """
    received: list[int] = []

    def receive(number: int, frame: object) -> None:
        if received:
            raise KeyboardInterrupt(CODES[signal.Signals(number)])
        received.append(CODES[signal.Signals(number)])
        if not wants_json(sys.argv):
            # Not `print`, since the signal may have interrupted a print. A closed terminal is no
            # reason to fail.
            with contextlib.suppress(OSError):
                os.write(2, b"stopping after this round; once more stops at once\n")

    before = {number: signal.signal(number, receive) for number in CODES}
    try:
        yield lambda: received[0] if received else None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
