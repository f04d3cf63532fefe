"""Starting the process of a run: spawned as a new Python, or forked as a copy of this one."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import torch

from fedshift.sweeps.store import Run, Store
from fedshift.sweeps.worker import Means, work

Started = tuple[Connection, BaseProcess]
Start = Callable[[Store, Means, Run], Started]


def spawned(store: Store, means: Means, run: Run) -> Started:
    """Start a run in a new Python, which shares nothing with this process."""
    context = get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    folders = Store(store.folder)  # a recorded run is never spawned, so processes need no records
    process = context.Process(target=work, args=(run, folders, theirs, means), daemon=True)
    # Started here, because its first start would unblock SIGINT within the block below.
    resource_tracker.ensure_running()
    with _block(signal.SIGINT):
        process.start()
    theirs.close()
    return ours, process


@dataclass
class Forks:
    """Starts runs in forks, which share what this process has loaded and start in milliseconds.

    ours: this process's ends of the pipes to them. A fork closes the ends that it inherits. Else
    its pipe would stay open after this process is killed, and it would go on training for no one.
    """

    ours: list[Connection] = field(default_factory=list)

    def __call__(self, store: Store, means: Means, run: Run) -> Started:
        """Start a fork that trains the run, with worker processes if `means` asks for them."""
        means.load(run)
        context = get_context("fork")
        ours, theirs = context.Pipe(duplex=False)
        self.ours = [*(c for c in self.ours if not c.closed), ours]
        # A daemonic process may not have children, which workers are.
        daemon = means.workers is None
        process = context.Process(
            target=_in_copy, args=(self.ours, run, store, theirs, means), daemon=daemon
        )
        # Until `work` sets its own signal handlers, the fork has those of this process: the signals
        # wait until then.
        with _block(signal.SIGINT, signal.SIGTERM):
            process.start()
        theirs.close()
        return ours, process


def _in_copy(
    others: list[Connection], run: Run, store: Store, channel: Connection, means: Means
) -> None:
    # A fork has none of its parent's threads: with a thread pool of torch it would wait for them
    # for ever.
    torch.set_num_threads(1)
    for other in others:
        other.close()
    # A progress bar replaces these streams. Its thread may have held their lock when we were
    # forked, and does not exist here to release it.
    sys.stdout, sys.stderr = sys.__stdout__ or sys.stdout, sys.__stderr__ or sys.stderr
    work(run, store, channel, means)


@contextmanager
def _block(*numbers: signal.Signals) -> Iterator[None]:
    """Block these signals. Processes started inside keep SIGINT blocked: only we stop them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
