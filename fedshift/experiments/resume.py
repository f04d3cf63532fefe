"""Unfinished run folders: what they were to become, and whether that is still the same."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedshift.errors import DataError, InputError
from fedshift.experiments.config import Config
from fedshift.experiments.folder import CONFIG, LOCK, SUMMARY, closing, lock
from fedshift.experiments.load import load_config
from fedshift.experiments.task import Prepared


def configured(folder: Path) -> Config:
    """The configuration of an unfinished run.

    Raises InputError for a folder that is complete, or no run folder at all.
    """
    if (folder / SUMMARY).exists():
        raise InputError(f"{folder}: this run is complete; `fedshift report {folder}` draws it")
    if not (folder / CONFIG).is_file():
        raise InputError(
            f"{folder}: not a run folder (no {CONFIG}); give one that `fedshift run` has begun"
        )
    return load_config(folder / CONFIG)


@contextlib.contextmanager
def reopened(folder: Path, config: Config, prepared: Prepared) -> Iterator[tuple[Path, str]]:
    """(the run's folder, what is not as it was when it began: "" or a sentence).

    A failure is the last event, as for a new run. Raises DataError where data or split are others.
    """
    then, now = _lock(folder), lock(config, prepared)
    for key, what in (("data_sha256", "data"), ("split_sha256", "clients' examples")):
        if then.get(key) != now[key]:
            raise DataError(
                f"{folder}: the {what} are not those with which the run began; start a new run"
            )
    with closing(folder):
        yield folder, _moved(then.get("packages", {}), now["packages"])


def _lock(folder: Path) -> dict[str, Any]:
    path = folder / LOCK
    try:
        held: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise DataError(f"{path}: cannot be read: {e.strerror}") from None
    except ValueError as e:
        raise DataError(f"{path}: damaged ({e}); start a new run") from None
    return held


def _moved(then: dict[str, Any], now: dict[str, Any]) -> str:
    other = [f"{k} {then.get(k)} then, {v} now" for k, v in now.items() if then.get(k) != v]
    return f"the last digits of results may differ: {', '.join(other)}" if other else ""
