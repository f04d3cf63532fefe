"""What a process does that trains clients for another: it hears of jobs, and answers them."""

from __future__ import annotations

import contextlib
import copy
import signal
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

from fedshift.data import ClientData
from fedshift.engine.backends import Backend, ClientUpdate, Job, loop
from fedshift.engine.processes.messages import packed_replies, unpacked
from fedshift.engine.processes.pipe import UnsentError, receive, send
from fedshift.engine.processes.waiting import awake, heard
from fedshift.engine.sums.partial import Books, Terms, summed
from fedshift.errors import FedshiftError, TrainingError
from fedshift.kernels.allocator import keep_memory
from fedshift.repeating import repeatable
from fedshift.tree import Parts


class Task(NamedTuple):
    """What a worker does with jobs; `within` None: one after the other.

    books: where the sums of its clients' updates are entered; they stay in the main process.
    """

    update: ClientUpdate
    within: Backend | None = None
    books: Books | None = None

    @property
    def patience(self) -> float:
        """Seconds that processes wait awake for one another: where clients are trained together a
        round may be short, and the main process mostly trains, too.
        """
        return 0.0 if self.within is None else awake()


def serve(
    connection: Connection, room: memoryview, clients: Sequence[ClientData],
    others: Sequence[Connection],
) -> None:  # fmt: skip
    """What a worker does until the pipe is closed."""
    # With the other ends of pipes open, no worker would hear that the main process is gone.
    for other in others:
        other.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the main process decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    keep_memory()
    task: Any = None
    message: Parts = {}
    # A process inherits what it was forked in, `torch.no_grad()` too.
    with torch.inference_mode(False), contextlib.suppress(EOFError, OSError):
        while True:
            if task is not None:
                heard((connection,), None, task.patience)
            (fresh, about, terms), trees = receive(connection, room)
            task = task if fresh is None else fresh
            jobs = tuple(unpacked(about, trees, message, clients))
            message = jobs[-1].message
            answer, replies = _reply(task, jobs, terms)
            try:
                send(connection, answer, replies, room)
            except UnsentError as e:  # most often what failed cannot be pickled
                send(connection, (_plain(answer[0] or e), ()), (), room)


def _reply(
    task: Task, jobs: Sequence[Job], terms: Terms | None
) -> tuple[tuple[Exception | None, Any], Sequence[Parts]]:
    """((what failed, what is said of the replies), the replies), to be sent."""
    within = task.within or loop

    def train() -> tuple[Any, Sequence[Parts]]:
        if terms is None:
            return packed_replies(list(within(task.update, jobs)), None)
        return packed_replies(*summed(within, task.update, jobs, terms))

    try:
        about, trees = repeatable(train)
    except Exception as e:
        return (e if _arrives(e) else _plain(e), ()), ()
    return (None, about), trees


def _plain(e: Exception) -> TrainingError:
    return TrainingError(f"{type(e).__name__}: {e}")


def _arrives(e: Exception) -> bool:
    """Whether an error can be made again as what it is, of what it says that it was made of."""
    if not (isinstance(e, FedshiftError) or type(e).__module__ == "builtins"):
        return False
    try:
        return type(copy.copy(e)) is type(e)
    except Exception:
        return False
