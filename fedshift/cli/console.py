"""Progress, tables and errors. Results go to stdout, everything else to stderr."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from typing import Any, TextIO, cast

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from fedshift.errors import FedshiftError, visible
from fedshift.report.tables import Table as ReportTable
from fedshift.report.tables import shown

Cell = str | float | int | None


def percent(value: float | None, digits: int = 1) -> str:
    """A fraction as percent; a dash for None and NaN."""
    # value != value is true of NaN alone, of which JSON files make None.
    return "–" if value is None or value != value else f"{100 * value:.{digits}f}"


def width() -> int:
    """Columns for text: $COLUMNS, or the terminal's, or 100."""
    return max(40, shutil.get_terminal_size((100, 24)).columns)


def put(text: str) -> None:
    """A line on stdout."""
    print(visible(text))


def say(text: str, indent: int = 2) -> None:
    """A paragraph on stdout, wrapped; all lines but the first are indented."""
    print(
        textwrap.fill(
            # Hyphens and long words stay whole: they are often names and paths to be copied.
            visible(text), width(), subsequent_indent=" " * indent,
            break_long_words=False, break_on_hyphens=False,
        )
    )  # fmt: skip


def warn_of_data_folders() -> None:
    """Warn on stderr of folders in $FEDSHIFT_DATA that cannot be searched, a line per reason."""
    # This import loads torch; every caller reads data next and needs it anyway.
    from fedshift.datasets.base import named_folders, unsearchable

    by_reason: dict[str, list[str]] = {}
    for folder in named_folders():
        if why := unsearchable(folder):
            by_reason.setdefault(why, []).append(str(folder))
    for why, folders in by_reason.items():
        tell(f"warning: $FEDSHIFT_DATA: {why}: {', '.join(folders)}")


def show_json(value: Any) -> None:
    """One JSON document on stdout."""
    print(json.dumps(value, indent=1))


def show_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table on stdout; columns after the first are right-aligned."""
    table = Table(title=Text(visible(title), style="bold"), title_justify="left")
    for i, name in enumerate(header):
        table.add_column(_cell(name), justify="left" if i == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(_cell, row))
    # Captured and printed, so that a closed pipe is met by `print` as everywhere else.
    console = Console(width=width())
    with console.capture() as output:
        console.print(table)
    print(output.get(), end="")


def _cell(text: str) -> Text:
    """Literal text: rich would read "[red]" as a colour, and ":cat:" as a picture."""
    return Text(visible(text))


def show_report_table(table: ReportTable) -> None:
    """A report's table on stdout, with its own number formats."""
    show_table(table.caption, table.header, shown(table))


def tell(text: str) -> None:
    """A line on stderr: progress and everything that is not a result."""
    with _ignore_write_errors(sys.stderr):
        print(visible(text), file=sys.stderr, flush=True)


@contextlib.contextmanager
def _ignore_write_errors(stream: TextIO) -> Iterator[None]:
    """Go on silently if the reader is gone (`| tee`, a closed connection) or the disk is full."""
    try:
        yield
    except OSError:
        # Everything that is written later goes nowhere, without another error.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


class _Stderr:
    """stderr for rich's drawings, which come from rounds and from a thread of rich.

    It keeps the present stream: while bars are drawn, rich replaces sys.stderr.
    """

    def __init__(self) -> None:
        self.stream = sys.stderr

    def write(self, text: str) -> int:
        with _ignore_write_errors(self.stream):
            self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        with _ignore_write_errors(self.stream):
            self.stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def for_bars() -> Console:
    """The console for progress bars; a closed terminal does not end the run."""
    return Console(file=cast(TextIO, _Stderr()))


def show_error(error: FedshiftError, as_json: bool) -> None:
    """The message on stderr: text, or one JSON object with its exit code."""
    if as_json:
        tell(json.dumps({"error": str(error), "exit_code": error.exit_code}))
    else:
        # Line by line: `tell` makes control characters visible, and would join the lines.
        for line in f"error: {error}".split("\n"):
            tell(line)


class PlainProgress:
    """A line when a run starts, one about every ten seconds, and one when it ends."""

    def __init__(self) -> None:
        self.last = time.monotonic()
        self.rounds: dict[str, int] = {}
        self.seen: dict[str, str] = {}

    def __call__(self, event: dict[str, Any]) -> None:
        run = event["run"]
        if event["event"] == "start":
            self.rounds[run] = event["rounds"]
            tell(f"{run}: {counted(event['rounds'], 'round')}")
        elif event["event"] == "evaluation":
            self.seen[run] = _scores(event)
            # The evaluation of the last round is a run's last event.
            if event["round"] == self.rounds[run]:
                tell(f"{run}: done  {self.seen[run]}")
        # The last round is followed at once by its evaluation, which has a line of its own.
        elif event["round"] < event["rounds"] and time.monotonic() - self.last > 10:
            self.last = time.monotonic()
            where = f"{run}: round {event['round']}/{event['rounds']}"
            tell("  ".join([where, *filter(None, [self.seen.get(run)])]))


class LiveProgress:
    """One bar per run on a terminal, with loss and accuracies as they come."""

    def __init__(self, console: Console | None = None) -> None:
        target = console or for_bars()
        self.bars = Progress(
            SpinnerColumn(),
            TextColumn("{task.description:<16}", markup=False),
            # 72 columns are taken by the run's name, its rounds, the time and the scores.
            BarColumn(bar_width=max(6, min(24, target.width - 72))),
            TextColumn("{task.completed:>4.0f}/{task.total:.0f}"),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[scores]}", markup=False),
            console=target,
        )
        self.tasks: dict[str, Any] = {}

    def __call__(self, event: dict[str, Any]) -> None:
        run = event["run"]
        if event["event"] == "start":
            self.tasks[run] = self.bars.add_task(visible(run), total=event["rounds"], scores="")
        elif event["event"] == "round":
            self.bars.update(self.tasks[run], completed=event["round"])
        elif event["event"] == "evaluation":
            self.bars.update(self.tasks[run], scores=_scores(event))


@contextlib.contextmanager
def progress() -> Iterator[PlainProgress | LiveProgress]:
    """Bars on a terminal, plain lines elsewhere."""
    if not sys.stderr.isatty():
        yield PlainProgress()
        return
    live = LiveProgress()
    with live.bars:
        yield live


def _scores(event: dict[str, Any]) -> str:
    names = {"target": "target_accuracy", "est.": "estimated_accuracy"}
    if "system_accuracy" in event:
        names = {"system": "system_accuracy", "own": "average_accuracy"}
    scores = [f"{name} {percent(event[key])}%" for name, key in names.items()]
    return " ".join([f"loss {event['train_loss']:.3f}", *scores])


def counted(number: int, thing: str) -> str:
    """As in "1 round", "2 rounds"."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"
