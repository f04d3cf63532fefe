"""Progress of many runs: bars on a terminal, and in a notebook."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from html import escape
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from fedshift.errors import visible
from fedshift.fitting.bars import for_bars, in_notebook


class LiveRuns:
    """On a terminal: a bar for all runs, and one for each under way."""

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
            self.tasks[event["run"]] = self.bars.add_task(event["run"], total=event["rounds"])
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
    return f"{event['run']}: {end} ({event['seconds']:.0f} s)"


class NotebookRuns:
    """In a notebook's output: how many runs are over, and how far those under way are."""

    def __init__(self) -> None:
        from IPython.display import HTML, display  # type: ignore[import-not-found]

        self.html = HTML
        self.handle = display(HTML(""), display_id=True)
        self.over = self.total = 0
        self.active: dict[str, tuple[int, int]] = {}

    def __call__(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "queue":
            self.over, self.total = 0, event["runs"]
        elif kind == "start":
            self.active[event["run"]] = 0, event["rounds"]
        elif kind == "round":
            self.active[event["run"]] = event["round"], self.active[event["run"]][1]
        elif kind == "over":
            self.active.pop(event["run"])
            self.over += 1
        lines = [("runs", self.over, self.total), *((k, *v) for k, v in self.active.items())]
        self.handle.update(self.html("<br>".join(_line(*line) for line in lines)))


def _line(name: str, done: int, most: int) -> str:
    return (
        f'{escape(visible(name))} <progress value="{done}" max="{most}"></progress> {done}/{most}'
    )


@contextlib.contextmanager
def shown_runs(wanted: bool | None) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A listener that draws; None: on a terminal and in a notebook, else nothing."""
    if in_notebook() and wanted is not False:
        yield NotebookRuns()
    elif wanted or (wanted is None and sys.stderr.isatty()):
        with LiveRuns() as live:
            yield live
    else:
        yield lambda event: None
