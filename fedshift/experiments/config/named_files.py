"""Paths of files that an experiment names: relative to its file, and to the folder of a run.

A run folder has paths relative to itself, so a project can be moved as a whole.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedshift.errors import DataError
from fedshift.experiments.config.python_names import (
    NATURAL,
    PYTHON,
    SITES,
    TABLES,
    digest_of,
    is_python,
)
from fedshift.files import is_file, read_object
from fedshift.record.folder import EVENTS, LOCK

_KEYS = (
    ("data", "source"), ("data", "index"), ("data", "target"), ("model", "name"),
    ("model", "weights"), ("method", "name"),
)  # fmt: skip


def with_paths(tables: Mapping[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    """A copy of an experiment's tables with `change` applied to the path of every file."""

    def changed(text: str) -> str:
        if not is_python(text):
            return change(text)
        file, _, name = text.rpartition(":")
        return f"{change(file)}:{name}"

    made = {k: dict(v) if isinstance(v, Mapping) else v for k, v in tables.items()}
    for section, key in _KEYS:
        table = made.get(section)
        value = table.get(key) if isinstance(table, dict) else None
        if isinstance(value, str) and _is_path(key, value):
            made[section][key] = changed(value)
    metrics = made.get("metrics")
    extra = metrics.get("extra") if isinstance(metrics, dict) else None
    if isinstance(extra, list | tuple):
        names = [changed(v) if isinstance(v, str) and is_python(v) else v for v in extra]
        made["metrics"]["extra"] = type(extra)(names)
    return made


def _is_path(key: str, value: str) -> bool:
    if key in ("index", "weights"):
        return value != ""  # "" is refused later; as a path it would be the folder itself
    if key == "target":
        return value.lower().endswith(TABLES)
    return is_python(value) or (key == "source" and value not in ("", PYTHON, NATURAL, SITES))


def placed(text: str, folder: Path) -> str:
    """The absolute path of a file that is named relative to a folder.

    If a run folder was moved without the file, the file is looked for from the folder's old place.
    """
    path = os.path.abspath(os.path.join(os.path.realpath(folder), os.path.expanduser(text)))
    if not os.path.lexists(path) and (before := _place_before(folder)):
        then = os.path.abspath(os.path.join(before, text))
        return then if os.path.lexists(then) else path
    return path


def relative(path: str, folder: Path) -> str:
    """A path as a run folder has it: relative, or absolute if both share nothing but the root."""
    place = os.path.realpath(folder)
    path = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
    try:
        shared = os.path.commonpath([place, path])
    except ValueError:  # on two drives of Windows
        return path
    return path if os.path.dirname(shared) == shared else os.path.relpath(path, place)


def check_files(folder: Path, ending: str = "") -> None:
    """Raise DataError for a user's file that was changed or deleted since a run began.

    folder: the run's; ending: check only files with this ending. To be called before any Python in
    them is run.
    """
    files = read_object(folder / LOCK).get("files") if is_file(folder / LOCK) else None
    for name, digest in files.items() if isinstance(files, dict) else ():
        path = placed(name, folder)
        now = digest_of(Path(path))
        if path.endswith(ending) and now != digest:
            what = "is not there, and was" if now is None else "is not what it was"
            raise DataError(
                f"{folder}: {path} {what} when the run began; put it back, or start a new run"
            )


def _place_before(folder: Path) -> str:
    """Where a run folder was when it was last trained in; "" if its events do not say."""
    try:
        lines = (folder / EVENTS).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    for line in reversed(lines):
        if '"start"' in line:
            try:
                return str(json.loads(line).get("folder", ""))
            except (ValueError, AttributeError, RecursionError):
                continue
    return ""
