"""Printing progress, tables and errors. Results go to stdout, everything else to stderr."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedshift.cli.loading import failure_line
from fedshift.errors import FedshiftError, visible
from fedshift.fitting.bars import LiveProgress as LiveProgress
from fedshift.fitting.bars import for_bars as for_bars
from fedshift.fitting.bars import ignore_write_errors, of_round, scores_in
from fedshift.fitting.bars import percent as percent
from fedshift.record.drops import news_text
from fedshift.report.tables import Table as ReportTable
from fedshift.report.tables import shown

Cell = str | float | int | None


def width() -> int:
    """The width of text in columns: $COLUMNS, or the terminal's width, or 100."""
    return max(40, shutil.get_terminal_size((100, 24)).columns)


def put(text: str) -> None:
    """Print a line on stdout."""
    print(visible(text))


def say(text: str, indent: int = 2) -> None:
    """Print a paragraph on stdout, wrapped; all lines but the first are indented."""
    print(
        textwrap.fill(
            # Hyphens and long words are not broken: they are often names and paths to copy.
            visible(text), width(), subsequent_indent=" " * indent,
            break_long_words=False, break_on_hyphens=False,
        )
    )  # fmt: skip


def warn_of_data_folders() -> None:
    """Warn on stderr of folders in $FEDSHIFT_DATA that cannot be searched, a line per reason."""
    # This import loads torch, which all callers need next to read data.
    from fedshift.datasets.base import named_folders, unsearchable

    by_reason: dict[str, list[str]] = {}
    for folder in named_folders():
        if why := unsearchable(folder):
            by_reason.setdefault(why, []).append(str(folder))
    for why, folders in by_reason.items():
        tell(f"warning: $FEDSHIFT_DATA: {why}: {', '.join(folders)}")


def tell_dropped(method: str, options: Sequence[str]) -> None:
    """Name on stderr the options in the file that the method of `-c method.name` does not have."""
    if options:
        names = ", ".join(f"method.{option}" for option in options)
        tell(f"note: {method} has no {names}; what the file says of that is left out")


def show_json(value: Any) -> None:
    """Print a JSON document on stdout."""
    print(json.dumps(value, indent=1))


def show_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table on stdout; columns after the first are right-aligned."""
    table = Table(title=Text(visible(title), style="bold"), title_justify="left")
    for i, name in enumerate(header):
        table.add_column(_cell(name), justify="left" if i == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(_cell, row))
    # Captured and then printed, so that a closed pipe raises in `print`, as everywhere else.
    console = Console(width=width())
    with console.capture() as output:
        console.print(table)
    print(output.get(), end="")


def _cell(text: str) -> Text:
    """Literal text: rich would read "[red]" as a colour, and ":cat:" as a picture."""
    return Text(visible(text))


def show_report_table(table: ReportTable) -> None:
    """Print a report's table on stdout, with its own number formats."""
    show_table(table.caption, table.header, shown(table))


def tell(text: str) -> None:
    """Print a line on stderr: progress and everything that is not a result."""
    with ignore_write_errors(sys.stderr):
        print(visible(text), file=sys.stderr, flush=True)


def show_error(error: FedshiftError, arguments: Sequence[str]) -> None:
    """Print an error on stderr, as text or, if the arguments ask for it, as a JSON object."""
    if line := failure_line(arguments, str(error), error.exit_code):
        tell(line)
    else:
        # Line by line, because `tell` would show line breaks as visible characters.
        for line in f"error: {error}".split("\n"):
            tell(line)


class PlainProgress:
    """A line when a run starts, one about every ten seconds, and one when it ends.

    each: a line for every round instead.
    """

    def __init__(self, *, each: bool = False) -> None:
        self.each = each
        self.last = time.monotonic()
        self.rounds: dict[str, int] = {}
        self.seen: dict[str, dict[str, Any]] = {}

    def __call__(self, event: dict[str, Any]) -> None:
        run = event["run"]
        if event["event"] == "start":
            self.rounds[run] = event["rounds"]
            tell(f"{run}: {counted(event['rounds'], 'round')}")
        elif line := news_text(event):
            tell(f"{run}: {line}")
        elif event["event"] == "evaluation":
            self.seen[run] = event
            # The evaluation of the last round is the last event of a run.
            if event["round"] == self.rounds[run]:
                tell(f"{run}: done  {scores_in(event)}")
        elif event["event"] == "round" and (self.each or self._due(event)):
            where = f"{run}: round {event['round']}/{event['rounds']}"
            why = f"skipped: {event['skipped']}" if event.get("skipped") else ""
            tell(f"{where}  {why or of_round(event, self.seen.get(run, {}))}")

    def _due(self, event: Mapping[str, Any]) -> bool:
        """Whether a line is due; never for the last round, whose evaluation gets one."""
        if event["round"] == event["rounds"] or time.monotonic() - self.last <= 10:
            return False
        self.last = time.monotonic()
        return True


@contextlib.contextmanager
def progress() -> Iterator[PlainProgress | LiveProgress]:
    """Bars on a terminal, plain lines elsewhere."""
    if not sys.stderr.isatty():
        yield PlainProgress()
        return
    with LiveProgress() as live:
        yield live


def counted(number: int, thing: str) -> str:
    """A number with its noun: "1 round", "2 rounds"."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"
