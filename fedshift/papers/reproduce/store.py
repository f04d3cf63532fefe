"""Where runs are kept: one folder each, named by what it is and by a hash of its configuration."""

from __future__ import annotations

import csv
import hashlib
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedshift.errors import DataError
from fedshift.experiments.config import Config
from fedshift.experiments.folder import trained_with
from fedshift.experiments.in_use import IN_USE
from fedshift.experiments.load import dumps
from fedshift.files import is_file, is_folder, write
from fedshift.papers.reproduce.diverged import Diverged, diverged, parsed
from fedshift.record import summary as record
from fedshift.record.folder import CHECKPOINTS, CONFIG, DIVERGED, LOCK, METRICS, SUMMARY
from fedshift.record.rounds import Metrics, rounds_csv

HASH = 10


@dataclass(frozen=True)
class Run:
    """One training run: its folder's name and its configuration. Equal configurations share it."""

    name: str
    config: Config


@dataclass(frozen=True)
class Finished:
    """What a complete run folder says, and the checksum of its configuration file."""

    run: Run
    summary: Mapping[str, Any]
    lock: Mapping[str, Any]
    config_sha256: str = ""


def run_of(config: Config) -> Run:
    """The run of a configuration. Its own `name` does not count; it is set to the folder's name.

    Runs outlive new keys (`Config.identity`); `Store.read` refuses runs whose other keys have
    changed since.
    """
    name = f"{_readable(config)}-{config.identity[:HASH]}"
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
        "clients": shift.clients,
        "E": config.training.epochs,
        "px": config.data.size,
    }
    parts = [
        config.data.name,
        *(f"{k}={v:g}" for k, v in split.items() if v is not None),
        config.method.name.removeprefix("labelset_"),
        *(f"{k}={v:g}" for k, v in options.items() if isinstance(v, int | float)),
        *(options[k] for k in ("mode", "tune") if options.get(k, "none") != "none"),
        f"{config.training.rounds}r",
        f"s{config.seeds.run}",
    ]
    return re.sub(r"[^\w.+=-]", "", "_".join(parts))[: 79 - HASH]


@dataclass(frozen=True)
class Store:
    """Run folders under one folder. One with a summary is complete, one with DIVERGED is over."""

    folder: Path

    def path(self, run: Run) -> Path:
        """The run's folder, whether it exists or not."""
        return self.folder / run.name

    def done(self, run: Run) -> bool:
        """Whether the run is complete."""
        return is_file(self.path(run) / SUMMARY)

    def over(self, run: Run) -> bool:
        """Whether the run is complete, or its training diverged."""
        return self.done(run) or self.diverged(run) is not None

    def diverged(self, run: Run) -> Diverged | None:
        """How training ended where it diverged; None for every other run.

        Raises DataError for a damaged file.
        """
        path = self.path(run) / DIVERGED
        if self.done(run) or not is_file(path):  # it may have been trained again since
            return None
        try:
            return parsed(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as e:
            raise _damaged(path, e) from None

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
        path = self.path(run) / CONFIG
        try:
            text = path.read_text(encoding="utf-8")
            trained = tomllib.loads(text)
        except (OSError, ValueError, RecursionError) as e:
            raise _damaged(path, e) from None
        changed = _changed(trained, tomllib.loads(dumps(run.config)))
        if changed:
            raise _damaged(path, ValueError(f"{changed} is not what the table needs today"))
        given = run.config.model_dump(exclude_defaults=True, exclude={"name"})
        if lost := _lost(given, trained):
            raise _damaged(path, ValueError(f"{lost} is not there"))
        digest = hashlib.sha256(text.encode()).hexdigest()
        ended = self.diverged(run)
        said = self._summary(run) if ended is None else ended.summary
        return Finished(run, said, self._lock(run), digest)

    def curve(self, run: Run, column: str) -> dict[int, float]:
        """One column of the run's metrics by round. Raises DataError where it is not there."""
        path = self.path(run) / METRICS
        try:
            text = path.read_text(encoding="utf-8")
            header, *rows = csv.reader(text.splitlines())
            # Without its end of line the last number may be cut, too.
            cut = not text.endswith("\n") or any(len(row) != len(header) for row in rows)
            if cut or not rows:
                raise ValueError("rows are missing, or cut")
            t, at = header.index("round"), header.index(column)
            return {int(row[t]): float(row[at]) for row in rows if row[at]}
        except (OSError, ValueError, csv.Error) as e:
            raise _damaged(path, e) from None

    def copy_to(self, other: Store, run: Run, *, metrics: bool) -> None:
        """Copy what a table reads of a run that is over, a few kilobytes; the model stays."""
        read, other_end = (SUMMARY, DIVERGED) if self.done(run) else (DIVERGED, SUMMARY)
        for name in (CONFIG, LOCK, *([METRICS] if metrics else []), read):
            source, place = self.path(run) / name, other.path(run) / name
            try:
                write(place, source.read_bytes())
            except OSError as e:
                raise _damaged(source, e) from None
        (other.path(run) / other_end).unlink(missing_ok=True)

    def make(self, run: Run) -> Path:
        """The run's folder, made where it is missing."""
        folder = self.path(run)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def clear(self, run: Run) -> Path:
        """The run's folder without the files that an unfinished attempt may have left in it.

        But for what says by which backend its checkpoints were made.
        """
        folder = self.path(run)
        for left in folder.glob("*"):
            if left.is_file() and left.name not in (IN_USE, LOCK):
                left.unlink(missing_ok=True)
        return folder

    def _summary(self, run: Run) -> dict[str, Any]:
        found = self._json(run, SUMMARY)
        try:
            record.parsed(json.dumps(found))
        except ValueError as e:
            raise _damaged(self.path(run) / SUMMARY, e) from None
        return found

    def _lock(self, run: Run) -> dict[str, Any]:
        found = self._json(run, LOCK)
        if not isinstance(found.get("packages", {}), dict):
            raise _damaged(self.path(run) / LOCK, ValueError('"packages" is not a JSON object'))
        return found

    def _json(self, run: Run, name: str) -> dict[str, Any]:
        path = self.path(run) / name
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as e:
            raise _damaged(path, e) from None
        if not isinstance(value, dict):
            raise _damaged(path, ValueError("not a JSON object"))
        return value


def _changed(then: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> str:
    """The first key of `then` that `now` has otherwise, with both values; empty if none is."""
    for key, value in then.items():
        present = now.get(key)
        if isinstance(value, dict) and isinstance(present, dict):
            inner = _changed(value, present, f"{prefix}{key}.")
            if inner:
                return inner
        elif value != present:
            return f"{prefix}{key} = {value!r} (now {present!r})"
    return ""


def _lost(given: Mapping[str, Any], then: Mapping[str, Any], prefix: str = "") -> str:
    """The first key of `given` that `then` lacks, other than None; empty if it lacks none."""
    for key, value in given.items():
        if key not in then and value is not None:
            return f"{prefix}{key}"
        if isinstance(value, dict) and (lost := _lost(value, then[key], f"{prefix}{key}.")):
            return lost
    return ""


def _damaged(path: Path, error: Exception) -> DataError:
    return DataError(f"{path}: {error}. Delete the folder {path.parent} to train this run again.")
