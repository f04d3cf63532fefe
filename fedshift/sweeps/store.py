"""Where runs are kept: each in a folder, or in a record of many runs.

A folder's name says what the run is, and ends in a hash of its configuration.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedshift.errors import DataError
from fedshift.experiments.config.load import dumps
from fedshift.experiments.config.named_files import with_paths
from fedshift.experiments.config.schema import Config
from fedshift.experiments.folder.run_folder import trained_with
from fedshift.files import is_file, is_folder, write
from fedshift.record.folder import (
    CHECKPOINTS,
    CONFIG,
    CORRECTED,
    DIVERGED,
    LOCK,
    METRICS,
    SUMMARY,
    check_format,
)
from fedshift.record.in_use import IN_USE
from fedshift.record.rounds import Metrics, rounds_csv
from fedshift.record.summary import parsed as parsed_summary
from fedshift.sweeps.diverged import Diverged, diverged
from fedshift.sweeps.diverged import parsed as parsed_diverged
from fedshift.sweeps.records import Record

HASH = 10


@dataclass(frozen=True)
class Run:
    """One training run: the name of its folder, and its configuration; equal ones are one run."""

    name: str
    config: Config

    @property
    def id(self) -> str:
        """The hash that its name ends in."""
        return self.name[-HASH:]


@dataclass(frozen=True)
class Finished:
    """What a table reads of a run that is over, and the checksum of its configuration file."""

    run: Run
    summary: Mapping[str, Any]
    lock: Mapping[str, Any]
    config_sha256: str = ""


def run_of(config: Config, beside: str = "") -> Run:
    """The run of a configuration, whose own `name` is replaced by the name of the folder.

    beside: what else identifies the run, if no configuration can hold it. `Store.read` refuses runs
    whose keys have changed.
    """
    identity = config.identity
    if beside:
        identity = hashlib.sha256(f"{identity} {beside}".encode()).hexdigest()
    name = f"{_readable(config)}-{identity[:HASH]}"
    return Run(name, config.model_copy(update={"name": name}))


def _readable(config: Config) -> str:
    """ "fashion-mnist_C=3_fedprox_mu=0.1_150r_s0": enough to find a folder by eye."""
    shift, options = config.shift, config.method.options
    split = {
        "C": shift.labels_per_client,
        "beta": shift.beta,
        "delta": shift.delta,
        "noise": shift.target_noise or None,
        "sigma": shift.noise or None,
        "common": shift.common_labels,
        "reach": shift.reach,
        "clients": shift.clients,
        "E": config.training.epochs,
        "px": config.data.size,
    }
    parts = [
        config.data.name,
        *(f"{k}={v:g}" for k, v in split.items() if v is not None),
        # Of a method FILE.py:NAME, the folders are left out: the project may be moved.
        config.method.name.rpartition("/")[2].removeprefix("labelset_"),
        *(f"{k}={v:g}" for k, v in options.items() if isinstance(v, int | float)),
        *(options[k] for k in ("mode", "tune") if options.get(k, "none") != "none"),
        f"{config.training.rounds}r",
        f"s{config.seeds.run}",
    ]
    # Cut so that the name has at most 80 characters with "-" and the hash.
    return re.sub(r"[^\w.+=-]", "", "_".join(parts))[: 79 - HASH]


@dataclass(frozen=True)
class Store:
    """The run folders under one folder, and recorded runs by name, which are not trained again.

    A run with a summary is complete. A run with diverged.json is over, but not complete. If a run
    has both a folder that is over and a record, the folder counts.
    """

    folder: Path
    records: Mapping[str, Record] = field(default_factory=dict)

    def path(self, run: Run) -> Path:
        """The run's folder, whether or not it exists."""
        return self.folder / run.name

    def record(self, run: Run) -> Record | None:
        """The run's record; None if it has none, or if the run in its folder is over."""
        folder = self.path(run)
        if is_file(folder / SUMMARY) or is_file(folder / DIVERGED):
            return None
        return self.records.get(run.name)

    def done(self, run: Run) -> bool:
        """Whether the run is complete."""
        return self._has(run, SUMMARY)

    def over(self, run: Run) -> bool:
        """Whether the run is complete, or its training diverged."""
        return self.done(run) or self.diverged(run) is not None

    def diverged(self, run: Run) -> Diverged | None:
        """How training diverged; None for a run that did not.

        Raises DataError for a damaged file.
        """
        # The run in the folder may have been trained again since, and be complete.
        if self.done(run) or not self._has(run, DIVERGED):
            return None
        try:
            return parsed_diverged(self._text(run, DIVERGED))
        except ValueError as e:
            raise self.damaged(run, e, DIVERGED) from None

    def remember(
        self, run: Run, error: str, measured: Sequence[Metrics], hull_distance: float
    ) -> None:
        """Write down that training diverged, and what was measured in the rounds before."""
        if measured:
            write(self.path(run) / METRICS, rounds_csv(measured))
        write(self.path(run) / DIVERGED, diverged(error, measured, hull_distance).text)

    def begun_by(self, run: Run) -> str | None:
        """The backend that wrote the run's checkpoints; None without checkpoints or lock.json."""
        if not (is_folder(self.path(run) / CHECKPOINTS) and is_file(self.path(run) / LOCK)):
            return None
        return trained_with(self._lock(run))

    def read(self, run: Run) -> Finished:
        """The summary and lock of a run that is over; if it diverged, its best round before that.

        Raises DataError for a damaged file, and for a run of another configuration.
        """
        text, config = self._text(run, CONFIG), run.config
        try:
            trained, now = (_keys(tomllib.loads(one)) for one in (text, dumps(config)))
        except (ValueError, RecursionError) as e:
            raise self.damaged(run, e, CONFIG) from None
        for key, value in trained.items():
            if value != (present := now.get(key)):
                why = f"{key} = {value!r} (now {present!r}) is not what the table needs today"
                raise self.damaged(run, why, CONFIG)
        given = _flat(run.config.model_dump(exclude_defaults=True, exclude={"name"}))
        # A key that a file written today would not have either is implied by another key.
        due = [key for key, value in given.items() if value is not None and key in now]
        if lost := [key for key in due if key not in trained]:
            raise self.damaged(run, f"{lost[0]} is not there", CONFIG)
        digest = hashlib.sha256(text.encode()).hexdigest()
        ended = self.diverged(run)
        summary = self._summary(run) if ended is None else ended.summary
        return Finished(run, summary, self._lock(run), digest)

    def curve(self, run: Run, column: str, name: str = METRICS) -> dict[int, float]:
        """One column of a file of the run, by round. Raises DataError if the file lacks it."""
        text = self._text(run, name)
        try:
            header, *rows = csv.reader(text.splitlines())
            # Without a line break at the end the last number may be cut off.
            cut = not text.endswith("\n") or any(len(row) != len(header) for row in rows)
            if cut or not rows:
                raise ValueError("rows are missing, or cut")
            t, at = header.index("round"), header.index(column)
            return {int(row[t]): float(row[at]) for row in rows if row[at]}
        except (ValueError, csv.Error) as e:
            raise self.damaged(run, e, name) from None

    def files(self, run: Run, *, metrics: bool) -> dict[str, str]:
        """The files that a table reads of a run that is over: a few kilobytes, no model."""
        end = SUMMARY if self.done(run) else DIVERGED
        names = (CONFIG, LOCK, *([METRICS] if metrics else []), end)
        files = {name: self._text(run, name) for name in names}
        # With this file a table can apply another correction; not every run has one.
        record = self.record(run)
        if is_file(self.path(run) / CORRECTED) if record is None else CORRECTED in record.files:
            files[CORRECTED] = self._text(run, CORRECTED)
        return files

    def make(self, run: Run) -> Path:
        """The run's folder, made where it is missing."""
        folder = self.path(run)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def clear(self, run: Run) -> Path:
        """Delete the files of an unfinished attempt from the run's folder, and return the folder.

        Checkpoints stay, and lock.json, which names the backend that wrote them.
        """
        folder = self.path(run)
        for path in folder.glob("*"):
            if path.is_file() and path.name not in (IN_USE, LOCK):
                path.unlink(missing_ok=True)
        return folder

    def damaged(self, run: Run, why: object, name: str = "") -> DataError:
        """The error for a run, or a file of it, that cannot be read; it says what to do."""
        record = self.record(run)
        if record is not None:
            where = f"{record.path}: {run.name}{f'/{name}' * bool(name)}"
            return DataError(f"{where}: {why}. Train it again under another --out.")
        path = self.path(run)
        return DataError(f"{path / name}: {why}. Delete the folder {path} to train this run again.")

    def _has(self, run: Run, name: str) -> bool:
        record = self.record(run)
        return is_file(self.path(run) / name) if record is None else name in record.files

    def _text(self, run: Run, name: str) -> str:
        record = self.record(run)
        try:
            if record is None:
                return (self.path(run) / name).read_text(encoding="utf-8")
            return record.files[name]
        except (OSError, ValueError) as e:
            raise self.damaged(run, e, name) from None
        except KeyError:
            raise self.damaged(run, "the record does not hold it", name) from None

    def _summary(self, run: Run) -> dict[str, Any]:
        summary = self._json(run, SUMMARY)
        try:
            parsed_summary(json.dumps(summary))
        except ValueError as e:
            raise self.damaged(run, e, SUMMARY) from None
        return summary

    def _lock(self, run: Run) -> dict[str, Any]:
        lock = self._json(run, LOCK)
        if not isinstance(lock.get("packages", {}), dict):
            raise self.damaged(run, '"packages" is not a JSON object', LOCK)
        check_format(self.path(run) / LOCK, lock)
        return lock

    def _json(self, run: Run, name: str) -> dict[str, Any]:
        try:
            value = json.loads(self._text(run, name))
        except (ValueError, RecursionError) as e:
            raise self.damaged(run, e, name) from None
        if not isinstance(value, dict):
            raise self.damaged(run, "not a JSON object", name)
        return value


def _keys(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Every value by its whole key; of files only their names, since projects may be moved."""
    return _flat(with_paths(tables, os.path.basename))


def _flat(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Every value by its whole key, as in "training.lr"."""
    values: dict[str, Any] = {}
    for key, value in tables.items():
        inner = isinstance(value, Mapping)
        values |= _flat(value, f"{prefix}{key}.") if inner else {prefix + key: value}
    return values
