"""Starting the process of a run: anew, or as a copy of this one."""

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
    """A new Python, which has nothing in common with this process."""
    context = get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    folders = Store(store.folder)  # a recorded run is never spawned, so processes need no records
    process = context.Process(target=work, args=(run, folders, theirs, means), daemon=True)
    resource_tracker.ensure_running()  # its first start lets SIGINT through
    with _block(signal.SIGINT):
        process.start()
    theirs.close()
    return ours, process


@dataclass
class Forks:
    """Copies of this process, which share what it has loaded and start in a few milliseconds.

    ours: this process's ends of their pipes. A copy closes those that it inherits; otherwise its
    pipe would stay open after this process has been killed, and it would train on unheard.
    """

    ours: list[Connection] = field(default_factory=list)

    def __call__(self, store: Store, means: Means, run: Run) -> Started:
        """A copy that does the run; with workers of its own where `means` has some."""
        means.load(run)
        context = get_context("fork")
        ours, theirs = context.Pipe(duplex=False)
        self.ours = [*(c for c in self.ours if not c.closed), ours]
        # A daemon may have no processes of its own.
        daemon = means.workers is None
        process = context.Process(
            target=_in_copy, args=(self.ours, run, store, theirs, means), daemon=daemon
        )
        # The handlers for signals are this process's until `work` has set its own.
        with _block(signal.SIGINT, signal.SIGTERM):
            process.start()
        theirs.close()
        return ours, process


def _in_copy(
    others: list[Connection], run: Run, store: Store, channel: Connection, means: Means
) -> None:
    # The threads of this process's pool are not in the copy, which would wait for them for ever.
    torch.set_num_threads(1)
    for other in others:
        other.close()
    # A bar's thread, which is not in the copy, may have had the lock of what stands in for these.
    sys.stdout, sys.stderr = sys.__stdout__ or sys.stdout, sys.__stderr__ or sys.stderr
    work(run, store, channel, means)


@contextmanager
def _block(*numbers: signal.Signals) -> Iterator[None]:
    """These signals wait. Processes started inside never see SIGINT: this one alone stops them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
