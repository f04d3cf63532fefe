"""The main loop of a worker process: receive jobs, train their clients, send back blocks."""

from __future__ import annotations

import contextlib
import copy
import signal
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

from fedshift.data import ClientData
from fedshift.engine.backends import Backend, Block, ClientUpdate, Job, work
from fedshift.engine.checks.replies import block_of
from fedshift.engine.processes.messages import unpack
from fedshift.engine.processes.pipe import UnsentError, receive, send
from fedshift.engine.processes.waiting import spin_seconds, wait_for
from fedshift.engine.sums.summing import Terms, TermsOf, train_and_sum
from fedshift.errors import FedshiftError, TrainingError
from fedshift.kernels.allocator import keep_memory
from fedshift.randomness import undrawn
from fedshift.tree import Parts


class Task(NamedTuple):
    """How a worker trains its jobs: by the backend `within`, or, if that is None, one by one.

    terms_of: gives the terms by which the worker sums updates; None: it does not sum. It stays in
    the main process, which sends the terms of each share.
    """

    update: ClientUpdate
    within: Backend | None = None
    terms_of: TermsOf | None = None

    @property
    def patience(self) -> float:
        """Seconds to spin before blocking: only rounds of clients trained together are so short."""
        return 0.0 if self.within is None else spin_seconds()


def serve(
    connection: Connection, room: memoryview, clients: Sequence[ClientData],
    others: Sequence[Connection],
) -> None:  # fmt: skip
    """Answer jobs until the pipe is closed.

    others: copies of the main process's ends of pipes, inherited by the fork.
    """
    # While a copy of the main process's end is open, a worker does not notice that it has ended.
    for other in others:
        other.close()
    # Ctrl-C reaches every process of a terminal; the main process decides what to do.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A handler of the main process, inherited by the fork, would run here as well.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # Workers share the cores; and the number of threads decides the order of sums, hence the bits.
    torch.set_num_threads(1)
    keep_memory()
    task: Any = None
    message: Parts = {}
    # The fork may have happened within `torch.no_grad()` or inference mode.
    with torch.inference_mode(False), contextlib.suppress(EOFError, OSError):
        while True:
            if task is not None:
                wait_for((connection,), None, task.patience)
            new, about, terms = receive(connection, room)
            task = task if new is None else new
            jobs = unpack(about, message, clients)
            message = jobs[-1].message
            answer = _answer(task, jobs, terms)
            try:
                send(connection, answer, room)
            except UnsentError as e:  # most often the answer is an error that cannot be pickled
                send(connection, _plain(answer if isinstance(answer, Exception) else e), room)


def _answer(task: Task, jobs: Sequence[Job], terms: Terms | None) -> list[Block] | Exception:
    """What is sent back: the jobs' blocks, or the error that training raised."""

    def train() -> list[Block]:
        if task.within is None:
            return [block_of(work(task.update, job)) for job in jobs]
        if terms is None:
            return [block_of(reply) for reply in task.within(task.update, jobs)]
        return train_and_sum(task.within, task.update, jobs, terms)

    try:
        with undrawn():
            return train()
    except Exception as e:
        return e if _arrives(e) else _plain(e)


def _plain(e: Exception) -> TrainingError:
    """The error in words alone, which can always be sent."""
    return TrainingError(f"{type(e).__name__}: {e}")


def _arrives(e: Exception) -> bool:
    """Whether an error can be rebuilt from its arguments in the main process."""
    if not (isinstance(e, FedshiftError) or type(e).__module__ == "builtins"):
        return False
    try:
        return type(copy.copy(e)) is type(e)
    except Exception:
        return False
