"""Training one run of many, in this process or in one of its own."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from fedshift.engine.backend_names import ALONE
from fedshift.errors import DivergedError, FedshiftError, InputError, UnfitError
from fedshift.experiments.engines import Engine, backend_of
from fedshift.experiments.experiment import record
from fedshift.experiments.folder.progress import Asked, no_stop
from fedshift.experiments.folder.run_folder import EventLog, kept_in
from fedshift.experiments.listeners import Listener
from fedshift.experiments.resume import check_links
from fedshift.experiments.task.preparing import Prepared, prepare
from fedshift.record.in_use import alone_in
from fedshift.server.pals import pals_weights
from fedshift.sweeps.store import Run, Store


def as_configured(run: Run) -> Prepared:
    """The task of a run, from its configuration alone."""
    return prepare(run.config)


@dataclass(frozen=True)
class Means:
    """What runs are trained with.

    backend, workers  a backend by name, and its number of processes
    prepare           makes a run's task
    load              loads a run's data; called before this process is forked, to share them
    """

    backend: str = "loop"
    workers: int | None = None
    prepare: Callable[[Run], Prepared] = as_configured
    load: Callable[[Run], object] = as_configured

    @property
    def engine(self) -> Engine:
        """A new engine for a run. Raises InputError for a backend that does not exist here."""
        spread = self.backend == "loop" and self.workers is not None
        return backend_of("workers" if spread else self.backend, self.workers)


def perform(
    run: Run, store: Store, tell: Listener, asked: Asked = no_stop, means: Means = Means()
) -> None:
    """Train the run, from its last checkpoint if it has one, and write its folder.

    tell: gets each event. asked: called after every round; if a stop was requested, a checkpoint is
    written first. Errors are raised. If training diverges, that is also written down, since the
    same run would diverge again. Raises InputError if another process trains this run, and if
    another backend has begun it.
    """
    folder = store.make(run)
    try:
        with alone_in(folder):
            if not store.done(run):  # another process may have completed it before we had the lock
                _check_begun(run, store, means.engine.backend)
                _train(run, store, store.clear(run), tell, asked, means)
    finally:
        with contextlib.suppress(OSError):  # not empty
            folder.rmdir()


def _check_begun(run: Run, store: Store, backend: str) -> None:
    began = store.begun_by(run)
    if began not in (None, backend):
        raise InputError(
            f"{store.path(run)}: begun by the backend {began}, and a run of a table is made by "
            f"one; {_backend_advice(began)}delete the folder to start from round 1"
        )


def _backend_advice(backend: str) -> str:
    return f"go on with --backend {backend}, or " if backend in ALONE else ""


def _train(
    run: Run, store: Store, folder: Path, tell: Listener, asked: Asked, means: Means
) -> None:
    check_links(folder)
    try:
        prepared = means.prepare(run)
        keeper = kept_in(folder, run.config, prepared, asked=asked)
        try:
            record(folder, run.config, prepared, tell, means.engine, keeper)
        except DivergedError as e:
            store.remember(run, reason(e), e.measured, _hull_distance(prepared))
            raise
    except UnfitError:  # the run has not begun, so its folder gets no event
        raise
    except (Exception, KeyboardInterrupt) as e:
        EventLog(folder)({"event": "failed", "error": reason(e)})
        raise


def _hull_distance(prepared: Prepared) -> float:
    counts = prepared.federation().table["labels"].numpy()
    return pals_weights(counts, prepared.task.target.numpy(), lam=0.0).distance


def reason(error: Exception | KeyboardInterrupt) -> str:
    """A failure in one line: the library's own messages as they are, others with their type."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    text = " ".join(str(error).split())
    return text if isinstance(error, FedshiftError) else f"{type(error).__name__}: {text}"


def work(run: Run, store: Store, channel: Connection, means: Means = Means()) -> None:
    """Entry point of a run's process: sends its events through the channel, the last being "over".

    SIGTERM, however often, asks it to stop after the round; "over" then says that it was stopped.
    """
    asked: list[int] = []
    # Ctrl-C reaches all processes of the terminal. What it means is for the main process to decide.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # a fork starts with it blocked

    def tell(event: dict[str, Any]) -> None:
        if event["event"] == "round":
            channel.send({"event": "round", "round": event["round"]})

    over = {"event": "over", "error": None, "stopped": False}
    try:
        perform(run, store, tell, lambda: asked[0] if asked else None, means)
    except KeyboardInterrupt:
        over["stopped"] = True
    except Exception as e:
        over["error"] = reason(e)
    channel.send(over)
