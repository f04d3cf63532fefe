"""Progress of many runs: bars on a terminal, lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any

from fedshift.cli.console import counted, tell
from fedshift.fitting.many_bars import LiveRuns, end_line

# Seconds between two lines on a run, without a terminal.
BETWEEN = 30


def progress_of_runs() -> PlainRuns | LiveRuns:
    """A listener for the events of `fedshift.sweeps.execute.execute`, as a context manager."""
    return LiveRuns() if sys.stderr.isatty() else PlainRuns()


class PlainRuns:
    """A line when a run begins, is resumed or ends, and one every half minute."""

    def __init__(self) -> None:
        self.total = self.over = 0
        self.rounds: dict[str, int] = {}
        self.last: dict[str, float] = {}

    def __call__(self, event: dict[str, Any]) -> None:
        if event["event"] == "queue":
            self.total, self.over = event["runs"], 0
            tell(f"{counted(event['runs'], 'run')} to do, {event['complete']} complete")
        elif event["event"] == "start":
            self.rounds[event["run"]] = event["rounds"]
            tell(f"{event['run']}: {counted(event['rounds'], 'round')}")
        elif event["event"] == "round":
            self._round(event["run"], event["round"])
        elif event["event"] == "over":
            self.over += 1
            tell(f"[{self.over}/{self.total}] {end_line(event)}")

    def _round(self, run: str, t: int) -> None:
        now, resumed = time.monotonic(), t > 1 and run not in self.last
        if resumed or now - self.last.setdefault(run, now) > BETWEEN:
            self.last[run] = now
            tell(f"{run}: {'goes on with ' * resumed}round {t}/{self.rounds[run]}")

    def __enter__(self) -> PlainRuns:
        return self

    def __exit__(self, *exc: object) -> None:
        pass
