"""Ctrl-C while libraries load. This is loaded first, so it imports the standard library only."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise

from fedshift.cli.log_lines import log_line

INTERRUPTED, TERMINATED = 130, 143


def wants_json(arguments: Sequence[str], option: str = "--format") -> bool:
    """Whether a command line asks for `--format json`."""
    # Parsed by hand, because the answer is needed before typer is loaded, and if that fails.
    return f"{option}=json" in arguments or (option, "json") in pairwise(arguments)


def failure_line(arguments: Sequence[str], why: str, code: int) -> str | None:
    """A failure as a JSON object, if the command line asks for JSON; else None."""
    if wants_json(arguments, "--log-format"):
        return log_line("failed", "error", error=why, exit_code=code)
    return json.dumps({"error": why, "exit_code": code}) if wants_json(arguments) else None


def stop_line(arguments: Sequence[str], why: str, code: int) -> str | None:
    """The line for a command that a signal ended; in a JSON log this is no failure."""
    if wants_json(arguments, "--log-format"):
        return log_line("stopped", message=why, exit_code=code)
    return failure_line(arguments, why, code)


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Within the block, SIGINT and SIGTERM end the process at once, with a message and exit code.

    An exception would do harm here: while they are loaded, torch aborts on one, and numpy cannot be
    loaded a second time. Nothing has been written yet that would have to be cleaned up.
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
