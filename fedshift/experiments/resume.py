"""Going on with an unfinished run folder: its configuration, and what has changed since."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedshift.errors import DataError, InputError
from fedshift.experiments.config.load import load_config
from fedshift.experiments.config.named_files import check_files
from fedshift.experiments.config.schema import Config
from fedshift.experiments.engines import Way, check_name
from fedshift.experiments.folder.progress import slug
from fedshift.experiments.folder.run_folder import (
    COMMAND,
    closing,
    last_of,
    lock,
    summary_of,
    trained_with,
)
from fedshift.experiments.task.preparing import Prepared
from fedshift.files import is_file
from fedshift.record.folder import CHECKPOINTS, CONFIG, LOCK, SUMMARY, read_lock
from fedshift.record.in_use import alone_in


def configured(folder: Path) -> Config:
    """The configuration of an unfinished run.

    Raises InputError for a folder that is complete, or no run folder at all. Raises DataError if
    summary.json or the configuration is damaged, or if a file that it names has changed.
    """
    if is_file(folder / SUMMARY):
        summary_of(folder)
        # A run that was killed just after it wrote its summary has left its checkpoints behind.
        shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
        raise _complete_error(folder)
    if not is_file(folder / CONFIG):
        raise InputError(
            f"{folder}: not a run folder (no {CONFIG}); give one that `fedshift run` has begun"
        )
    check_files(folder)
    try:
        return load_config(folder / CONFIG)
    except InputError as e:
        raise DataError(str(e)) from None


def begun_by(folder: Path) -> tuple[str, int | None]:
    """(backend, number of its processes or None) that an unfinished run was last trained with.

    Raises DataError for a lock.json that is damaged or names no backend.
    """
    name = last_of(trained_with(read_lock(folder)))
    try:
        way = Way.parse(name)
        return check_name(way.name), way.processes or None
    except ValueError as e:
        raise DataError(f"{folder / LOCK}: {e}; name the backend with --backend") from None


# Keys of lock.json whose values must not have changed since the run began, and their meaning.
SUMS = {
    "data_sha256": "data",
    "split_sha256": "clients' examples",
    "names_sha256": "names of clients and classes",
}


@contextlib.contextmanager
def reopened(
    folder: Path, config: Config, prepared: Prepared, backend: str = "loop", again: str = COMMAND
) -> Iterator[tuple[Path, str]]:
    """(the run's folder, a sentence on what has changed since the run began, or "").

    If the run fails, the failure is logged as its last event, as for a new run. Raises DataError if
    data or split have changed, for a damaged lock.json, for checkpoints of another name, and for a
    folder with links in it. Raises InputError if another process works in the folder.
    """
    with alone_in(folder):
        if is_file(folder / SUMMARY):  # another process may have completed it meanwhile
            raise _complete_error(folder)
        check_links(folder)
        # Changed data would mix two experiments, so they end the run. Other versions of packages
        # only change last digits: `_changes` says so and the run goes on.
        then, now = read_lock(folder), lock(config, prepared, backend)
        for key, what in SUMS.items():
            if then.get(key) != now.get(key):
                raise DataError(
                    f"{folder}: the {what} are not those with which the run began; start a new run"
                )
        check_names(folder, slug(config.name))
        with closing(folder, again):
            yield folder, _changes(_versions(then), _versions(now))


def _complete_error(folder: Path) -> InputError:
    return InputError(f"{folder}: this run is complete; `fedshift report {folder}` draws it")


def check_links(folder: Path) -> None:
    """Refuse links in a folder that a run will write to again.

    Raises DataError for the first link in it, and for what is neither file nor folder: reading a
    pipe would never end.
    """
    # The folder may have come from another machine: a link in it could make the run overwrite any
    # file of this one.
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            raise DataError(
                f"{path}: a link to another place, and runs do not go on through links; put what "
                "it stands for in its place"
            )
        if not (path.is_file() or path.is_dir()):
            raise DataError(f"{path}: neither a file nor a folder; put what it was in its place")


def check_names(folder: Path, name: str) -> None:
    """Raise DataError for checkpoints of a run with another name: the configuration has changed."""
    for checkpoint in sorted((folder / CHECKPOINTS).glob("*/")):
        if checkpoint.name != name and not checkpoint.name.startswith(f"{name}_"):
            raise DataError(
                f"{folder / CONFIG}: does not belong to {checkpoint}; put it back as it was, or "
                f"delete {folder / CHECKPOINTS} to start from round 1"
            )


def _versions(lock: dict[str, Any]) -> dict[str, Any]:
    packages = lock.get("packages")
    versions = packages if isinstance(packages, dict) else {}
    others = {k: lock.get(k) for k in ("python", "platform")}
    return {**versions, **others, "backend": last_of(trained_with(lock))}


def _changes(then: dict[str, Any], now: dict[str, Any]) -> str:
    other = [f"{k} {then.get(k)} then, {v} now" for k, v in now.items() if then.get(k) != v]
    return f"the last digits of results may differ: {', '.join(other)}" if other else ""
