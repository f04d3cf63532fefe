"""The run folder: what one experiment leaves on disk. Each file appears whole or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from fedshift.errors import DataError, FedshiftError, InputError
from fedshift.evaluation.scores import MOST_CLASSES, Score
from fedshift.experiments.config.load import dumps
from fedshift.experiments.config.named_files import relative
from fedshift.experiments.config.schema import PYTHON, Config
from fedshift.experiments.folder.model_file import (
    model_parts,
    parts_without_clients,
    with_correction,
)
from fedshift.experiments.folder.outcome import Experiment
from fedshift.experiments.folder.progress import Asked, Keeper, no_stop
from fedshift.experiments.folder.routers import fits_of
from fedshift.experiments.folder.summary import PACKAGES, package_version, summary
from fedshift.experiments.measures.served import models
from fedshift.experiments.task.extras import extra_packages
from fedshift.experiments.task.preparing import Prepared
from fedshift.files import append, clean, read_object, write
from fedshift.record.folder import (
    CANDIDATES,
    CHECKPOINTS,
    CLIENTS,
    CONFIG,
    CONFUSION,
    CORRECTED,
    EVENTS,
    FORMAT,
    LOCK,
    METRICS,
    MODEL,
    PROFILE,
    ROUTER,
    SERVED,
    SUMMARY,
    read_lock,
)
from fedshift.record.in_use import IN_USE, alone_in
from fedshift.record.rounds import Client, clients_csv, confusion_csv, corrected_csv, rounds_csv
from fedshift.record.summary import written
from fedshift.tree import Parts, flatten

# The command that resumes a run; {} stands for its folder.
COMMAND = "fedshift run --resume {}"


@contextlib.contextmanager
def reserved(out: Path | None, name: str, again: str = COMMAND) -> Iterator[Path]:
    """A new folder for results: `out`, which must be empty, or runs/NAME, runs/NAME-2, ...

    If the work fails before anything is written, the folder is removed. Otherwise its files stay
    and the failure is logged as the last event. After an interruption a note says how to go on.
    """
    # Without --out no folder is ever used twice: two runs started at the same time get two.
    folder = _new_folder(Path("runs"), name) if out is None else _make_empty(out)
    try:
        with alone_in(folder):
            check_unused(folder)  # another process may have used it before we had the lock
            with closing(folder, again):
                yield folder
    finally:
        with contextlib.suppress(OSError):  # not empty
            folder.rmdir()


@contextlib.contextmanager
def closing(folder: Path, again: str = COMMAND) -> Iterator[None]:
    """If the block fails after a run began in the folder, log why; again: how to resume the run."""
    try:
        yield
    except BaseException as e:
        with contextlib.suppress(OSError, InputError):
            _close(folder, e, again)
        raise


def _close(folder: Path, error: BaseException, again: str) -> None:
    interrupted = isinstance(error, KeyboardInterrupt)
    # In its subfolders, too: the demo has a run folder for each method.
    logs = sorted(folder.rglob(EVENTS))
    for place in (log.parent for log in logs if not (log.parent / SUMMARY).exists()):
        if interrupted:
            # Before the first checkpoint the same command starts the run again.
            has_checkpoint = (place / CHECKPOINTS).is_dir()
            how = "goes on from here" if has_checkpoint else "starts it again from round 1"
            error.add_note(f"`{again.format(place)}` {how}")
        reason = "interrupted" if interrupted else str(error) or type(error).__name__
        # `fedshift deploy server` reads the event and ends with the same code.
        code = {"exit_code": error.exit_code} if isinstance(error, FedshiftError) else {}
        EventLog(place)({"event": "failed", "error": reason, **code})


def check_unused(out: Path | None) -> None:
    """Raise InputError for a path that is a file, or a folder that is not empty.

    A lock file does not count: a process that was killed before it began has left it.
    """
    try:
        used = (
            out is not None
            and out.exists()
            and (not out.is_dir() or any(p.name != IN_USE for p in out.iterdir()))
        )
    except OSError as e:
        raise InputError(f"{out}: cannot be looked into: {e.strerror}") from None
    if used:
        raise InputError(f"{out}: exists and is not an empty folder; give another --out")


def _new_folder(parent: Path, name: str) -> Path:
    for number in range(1, 10_000):
        folder = parent / (name if number == 1 else f"{name}-{number}")
        try:
            # mkdir itself tests whether the name is free. If we looked first, another run could
            # take the name in between.
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as e:
            raise InputError(f"{folder}: cannot be created: {e.strerror}") from None
        return folder
    raise InputError(f"{parent / name}: ten thousand runs of this name exist; give --out")


def _make_empty(path: Path) -> Path:
    check_unused(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise InputError(f"{path}: cannot be created: {e.strerror}") from None
    return path


class EventLog:
    """Appends each event to events.jsonl at once: a line of JSON, with the time."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / EVENTS

    def __call__(self, event: dict[str, Any]) -> None:
        # Only this file may say where the folder is: the others have the same bytes on every
        # machine. `named_files` needs the place to find files if the folder is moved alone.
        place = {"folder": os.path.realpath(self.path.parent)} if event["event"] == "start" else {}
        append(self.path, json.dumps({"time": round(time.time(), 3), **clean(event), **place}))


def kept_in(
    folder: Path, config: Config, prepared: Prepared, every: int | None = None,
    asked: Asked = no_stop,
) -> Keeper:  # fmt: skip
    """A keeper of checkpoints in a run folder, which takes none of other runs.

    Their identity is a hash of the configuration and the data.
    """
    # The checksums of the data are part of it: a data set may be replaced under the same name.
    mark = prepared.custom.mark
    sums = (prepared.data.sha256, prepared.split_sha256, *([mark] if mark else []))
    if config.model.name == PYTHON:  # no key says which network it is; its first weights do
        params, buffers = prepared.model.init()
        sums += (_digest(v.contiguous().flatten() for v in (params | buffers).values()),)
    # Checkpoints hold the model before any correction, so all values of `prior` can share them.
    config = config.model_copy(
        update={"training": config.training.model_copy(update={"prior": "none"})}
    )
    return Keeper(folder / CHECKPOINTS, _hash(config.identity, *sums), every, asked)


def _digest(tensors: Iterable[Tensor]) -> str:
    digest = hashlib.sha256()
    for v in tensors:
        digest.update(v.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _hash(*texts: str) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()


def write_start(folder: Path, config: Config, prepared: Prepared, backend: str) -> None:
    """The files that exist before training: the configuration, and the lock file."""
    # The configuration comes last: a folder that has one counts as a run that can be resumed, and
    # resuming needs the other files.
    write_lock(folder, lock(config, prepared, backend), prepared.custom.files)
    for name, text in prepared.custom.texts.items():
        write(folder / name, text)
    write(folder / CONFIG, dumps(config, folder))


def write_lock(folder: Path, facts: Mapping[str, Any], files: Mapping[str, str]) -> None:
    """Write lock.json: what `lock` gives, and the checksums of the user's files by path."""
    sums = {relative(path, folder): digest for path, digest in files.items()}
    write(folder / LOCK, _json({**facts, **({"files": sums} if files else {})}))


def write_profile(folder: Path, profile: Mapping[str, Any]) -> None:
    """Write the time of a run by activity."""
    write(folder / PROFILE, _json(profile))


def lock(config: Config, prepared: Prepared, backend: str = "loop") -> dict[str, Any]:
    """What is needed to get the same numbers again: versions, backend, checksums, seeds."""
    clients = prepared.custom.clients
    names = {"names_sha256": _hash(*clients, *prepared.task.classes)} if clients else {}
    return {
        "format": FORMAT,
        "packages": {
            n: package_version(n) for n in (*PACKAGES, *extra_packages(config.data, config.model))
        },
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "backend": backend,
        "threads": config.training.threads,
        "data": config.data.name,
        "data_sha256": prepared.data.sha256,
        "split_sha256": prepared.split_sha256,
        **names,
        "seeds": vars(prepared.seeds),
    }


def trained_with(lock: Mapping[str, Any]) -> str:
    """The backend that a lock.json names, or else the loop."""
    return str(lock.get("backend", "loop"))


def trained_before(folder: Path) -> str:
    """The backend in the folder's lock.json; the loop if that file is missing or damaged."""
    with contextlib.suppress(DataError):
        return trained_with(read_lock(folder))
    return "loop"


def in_turn(*backends: str) -> str:
    """ "loop, then dense"; a single name if the run goes on with the backend that began it."""
    first, last = backends[0], backends[-1]
    return first if last_of(first) == last else f"{first}, then {last}"


def last_of(backends: str) -> str:
    """ "dense" of "loop, then dense"."""
    return backends.rpartition(", then ")[2]


def write_run(folder: Path, experiment: Experiment, backend: str) -> None:
    """Write all files of a run but events.jsonl (written on the way) and report.html (later)."""
    outcome = experiment.outcome
    write_start(folder, experiment.config, experiment.prepared, backend)
    write(folder / METRICS, rounds_csv(outcome.metrics))
    classes = experiment.prepared.task.classes
    write(folder / CLIENTS, clients_csv(_clients(experiment), classes))
    if isinstance(outcome.test, Score) and outcome.test.confusion is not None:
        write(folder / CONFUSION, confusion_csv(outcome.test.confusion.tolist(), classes))
    if outcome.corrected is not None and len(classes) <= MOST_CLASSES:
        write(folder / CORRECTED, corrected_csv(outcome.corrected.confusions(), classes))
    if outcome.served:
        write(folder / SERVED, rounds_csv(outcome.served))
    # Cloned, because clients may share tensors, and safetensors refuses shared memory.
    tensors = {k: v.contiguous().clone() for k, v in flatten(_models(experiment)).items()}
    write(folder / MODEL, save(tensors))
    if outcome.at_end is not None and outcome.at_end.routers:
        fits = flatten(fits_of(outcome.at_end.routers))
        write(folder / ROUTER, save({k: v.contiguous().clone() for k, v in fits.items()}))
    if experiment.choice is not None:
        (folder / CANDIDATES).mkdir(exist_ok=True)
        for c in experiment.choice.candidates:
            name = c.label.replace("=", "-").replace("%", "")
            write(folder / CANDIDATES / f"{name}.csv", rounds_csv(c.outcome.metrics))
    # Last, because a folder with a summary is complete.
    write(folder / SUMMARY, written(summary(experiment)))


def summary_of(folder: Path) -> dict[str, Any]:
    """The summary.json that `write_run` wrote. Raises DataError where it is damaged."""
    return read_object(folder / SUMMARY)


def _clients(experiment: Experiment) -> list[Client]:
    outcome = experiment.outcome
    table = outcome.federation.table
    # Sample sizes give FedAvg's weights, which clients.csv has for comparison.
    share = table["n"] / table["n"].sum()
    names = experiment.prepared.custom.clients or tuple(map(str, range(len(share))))
    return [
        Client(
            names[i],
            int(table["n"][i]),
            outcome.weights[i],
            float(share[i]),
            s.accuracy,
            s.n,
            tuple(int(c) for c in table["labels"][i]),
        )
        for i, s in enumerate(outcome.clients)
    ]


def _models(experiment: Experiment) -> Parts:
    outcome = experiment.outcome
    federation, last = outcome.federation, outcome.last
    tests, at_end = experiment.prepared.task.tests, outcome.at_end
    if at_end is not None and at_end.on_sites:
        return parts_without_clients(
            (outcome.params, outcome.buffers), (federation.params, federation.buffers),
            last.states, len(federation.clients),
        )  # fmt: skip
    served = models(experiment.algorithm, last, federation) if tests else ()
    shared, first = (outcome.params, outcome.buffers), (federation.params, federation.buffers)
    parts = model_parts(shared, first, served, last.states)
    if experiment.config.training.prior == "none" or outcome.corrected is None:
        return parts
    shape = tuple(experiment.prepared.task.test.x.shape[1:])
    return with_correction(parts, experiment.algorithm.model, outcome.corrected.correction, shape)


def _json(value: Any) -> str:
    return json.dumps(clean(value), indent=1) + "\n"
