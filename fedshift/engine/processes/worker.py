"""The main loop of a worker process: receive jobs, train their clients, send back the replies."""

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
from fedshift.engine.processes.messages import unpacked
from fedshift.engine.processes.pipe import UnsentError, receive, send
from fedshift.engine.processes.waiting import awake, heard
from fedshift.engine.sums.summing import Terms, TermsOf, summed
from fedshift.errors import FedshiftError, TrainingError
from fedshift.kernels.allocator import keep_memory
from fedshift.repeating import repeatable
from fedshift.tree import Parts


class Task(NamedTuple):
    """How a worker trains its jobs: by the backend `within`, or one after the other (None).

    terms_of: by which a worker sums its clients' updates, None where it does not; never sent.
    """

    update: ClientUpdate
    within: Backend | None = None
    terms_of: TermsOf | None = None

    @property
    def patience(self) -> float:
        """Seconds to spin while waiting: with clients trained together, rounds may be short."""
        return 0.0 if self.within is None else awake()


def serve(
    connection: Connection, room: memoryview, clients: Sequence[ClientData],
    others: Sequence[Connection],
) -> None:  # fmt: skip
    """Answer jobs until the pipe is closed."""
    # An inherited copy of the main process's end would hide from workers that it is gone.
    for other in others:
        other.close()
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches every process; the main one decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    keep_memory()
    task: Any = None
    message: Parts = {}
    # The fork may have happened within `torch.no_grad()` or inference mode.
    with torch.inference_mode(False), contextlib.suppress(EOFError, OSError):
        while True:
            if task is not None:
                heard((connection,), None, task.patience)
            new, about, terms = receive(connection, room)
            task = task if new is None else new
            jobs = unpacked(about, message, clients)
            message = jobs[-1].message
            answer = _answer(task, jobs, terms)
            try:
                send(connection, answer, room)
            except UnsentError as e:  # most often an error that cannot be pickled
                send(connection, _plain(answer if isinstance(answer, Exception) else e), room)


def _answer(task: Task, jobs: Sequence[Job], terms: Terms | None) -> list[Block] | Exception:
    """What is sent back: what came of the jobs, or the error that training raised."""

    def train() -> list[Block]:
        if task.within is None:
            return [block_of(work(task.update, job)) for job in jobs]
        if terms is None:
            return [block_of(reply) for reply in task.within(task.update, jobs)]
        return summed(task.within, task.update, jobs, terms)

    try:
        return repeatable(train)
    except Exception as e:
        return e if _arrives(e) else _plain(e)


def _plain(e: Exception) -> TrainingError:
    return TrainingError(f"{type(e).__name__}: {e}")


def _arrives(e: Exception) -> bool:
    """Whether an error of this type can be unpickled: it is rebuilt from its arguments."""
    if not (isinstance(e, FedshiftError) or type(e).__module__ == "builtins"):
        return False
    try:
        return type(copy.copy(e)) is type(e)
    except Exception:
        return False
