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
from fedshift.engine.backends import FAILED, Backend, Block, ClientUpdate, Job, Reply, work
from fedshift.engine.checks.replies import odd_kind
from fedshift.engine.processes.messages import unpacked
from fedshift.engine.processes.pipe import UnsentError, receive, send
from fedshift.engine.processes.waiting import awake, heard
from fedshift.engine.sums.running import Share
from fedshift.engine.sums.summing import Books, Terms, summed
from fedshift.errors import FedshiftError, TrainingError
from fedshift.kernels.allocator import keep_memory
from fedshift.repeating import repeatable
from fedshift.tree import Parts

# Replies without what was summed here, and the sums.
Answer = tuple[Sequence[Reply | Block], Share | None]


class Task(NamedTuple):
    """How a worker trains its jobs: by the backend `within`, or one after the other (None).

    books: where the main process enters the sums of a worker's updates; never sent.
    """

    update: ClientUpdate
    within: Backend | None = None
    books: Books | None = None

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


def _answer(task: Task, jobs: Sequence[Job], terms: Terms | None) -> Answer | Exception:
    """What is sent back: replies and sums, or the error that training raised."""

    def train() -> Answer:
        if task.within is None:
            return [work(task.update, job) for job in jobs], None
        if terms is None:
            return list(task.within(task.update, jobs)), None
        return summed(task.within, task.update, jobs, terms)

    try:
        came, share = repeatable(train)
    except Exception as e:
        return e if _arrives(e) else _plain(e)
    return [one for whole in came for one in _that_arrive(whole)], share


def _that_arrive(came: Reply | Block) -> Sequence[Reply | Block]:
    """What came; as each client's failure what would not arrive as it is."""
    for parts, did in ((came[1], "sent"), (came[2], "would keep")):
        if odd := odd_kind(parts):
            clients = came.clients if isinstance(came, Block) else (came.client,)
            reason = torch.frombuffer(bytearray(f"{did} {odd}".encode()), dtype=torch.uint8)
            return [Reply(client, {FAILED: {"reason": reason}}, {}, came.t) for client in clients]
    return [came]


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
