"""Progress, tables and errors. Results go to stdout, all else to stderr."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from fedshift.errors import FedshiftError
from fedshift.report.tables import Table as ReportTable
from fedshift.report.tables import shown

Cell = str | float | int | None


def percent(value: float | None, digits: int = 1) -> str:
    """A fraction as percent; a dash where there is none."""
    return "–" if value is None or value != value else f"{100 * value:.{digits}f}"


def show_json(value: Any) -> None:
    """One JSON document on stdout."""
    print(json.dumps(value, indent=1))


def show_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table on stdout; columns after the first are right-aligned."""
    table = Table(title=title, title_justify="left", title_style="bold")
    for i, name in enumerate(header):
        table.add_column(name, justify="left" if i == 0 else "right")
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 110, soft_wrap=False).print(table)


def show_report_table(table: ReportTable) -> None:
    """A report's table on stdout, with its own number formats."""
    show_table(table.caption, table.header, shown(table))


def show_error(error: FedshiftError, as_json: bool) -> None:
    """The message on stderr: text, or one JSON object with its exit code."""
    if as_json:
        print(json.dumps({"error": str(error), "exit_code": error.exit_code}), file=sys.stderr)
    else:
        print(f"error: {error}", file=sys.stderr)


class PlainProgress:
    """A line when a run starts, and one about every ten seconds and at its end."""

    def __init__(self) -> None:
        self.last = time.monotonic()
        self.seen: dict[str, str] = {}

    def __call__(self, event: dict[str, Any]) -> None:
        run = event["run"]
        if event["event"] == "start":
            print(f"{run}: {event['rounds']} rounds", file=sys.stderr, flush=True)
        elif event["event"] == "evaluation":
            self.seen[run] = _scores(event)
        elif event["event"] == "round":
            over = event["round"] == event["rounds"]
            if not over and time.monotonic() - self.last > 10:
                self.last = time.monotonic()
                done = f"{run}: round {event['round']}/{event['rounds']}"
                print(f"{done}  {self.seen.get(run, '')}", file=sys.stderr, flush=True)

    def __enter__(self) -> PlainProgress:
        return self

    def __exit__(self, *exc: object) -> None:
        for run, scores in self.seen.items():
            print(f"{run}: {scores}", file=sys.stderr, flush=True)


class LiveProgress:
    """One bar per run on a terminal, with loss and accuracies as they come."""

    def __init__(self) -> None:
        self.bars = Progress(
            SpinnerColumn(),
            TextColumn("{task.description:<22}"),
            BarColumn(bar_width=24),
            TextColumn("{task.completed:>4.0f}/{task.total:.0f}"),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[scores]}"),
            console=Console(stderr=True),
        )
        self.tasks: dict[str, Any] = {}

    def __call__(self, event: dict[str, Any]) -> None:
        run = event["run"]
        if event["event"] == "start":
            self.tasks[run] = self.bars.add_task(run, total=event["rounds"], scores="")
        elif event["event"] == "round":
            self.bars.update(self.tasks[run], completed=event["round"])
        elif event["event"] == "evaluation":
            self.bars.update(self.tasks[run], scores=_scores(event))

    def __enter__(self) -> LiveProgress:
        self.bars.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.bars.stop()


def progress() -> PlainProgress | LiveProgress:
    """Bars on a terminal, plain lines elsewhere."""
    return LiveProgress() if sys.stderr.isatty() else PlainProgress()


def _scores(event: dict[str, Any]) -> str:
    return (
        f"loss {event['train_loss']:.3f}  target {percent(event['target_accuracy'])} %  "
        f"estimated {percent(event['estimated_accuracy'])} %"
    )
