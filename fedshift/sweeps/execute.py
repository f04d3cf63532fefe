"""Training many runs: one after the other here, or several at once in processes of their own.

Each process trains one run, with the run's own number of torch threads, so that results do not
depend on how many run at once. If a process dies, only its run is lost.
"""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from fedshift.experiments.folder.progress import Asked, no_stop
from fedshift.experiments.listeners import Listener, ignore_event
from fedshift.sweeps.starting import Start, spawned
from fedshift.sweeps.store import Run, Store
from fedshift.sweeps.worker import Means, perform, reason

# Seconds between two checks for a requested stop.
LOOK = 0.5


@dataclass(frozen=True)
class Report:
    """What became of many runs.

    trained      names of the runs that were trained now
    failures     why runs failed, by name
    diverged     runs whose training diverged, now or before, with the error; they are not trained
                 again
    interrupted  the interruption that ended the work, if one did
    """

    trained: tuple[str, ...] = ()
    failures: Mapping[str, str] = field(default_factory=dict)
    diverged: Mapping[str, str] = field(default_factory=dict)
    interrupted: KeyboardInterrupt | None = None


def execute(
    runs: Mapping[str, Run],
    store: Store,
    *,
    jobs: int = 1,
    means: Means = Means(),
    start: Start = spawned,
    listen: Listener = ignore_event,
    asked: Asked = no_stop,
) -> Report:
    """Train the runs that are not complete, in order, at most `jobs` at once.

    A run that fails is noted, and the others go on. means: the backend, and what makes the tasks.
    start: starts the process of a run. asked: gives the exit code of a stop, once one is requested:
    then runs under way finish their round and write a checkpoint, and no other run begins. An
    interruption ends them at once. Either way the next call goes on from the last checkpoints.
    """
    todo = [r for r in runs.values() if not store.done(r) and store.diverged(r) is None]
    listen({"event": "queue", "runs": len(todo), "complete": len(runs) - len(todo)})
    progress, stop = _Progress(listen), None
    try:
        if jobs == 1:
            _one_by_one(todo, partial(perform, store=store, means=means), progress, asked)
        else:
            _in_parallel(todo, partial(start, store, means), jobs, progress, asked)
    except KeyboardInterrupt as e:
        stop = e
    diverged = {n: end.error for n, r in runs.items() if (end := store.diverged(r)) is not None}
    # A run that diverges also raises. It counts as diverged alone.
    failures = {n: why for n, why in progress.failures.items() if n not in diverged}
    return Report(tuple(progress.trained), failures, diverged, stop)


class _Progress:
    """Notes when each run began and how it ended, and reports it to the listener."""

    def __init__(self, listen: Listener) -> None:
        self.listen = listen
        self.began: dict[str, float] = {}
        self.trained: list[str] = []
        self.failures: dict[str, str] = {}

    def start(self, run: Run) -> None:
        self.began[run.name] = time.monotonic()
        self.listen({"event": "start", "run": run.name, "rounds": run.config.training.rounds})

    def round(self, run: Run, event: dict[str, Any]) -> None:
        if event["event"] == "round":
            self.listen({"event": "round", "run": run.name, "round": event["round"]})

    def over(self, run: Run, error: str | None) -> None:
        seconds = time.monotonic() - self.began[run.name]
        if error is None:
            self.trained.append(run.name)
        else:
            self.failures[run.name] = error
        self.listen({"event": "over", "run": run.name, "error": error, "seconds": seconds})


def _one_by_one(
    todo: list[Run], do: Callable[..., None], progress: _Progress, asked: Asked
) -> None:
    for run in todo:
        _stop_if(asked)
        progress.start(run)
        try:
            do(run, tell=partial(progress.round, run), asked=asked)
        except Exception as e:
            progress.over(run, reason(e))
        else:
            progress.over(run, None)
    _stop_if(asked)


def _stop_if(asked: Asked) -> None:
    # Raised as for Ctrl-C, since callers end in the same way after both.
    code = asked()
    if code is not None:
        raise KeyboardInterrupt(code)


def _in_parallel(
    todo: list[Run],
    start: Callable[[Run], tuple[Connection, BaseProcess]],
    jobs: int,
    progress: _Progress,
    asked: Asked,
) -> None:
    """Train up to `jobs` runs at once, each in a process, until all are over or a stop is asked."""
    queue = deque(todo)
    active: dict[Connection, tuple[Run, BaseProcess]] = {}
    signalled = False
    try:
        while (queue and asked() is None) or active:
            while queue and len(active) < jobs and asked() is None:
                run = queue.popleft()
                channel, process = start(run)
                active[channel] = run, process
                progress.start(run)
            # SIGTERM, which lets a run finish its round (`worker.work`). Once is enough.
            if asked() is not None and not signalled:
                signalled = True
                for _, process in active.values():
                    process.terminate()
            ready = wait(list(active), LOOK)
            for channel in [c for c in active if c in ready]:
                if _handle_event(channel, *active[channel], progress, asked):
                    del active[channel]
        _stop_if(asked)
    finally:
        # After an interruption, do not wait for rounds under way: runs go on from checkpoints.
        for _, process in active.values():
            process.kill()
        for _, process in active.values():
            process.join()


def _handle_event(
    channel: Connection, run: Run, process: BaseProcess, progress: _Progress, asked: Asked
) -> bool:
    """Handle one event of a process; True if it was its last."""
    try:
        event = channel.recv()
    except (EOFError, ConnectionError):  # the process died without a last event
        process.join()
        # Until `work` has set its handler, our request to stop ends the process itself.
        stopped = process.exitcode == -signal.SIGTERM and asked() is not None
        event = {"event": "over", "error": _death(process.exitcode), "stopped": stopped}
    if event["event"] != "over":
        progress.round(run, event)
        return False
    process.join()
    channel.close()
    if not event["stopped"]:
        progress.over(run, event["error"])
    elif asked() is None:
        progress.over(run, "stopped from outside (SIGTERM)")
    return True


def _death(code: int | None) -> str:
    killed = " (killed from outside: perhaps out of memory; try fewer --jobs)" if code == -9 else ""
    return f"the process ended without a result, exit code {code}{killed}"
