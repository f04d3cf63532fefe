"""A run folder: the names of its files, and all of them read back into one frozen value."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedshift.errors import DataError, shown
from fedshift.files import is_file, is_folder
from fedshift.record.rounds import (
    REDO,
    ROUND_COLUMNS,
    SERVED_COLUMNS,
    Client,
    Round,
    read_clients,
    read_rounds,
)
from fedshift.record.summary import Summary, parsed

CONFIG, LOCK, EVENTS = "config.resolved.toml", "lock.json", "events.jsonl"
METRICS, SERVED, CLIENTS = "metrics.csv", "served.csv", "clients.csv"
MODEL, SUMMARY, REPORT = "model.safetensors", "summary.json", "report.html"
# Of runs on data of one's own: how rows became inputs; and what `fedshift.fit` has beside.
ENCODING, FIT = "encoding.json", "fit.json"
# Only of some runs, or while they train.
CHECKPOINTS, CANDIDATES, PROFILE, DIVERGED = (
    "checkpoints", "candidates", "profile.json", "diverged.json",
)  # fmt: skip


@dataclass(frozen=True)
class RunResult:
    """All of a run folder that a report shows; `served` are the rows of `served.csv`."""

    folder: Path
    summary: Summary
    rounds: tuple[Round, ...]
    clients: tuple[Client, ...]
    lock: Mapping[str, Any]
    config: str
    served: tuple[Round, ...] = ()


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
    config = _text(folder / CONFIG)
    path = folder / METRICS
    rounds, served = read_rounds(path, _text(path), ROUND_COLUMNS), tuple[Round, ...]()
    # served.csv is written by runs whose clients serve models of their own, and by no others.
    if summary.serving is not None:
        path = folder / SERVED
        served = read_rounds(path, _text(path), SERVED_COLUMNS)
    return RunResult(folder, summary, rounds, clients, lock, config, served)


def _summary(path: Path) -> Summary:
    text = _text(path)
    try:
        summary = parsed(text)
    except ValueError as error:
        raise DataError(f"{path}: {error}; {REDO}") from error
    # One run writes both or neither; the report's sections would contradict one another.
    if (summary.last is None) != (summary.serving is None):
        raise DataError(f'{path}: only one of "last" and "serving" is there; {REDO}')
    return summary


def _agree(path: Path, summary: Summary, clients: Sequence[Client]) -> None:
    """Refuse two files of different runs: a report must not mix them."""
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
    # The report shows the file's keys, whatever they are: other versions write other ones.
    if not isinstance(lock, dict):
        raise DataError(f"{path}: an object of versions is needed; {REDO}")
    return lock


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        # Only runs of a table have that file; they keep no summary when training diverges.
        ended = is_file(path.parent / DIVERGED)
        why = "its training diverged" if ended else "the run did not finish or is not a run folder"
        raise DataError(f"{path.parent} has no {path.name}: {why}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {path}: {error}") from error
