"""Progress bars over many runs, on a terminal and in a notebook."""

from __future__ import annotations

from typing import Any

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from fedshift.errors import visible
from fedshift.fitting.bars import NotebookProgress, for_bars


class LiveRuns:
    """On a terminal: a bar for all runs together, and one for each run under way."""

    def __init__(self) -> None:
        self.bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TimeElapsedColumn(),
            console=for_bars(),
        )
        self.whole = self.bars.add_task("runs", total=0)
        self.tasks: dict[str, Any] = {}

    def __call__(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "queue":
            self.bars.reset(self.whole, total=event["runs"])
        elif kind == "start":
            name, rounds = event["run"], event["rounds"]
            self.tasks[name] = self.bars.add_task(visible(name), total=rounds)
        elif kind == "round":
            self.bars.update(self.tasks[event["run"]], completed=event["round"])
        elif kind == "over":
            self.bars.remove_task(self.tasks.pop(event["run"]))
            self.bars.advance(self.whole)
            self.bars.console.print(end_line(event), markup=False, highlight=False)

    def __enter__(self) -> LiveRuns:
        self.bars.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.bars.stop()


def end_line(event: dict[str, Any]) -> str:
    """How a run ended, and after how long."""
    end = f"failed: {event['error']}" if event["error"] else "done"
    return f"{visible(event['run'])}: {end} ({event['seconds']:.0f} s)"


class NotebookRuns:
    """In a notebook's output: a bar for how many runs are over."""

    def __init__(self) -> None:
        self.bar, self.runs, self.over = NotebookProgress(), 0, 0

    def __call__(self, event: dict[str, Any]) -> None:
        if event["event"] == "queue":
            self.runs, self.over = event["runs"], 0
        elif event["event"] == "over":
            self.over += 1
        self.bar({"event": "round", "run": "runs", "round": self.over, "rounds": self.runs})
