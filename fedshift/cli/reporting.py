"""`fedshift report`: the page and the figures of run folders."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from fedshift.cli import console
from fedshift.errors import InputError
from fedshift.files import check_page, write
from fedshift.record.choosing import choose
from fedshift.record.folder import REPORT, RunResult, read_any
from fedshift.report.figures import save_figures
from fedshift.report.page import page

# Seconds between two lines on how many folders have been read.
BETWEEN = 3.0


def report_asked(
    given: Sequence[Path], out: Path | None, figures: Path | None, *, as_json: bool
) -> None:
    """Draw the report that was asked for, and print where it is."""
    if out is not None:  # before many folders are read
        check_page(_page_in(out))
    chosen = choose(given)
    if chosen.left_out:
        console.tell(f"note: no run folder, so left out: {_some(chosen.left_out)}")
    target = _page_in(chosen.place if out is None else out)
    check_page(target)
    runs = [read_any(folder) for folder in _counted(chosen.folders)]
    write(target, page(runs, title=chosen.title))
    drawn: list[str] = []
    if figures is not None:
        complete = [run for run in runs if isinstance(run, RunResult)]
        if not complete:
            raise InputError("--figures needs a complete run, and none of these is; leave it out")
        drawn = [str(path) for path in save_figures(complete, figures)]
    if as_json:
        console.show_json({"report": str(target), "figures": drawn})
    else:
        for path in (str(target), *drawn):
            console.put(path)


def _counted(folders: Sequence[Path]) -> Iterator[Path]:
    """The folders; if reading them takes long, lines on stderr say how many have been read."""
    spoken = time.monotonic()
    for i, folder in enumerate(folders):
        if time.monotonic() - spoken > BETWEEN:
            spoken = time.monotonic()
            console.tell(f"read {i} of {len(folders)} run folders")
        yield folder


def _page_in(place: Path) -> Path:
    # os.path does not raise: other errors of the file system show when the page is written.
    return place / REPORT if os.path.isdir(place) else place


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more
