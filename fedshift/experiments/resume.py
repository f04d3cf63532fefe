"""Unfinished run folders: their configuration, and what has changed since they began."""

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
from fedshift.files import is_file, read_object
from fedshift.record.folder import CHECKPOINTS, CONFIG, LOCK, SUMMARY
from fedshift.record.in_use import alone_in


def configured(folder: Path) -> Config:
    """The configuration of an unfinished run.

    Raises InputError for a folder that is complete, or no run folder at all, and DataError where
    summary.json or the configuration is damaged, or a file that it names has changed.
    """
    if is_file(folder / SUMMARY):
        summary_of(folder)
        # A run killed at its very end may leave checkpoints.
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
    """(backend, its processes where it has some) of an unfinished run.

    Raises DataError for a damaged lock.json, and one that names no backend.
    """
    name = last_of(trained_with(read_object(folder / LOCK)))
    try:
        way = Way.again(name)
        return check_name(way.name), way.processes or None
    except ValueError as e:
        raise DataError(f"{folder / LOCK}: {e}; name the backend with --backend") from None


# What must be as it was when a run began, by the key of lock.json.
NAMES = "names_sha256"
SUMS = {
    "data_sha256": "data",
    "split_sha256": "clients' examples",
    NAMES: "names of clients and classes",
}


@contextlib.contextmanager
def reopened(
    folder: Path, config: Config, prepared: Prepared, backend: str = "loop", again: str = COMMAND
) -> Iterator[tuple[Path, str]]:
    """(the run's folder, what is not as it was when it began: "" or a sentence).

    A failure is the last event, as for a new run. Raises DataError where data or split are others,
    for a damaged lock.json, for checkpoints of another name, and for a folder with links in it, and
    InputError where another process is at work in it.
    """
    with alone_in(folder):
        if is_file(folder / SUMMARY):  # another process may have completed it meanwhile
            raise _complete_error(folder)
        check_links(folder)
        # Other data end the run, other versions only change last digits: see `_changes`.
        then, now = read_object(folder / LOCK), lock(config, prepared, backend)
        for key, what in SUMS.items():
            # Runs of versions before have no sum of the names.
            if then.get(key) != now.get(key) and (key in then or key != NAMES):
                raise DataError(
                    f"{folder}: the {what} are not those with which the run began; start a new run"
                )
        check_names(folder, slug(config.name))
        with closing(folder, again):
            yield folder, _changes(_versions(then), _versions(now))


def _complete_error(folder: Path) -> InputError:
    return InputError(f"{folder}: this run is complete; `fedshift report {folder}` draws it")


def check_links(folder: Path) -> None:
    """Refuse links in a folder that will be written to again: they may lead to files elsewhere.

    Raises DataError for the first link in it, and for what is neither file nor folder: a pipe would
    be read for ever.
    """
    # The folder may come from elsewhere: a link could make the run overwrite any file.
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            raise DataError(
                f"{path}: a link to another place, and runs do not go on through links; put what "
                "it stands for in its place"
            )
        if not (path.is_file() or path.is_dir()):
            raise DataError(f"{path}: neither a file nor a folder; put what it was in its place")


def check_names(folder: Path, name: str) -> None:
    """Raise DataError for checkpoints of another name: the configuration has changed."""
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
