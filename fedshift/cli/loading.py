"""Ctrl-C while libraries load. Imports the standard library only, since it comes first."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise

from fedshift.deploy.logs import log_line

INTERRUPTED, TERMINATED = 130, 143


def wants_json(arguments: Sequence[str], option: str = "--format") -> bool:
    """Whether a command line asks for `--format json`."""
    # By hand: the answer is needed before typer is loaded, and where it fails.
    return f"{option}=json" in arguments or (option, "json") in pairwise(arguments)


def failure_line(arguments: Sequence[str], why: str, code: int) -> str | None:
    """A failure as one JSON object, where the command line asks for such; else None."""
    if wants_json(arguments, "--log-format"):
        return log_line("failed", "error", error=why, exit_code=code)
    return json.dumps({"error": why, "exit_code": code}) if wants_json(arguments) else None


def stop_line(arguments: Sequence[str], why: str, code: int) -> str | None:
    """What says that a signal has ended the command: in a log of JSON that is no failure."""
    if wants_json(arguments, "--log-format"):
        return log_line("stopped", message=why, exit_code=code)
    return failure_line(arguments, why, code)


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """SIGINT and SIGTERM end the process at once, with one message and the usual exit code.

    Nothing is written yet that would have to be put in order, and extension modules do not survive
    an exception in the middle of being loaded: torch aborts, numpy cannot be loaded a second time.
    """

    def leave(number: int, frame: object) -> None:
        code = TERMINATED if number == signal.SIGTERM else INTERRUPTED
        line = stop_line(sys.argv, "interrupted", code) or "interrupted"
        os.write(2, f"{line}\n".encode())
        os._exit(code)

    before = {one: signal.signal(one, leave) for one in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
