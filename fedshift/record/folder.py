"""A run folder: the names of its files, and how to read them all."""

from __future__ import annotations

import contextlib
import json
import os
import re
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from fedshift.errors import DataError, shown
from fedshift.files import is_file, is_folder, read_object
from fedshift.record.drops import Drop
from fedshift.record.events import Course, Events, read_events
from fedshift.record.rounds import (
    REDO,
    ROUND_COLUMNS,
    SERVED_COLUMNS,
    Client,
    Confusion,
    Round,
    read_clients,
    read_confusion,
    read_rounds,
)
from fedshift.record.summary import Summary, parsed

# What lock.json says of a run folder; any other belongs to another version.
FORMAT = 1
CONFIG, LOCK, EVENTS = "config.resolved.toml", "lock.json", "events.jsonl"
METRICS, SERVED, CLIENTS = "metrics.csv", "served.csv", "clients.csv"
CONFUSION, CORRECTED = "confusion.csv", "corrected.csv"
MODEL, SUMMARY, REPORT = "model.safetensors", "summary.json", "report.html"
# The refits of a router, for methods that train one.
ROUTER = "router.safetensors"
# For runs on the user's own data: how rows became inputs, and more facts for `fedshift.load`.
ENCODING, FIT = "encoding.json", "fit.json"
# Files and folders of some runs only, or only while a run trains.
CHECKPOINTS, CANDIDATES, PROFILE, DIVERGED, DEPLOYED = (
    "checkpoints", "candidates", "profile.json", "diverged.json", "deployment.json",
)  # fmt: skip


# The variable in which processes of a federation find the command that serves it.
SERVING = "FEDSHIFT_SERVING"


@dataclass(frozen=True)
class RunResult:
    """All of a run folder that a report shows.

    served     the rows of served.csv
    seconds    the duration of each round; {} if events.jsonl is missing or damaged
    fit        fit.json of a run of `fedshift.fit`
    confusion  {} where it is not counted
    dropped    by round, the clients that dropped out of it or sent no scores after it
    deployed   deployment.json of a run on real machines
    """

    folder: Path
    summary: Summary
    rounds: tuple[Round, ...]
    clients: tuple[Client, ...]
    lock: Mapping[str, Any]
    config: str
    served: tuple[Round, ...] = ()
    seconds: Mapping[int, float] = field(default_factory=dict)
    fit: Mapping[str, Any] = field(default_factory=dict)
    confusion: Confusion = field(default_factory=dict)
    dropped: Mapping[int, tuple[Drop, ...]] = field(default_factory=dict)
    deployed: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Begun:
    """A run that is not complete, as far as it got; state: how far, in words."""

    folder: Path
    name: str
    method: str
    dataset: str
    rounds: tuple[Round, ...]
    lock: Mapping[str, Any]
    config: str
    seconds: Mapping[int, float]
    fit: Mapping[str, Any]
    state: str
    dropped: Mapping[int, tuple[Drop, ...]] = field(default_factory=dict)
    deployed: Mapping[str, Any] = field(default_factory=dict)


def has_run(folder: Path) -> bool:
    """Whether a folder has the files of a run, complete or not."""
    return any(is_file(folder / name) for name in (SUMMARY, CONFIG))


def read_any(folder: Path) -> RunResult | Begun:
    """The run in a folder. Raises DataError if there is none, or if one of its files is damaged."""
    if not os.path.lexists(folder / SUMMARY) and is_folder(folder) and is_file(folder / CONFIG):
        return _begun(folder)
    return read_run(folder)


def _config(path: Path) -> tuple[str, Mapping[str, Any]]:
    """The configuration as text, and its tables."""
    text = _text(path)
    try:
        tables = tomllib.loads(text)
    except (ValueError, RecursionError) as e:
        raise DataError(f"{path}: {shown(str(e), 200)}; {REDO}") from None
    if not isinstance(tables.get("seeds", {}), dict):
        raise DataError(f"{path}: a table of seeds is needed; {REDO}")
    return text, tables


def _begun(folder: Path) -> Begun:
    config, tables = _config(folder / CONFIG)
    try:
        name, method, data = (str(of["name"]) for of in (tables, tables["method"], tables["data"]))
    except (LookupError, TypeError) as e:
        raise DataError(f"{folder / CONFIG}: {shown(str(e), 200)}; {REDO}") from None
    events = _events(folder)
    course = events.course()
    stopped, last = events.stopped, max(course.rows, default=0)
    # If training diverges, a run of a table leaves this file instead of a summary.
    if is_file(folder / DIVERGED):
        stopped = (
            f"training diverged: {shown(str(read_object(folder / DIVERGED).get('error')), 300)}"
        )
    state = f"stopped after round {last} of {course.of}: {stopped}"
    if not stopped:
        state = f"not complete, round {last} of {course.of}: it is still going on, or was killed"
    lock = _lock(folder / LOCK) if is_file(folder / LOCK) else {}
    return Begun(
        folder,
        name,
        method,
        data,
        course.rounds,
        lock,
        config,
        course.seconds,
        fit_of(folder),
        state,
        course.missing,
        deployed_of(folder),
    )


def _confusion(folder: Path, summary: Summary) -> Confusion:
    path = folder / CONFUSION
    if not is_file(path):
        return {}
    counts = read_confusion(path, _text(path), summary.classes)
    totals = Counter[int]()
    for (true, _), n in counts.items():
        totals[true] += n
    for k, recall in enumerate(summary.final.target_recall):
        right = counts.get((k, k), 0) / totals[k] if totals[k] else -1.0
        if abs(right - (-1.0 if recall is None else recall)) > 1e-9:
            differs = f'recall of class "{shown(summary.classes[k])}" differs from summary.json'
            raise DataError(f"{path}: {differs}; {REDO}")
    return counts


def fit_of(folder: Path) -> Mapping[str, Any]:
    """fit.json, with facts on data and network; {} if the file is missing or damaged."""
    # A report uses it for words only, and can do without.
    with contextlib.suppress(DataError):
        return read_object(folder / FIT) if is_file(folder / FIT) else {}
    return {}


def deployed_of(folder: Path) -> Mapping[str, Any]:
    """deployment.json; {} for a run in one process. Raises DataError if it is damaged."""
    return read_object(folder / DEPLOYED) if is_file(folder / DEPLOYED) else {}


def _events(folder: Path) -> Events:
    return read_events(folder / EVENTS) if is_file(folder / EVENTS) else Events()


def read_run(folder: Path) -> RunResult:
    """The run in `folder`.

    Raises `DataError`, with the file and the place in it, when the folder or one of
    summary.json, metrics.csv, clients.csv, lock.json and config.resolved.toml (and served.csv where
    clients serve models of their own) is missing, cannot be parsed, lacks a field or contradicts
    another file on the classes or the clients.
    """
    if not is_folder(folder):
        raise DataError(f"no run folder {folder}; `fedshift run FILE.toml` makes one")
    summary = _summary(folder / SUMMARY)
    path = folder / CLIENTS
    clients = read_clients(path, _text(path), summary.classes)
    _agree(path, summary, clients)
    lock = _lock(folder / LOCK)
    config, _ = _config(folder / CONFIG)
    path = folder / METRICS
    rounds, served = read_rounds(path, _text(path), ROUND_COLUMNS), tuple[Round, ...]()
    # served.csv is written by runs whose clients serve models of their own, and by no others.
    if summary.serving is not None:
        path = folder / SERVED
        served = read_rounds(path, _text(path), SERVED_COLUMNS)
    chosen = None if summary.selection is None else summary.selection.chosen
    course = Course()
    # If events.jsonl is damaged, only times and drop-outs are lost: all numbers are in other files.
    with contextlib.suppress(DataError):
        course = _events(folder).course(chosen)
    return RunResult(
        folder,
        summary,
        rounds,
        clients,
        lock,
        config,
        served,
        course.seconds,
        fit_of(folder),
        _confusion(folder, summary),
        course.missing,
        deployed_of(folder),
    )


def _summary(path: Path) -> Summary:
    text = _text(path)
    try:
        summary = parsed(text)
    except ValueError as error:
        raise DataError(f"{path}: {error}; {_cure(path, text)}") from error
    # A run writes both or neither. With one of them, sections of a report would contradict.
    if (summary.last is None) != (summary.serving is None):
        raise DataError(f'{path}: only one of "last" and "serving" is there; {REDO}')
    return summary


def _cure(path: Path, text: str) -> str:
    """What to do about a summary that cannot be read: it may be another program's, or newer."""
    if not is_file(path.parent / CONFIG):
        return f"without {CONFIG} beside it, this is no run folder of fedshift: leave it out"
    written = re.match(r'\{\s*"fedshift": "(\d[\d.]{0,20})', text)
    with contextlib.suppress(PackageNotFoundError):
        here = version("fedshift")
        if written and _numbers(written[1]) > _numbers(here):
            return f"fedshift {written[1]} wrote it, and this is {here}: pip install -U fedshift"
    return REDO


def _numbers(of: str) -> list[int]:
    """The numbers in a version, for comparison."""
    return [int(part) for part in re.findall(r"\d+", of)[:3]]


def _agree(path: Path, summary: Summary, clients: Sequence[Client]) -> None:
    """Raise DataError if two files are of different runs, which a report must not mix."""
    M = len(summary.label_counts)
    if len(clients) != M:
        raise DataError(f"{path}: {len(clients)} clients; summary.json has {M}; {REDO}")
    for client, expected in zip(clients, summary.label_counts, strict=True):
        if client.labels != expected:
            differs = f'label counts of client "{shown(client.name)}" differ from summary.json'
            raise DataError(f"{path}: {differs}; {REDO}")


def _lock(path: Path) -> Mapping[str, Any]:
    text = _text(path)
    try:
        lock = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{path}, line {error.lineno}: {error.msg}; {REDO}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: {shown(str(error), 200)}; {REDO}") from error
    # Any other keys will do: the report shows what there is.
    if not isinstance(lock, dict):
        raise DataError(f"{path}: an object of versions is needed; {REDO}")
    check_format(path, lock)
    return lock


def read_lock(folder: Path) -> dict[str, Any]:
    """A folder's lock.json. Raises DataError where it is missing, damaged or of another format."""
    lock = read_object(folder / LOCK)
    check_format(folder / LOCK, lock)
    return lock


def check_format(path: Path, lock: Mapping[str, Any]) -> None:
    """Raise DataError for a lock.json of another format than this version's."""
    if lock.get("format") != FORMAT:
        raise DataError(
            f'{path}: its "format" is {shown(str(lock.get("format")))}, and this version of '
            f"fedshift reads {FORMAT}: run the experiment again"
        )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        # If training diverges, a run of a table leaves diverged.json instead of a summary.
        ended = is_file(path.parent / DIVERGED)
        why = "its training diverged" if ended else "the run did not finish or is not a run folder"
        raise DataError(f"{path.parent} has no {path.name}: {why}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {path}: {error}; {REDO}") from error
