"""Finding the run folders that a user names: one by one, by `sweep/*`, or by a folder of runs."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedshift.errors import DataError, InputError, shown
from fedshift.files import is_folder, read_object
from fedshift.record.folder import REPORT, has_run

# A comparison leaves a folder with its runs, and its table, which has their title and order.
RUNS, RESULTS = "runs", "results.json"
OURS = {
    REPORT, RESULTS, "compare.html", "table.md", "table.csv", "table.tex", "runs.csv",
}  # fmt: skip


@dataclass(frozen=True)
class Chosen:
    """Run folders in order.

    place     the folder for their page
    title     of the comparison that the runs belong to
    left_out  given paths that have no run, and are no page or table of earlier calls
    """

    folders: tuple[Path, ...]
    place: Path
    title: str | None = None
    left_out: tuple[str, ...] = ()


def choose(given: Sequence[Path]) -> Chosen:
    """The given run folders, and those inside given folders.

    Files and folders without a run are left out, since `sweep/*` also names earlier pages. Raises
    InputError if nothing is given, and DataError if no run is left or a path does not exist.
    """
    if not given:
        raise InputError("give at least one run folder")
    runs, left_out = dict[Path, None](), list[str]()
    for path in given:
        inside = _runs_in(path)
        runs |= dict.fromkeys(inside)
        if not inside:
            left_out += [shown(str(path), 200)] * (path.name not in OURS)
    if not runs:
        raise DataError(
            f"{shown(str(given[0]), 200)}: no run folder; give one that `fedshift run`, `fedshift "
            "compare` or fs.fit(..., folder=) has left"
        )
    folders = tuple(runs)
    alone = len(given) == 1
    place = given[0] if alone else folders[0] if len(folders) == 1 else given[0].parent
    return Chosen(folders, place, _table(folders[0].parent).get("title"), tuple(left_out))


def _runs_in(path: Path) -> list[Path]:
    if not is_folder(path):
        if not path.exists():
            raise DataError(f"no run folder {path}; `fedshift run FILE.toml` makes one")
        return []
    if has_run(path):
        return [path]
    try:
        inside = [one for one in sorted(path.iterdir()) if is_folder(one) and has_run(one)]
    except OSError as e:
        raise DataError(f"{path}: cannot be looked into: {e.strerror}") from None
    if not inside and is_folder(path / RUNS):
        return _runs_in(path / RUNS)
    rows = _table(path).get("runs", ())
    order = {row.get("run"): i for i, row in enumerate(rows) if isinstance(row, dict)}
    return sorted(inside, key=lambda one: order.get(one.name, len(order)))


def _table(runs: Path) -> dict[str, Any]:
    """The table beside the runs of a comparison; {} if there is none."""
    with contextlib.suppress(DataError):
        return read_object(runs.parent / RESULTS) if runs.name == RUNS else {}
    return {}
