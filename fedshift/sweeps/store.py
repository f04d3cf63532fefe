"""Where runs are kept: in a folder each, named by what it is and a hash of its configuration, or in
a record.
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
from fedshift.record.folder import CHECKPOINTS, CONFIG, CORRECTED, DIVERGED, LOCK, METRICS, SUMMARY
from fedshift.record.in_use import IN_USE
from fedshift.record.rounds import Metrics, rounds_csv
from fedshift.record.summary import parsed as parsed_summary
from fedshift.sweeps.diverged import Diverged, diverged
from fedshift.sweeps.diverged import parsed as parsed_diverged
from fedshift.sweeps.records import Record

HASH = 10


@dataclass(frozen=True)
class Run:
    """One training run: its folder's name and its configuration. Equal configurations share it.

    former: what an earlier version called its folder, "" for the same
    """

    name: str
    config: Config
    former: str = ""

    @property
    def id(self) -> str:
        """The hash that its name ends in."""
        return self.name[-HASH:]


@dataclass(frozen=True)
class Finished:
    """What a complete run says, and the checksum of its configuration file."""

    run: Run
    summary: Mapping[str, Any]
    lock: Mapping[str, Any]
    config_sha256: str = ""


def run_of(config: Config, beside: str = "", former: str = "") -> Run:
    """The run of a configuration. Its own `name` does not count; it is set to the folder's name.

    beside: what else tells it from others, where no configuration can hold it; former: the same as
    an earlier version had it, with files by their whole paths.

    Runs outlive new keys (`Config.identity`); `Store.read` refuses runs whose other keys have
    changed since.
    """
    name = _name(config, config.identity, beside)
    before = _name(config, config.identity_by_path, former) if former else ""
    return Run(name, config.model_copy(update={"name": name}), before)


def _name(config: Config, identity: str, beside: str) -> str:
    if beside:
        identity = hashlib.sha256(f"{identity} {beside}".encode()).hexdigest()
    return f"{_readable(config)}-{identity[:HASH]}"


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
        config.method.name.rpartition("/")[2].removeprefix("labelset_"),
        *(f"{k}={v:g}" for k, v in options.items() if isinstance(v, int | float)),
        *(options[k] for k in ("mode", "tune") if options.get(k, "none") != "none"),
        f"{config.training.rounds}r",
        f"s{config.seeds.run}",
    ]
    return re.sub(r"[^\w.+=-]", "", "_".join(parts))[: 79 - HASH]


@dataclass(frozen=True)
class Store:
    """Run folders under one folder, and recorded runs by name, which are not trained again.

    A run with a summary is complete, one with DIVERGED is over. A folder comes before a record.
    """

    folder: Path
    records: Mapping[str, Record] = field(default_factory=dict)

    def path(self, run: Run) -> Path:
        """The run's folder, whether it exists or not."""
        former = self.folder / run.former
        return former if run.former and is_folder(former) else self.folder / run.name

    def record(self, run: Run) -> Record | None:
        """The run's record; None where there is none, or its folder is over."""
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
        """How training ended where it diverged; None for every other run.

        Raises DataError for a damaged file.
        """
        # The folder may have been trained again meanwhile.
        if self.done(run) or not self._has(run, DIVERGED):
            return None
        try:
            return parsed_diverged(self._text(run, DIVERGED))
        except ValueError as e:
            raise self.damaged(run, e, DIVERGED) from None

    def remember(
        self, run: Run, error: str, measured: Sequence[Metrics], hull_distance: float
    ) -> None:
        """Note that training diverged, and what was measured of the rounds before."""
        if measured:
            write(self.path(run) / METRICS, rounds_csv(measured))
        write(self.path(run) / DIVERGED, diverged(error, measured, hull_distance).text)

    def begun_by(self, run: Run) -> str | None:
        """The backend that made the run's checkpoints; None where there are none, or it is lost."""
        if not (is_folder(self.path(run) / CHECKPOINTS) and is_file(self.path(run) / LOCK)):
            return None
        return trained_with(self._lock(run))

    def read(self, run: Run) -> Finished:
        """A complete run's summary and lock; of one that diverged, its best round before.

        Raises DataError for a damaged file, and for a run of another configuration.
        """
        text, config = self._text(run, CONFIG), self.config(run)
        try:
            trained, now = (_keys(tomllib.loads(one)) for one in (text, dumps(config)))
        except (ValueError, RecursionError) as e:
            raise self.damaged(run, e, CONFIG) from None
        for key, value in trained.items():
            if value != (present := now.get(key)):
                why = f"{key} = {value!r} (now {present!r}) is not what the table needs today"
                raise self.damaged(run, why, CONFIG)
        given = _flat(run.config.model_dump(exclude_defaults=True, exclude={"name"}))
        # What no file of today has either is implied by another key.
        due = [key for key, value in given.items() if value is not None and key in now]
        if lost := [key for key in due if key not in trained]:
            raise self.damaged(run, f"{lost[0]} is not there", CONFIG)
        digest = hashlib.sha256(text.encode()).hexdigest()
        ended = self.diverged(run)
        summary = self._summary(run) if ended is None else ended.summary
        return Finished(run, summary, self._lock(run), digest)

    def config(self, run: Run) -> Config:
        """The run's configuration as its folder, which an earlier version may have made, has it."""
        record = self.record(run)
        name = self.path(run).name if record is None else run.name
        return run.config.model_copy(update={"name": name})

    def curve(self, run: Run, column: str, name: str = METRICS) -> dict[int, float]:
        """One column of a file of the run by round. Raises DataError where it is not there."""
        text = self._text(run, name)
        try:
            header, *rows = csv.reader(text.splitlines())
            # Without a final line break the last number may be cut.
            cut = not text.endswith("\n") or any(len(row) != len(header) for row in rows)
            if cut or not rows:
                raise ValueError("rows are missing, or cut")
            t, at = header.index("round"), header.index(column)
            return {int(row[t]): float(row[at]) for row in rows if row[at]}
        except (ValueError, csv.Error) as e:
            raise self.damaged(run, e, name) from None

    def files(self, run: Run, *, metrics: bool) -> dict[str, str]:
        """What a table reads of a run that is over, by file name: a few kilobytes, no model."""
        end = SUMMARY if self.done(run) else DIVERGED
        names = (CONFIG, LOCK, *([METRICS] if metrics else []), end)
        files = {name: self._text(run, name) for name in names}
        # Runs of earlier versions have none; with it a table can take another correction.
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
        """The run's folder without the files that an unfinished attempt may have left in it.

        It keeps the file that names the backend of its checkpoints.
        """
        folder = self.path(run)
        for path in folder.glob("*"):
            if path.is_file() and path.name not in (IN_USE, LOCK):
                path.unlink(missing_ok=True)
        return folder

    def damaged(self, run: Run, why: object, name: str = "") -> DataError:
        """The error for a run, or one of its files, that cannot be read, with what to do."""
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
    """Every value by its whole key, with files by their names: where they lie does not count."""
    return _flat(with_paths(tables, os.path.basename))


def _flat(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Every value by its whole key, as in "training.lr"."""
    values: dict[str, Any] = {}
    for key, value in tables.items():
        inner = isinstance(value, Mapping)
        values |= _flat(value, f"{prefix}{key}.") if inner else {prefix + key: value}
    return values
