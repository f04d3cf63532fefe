"""Clients side by side: processes of one thread each, which live as long as the run.

Workers are forked, so that they share the clients' data with this process; messages and states go
to them through pipes, updates come back. The result is that of `loop` on one thread bit for bit,
whatever the number of workers and the order in which they finish.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import signal
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any, NoReturn

import torch

from fedshift.data import ClientData, Plan
from fedshift.engine.allocator import keep_memory
from fedshift.engine.backends import Backend, ClientUpdate, Job, Reply, work
from fedshift.engine.wire import inside, receive, send, under
from fedshift.errors import InputError, TrainingError
from fedshift.tree import Parts


@dataclass(eq=False)
class _Worker:
    """One process, the client that it is busy with, and the last that it was told."""

    process: ForkProcess
    connection: Connection
    client: int | None = None
    update: ClientUpdate | None = None
    message: Parts = field(default_factory=dict)


@contextlib.contextmanager
def workers(clients: Sequence[ClientData], count: int) -> Iterator[Backend]:
    """A backend of `count` processes, to be used within the `with` block.

        with workers(federation.clients, 2) as backend:
            for played in run(algorithm, federation, 10, backend=backend): ...

    The algorithm is pickled: its network's class must be one that a module defines. Raises
    InputError for a count below 1 and where processes cannot be forked; the backend raises what
    `loop` raises, and TrainingError where a process dies.
    """
    if count < 1:
        raise InputError(f"{count} workers; give 1 or more")
    if "fork" not in multiprocessing.get_all_start_methods():
        raise InputError("workers need a system that can fork processes; leave them out")
    team: list[_Worker] = []
    try:
        for _ in range(count):
            team.append(_hire(clients, [w.connection for w in team]))
        yield lambda update, jobs: _share_out(team, update, jobs)
    finally:
        _dismiss(team)


def _hire(clients: Sequence[ClientData], others: Sequence[Connection]) -> _Worker:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, clients, [ours, *others]), daemon=True)
    process.start()
    theirs.close()
    return _Worker(process, ours)


def _dismiss(team: Sequence[_Worker]) -> None:
    for worker in team:
        worker.connection.close()
        if worker.client is not None:  # at work for nobody; it would not notice for a while
            worker.process.terminate()
    for worker in team:
        worker.process.join()


def _share_out(
    team: Sequence[_Worker], update: ClientUpdate, jobs: Iterable[Job]
) -> Iterator[Reply]:
    """Whoever is idle gets the next client, until all are done."""
    waiting = iter(jobs)
    for worker, job in zip(team, itertools.islice(waiting, len(team)), strict=False):
        _assign(worker, update, job)
    while busy := [worker for worker in team if worker.client is not None]:
        ready = set(wait([worker.connection for worker in busy]))
        for worker in busy:
            if worker.connection in ready:
                reply = _answer(worker)
                for job in itertools.islice(waiting, 1):
                    _assign(worker, update, job)
                yield reply


def _assign(worker: _Worker, update: ClientUpdate, job: Job) -> None:
    """Send a job, but for what the last message to this worker held already."""
    new = {k: v for k, v in job.message.items() if worker.message.get(k) is not v}
    plans = {k: {"rows": p.rows, "weight": p.weight, "lr": p.lr} for k, p in job.plans.items()}
    rest = {k: (p.sizes, p.seed) for k, p in job.plans.items()}
    about = job.client, job.t, None if worker.update == update else update, tuple(job.message), rest
    parts = under("message", new) | under("state", job.state) | under("plan", plans)
    worker.client = job.client
    try:
        send(worker.connection, about, parts)
    except OSError:
        _dead(worker)
    except Exception as e:  # pickle has a kind of error for each kind of object
        worker.client = None
        raise InputError(
            f"this method cannot be sent to other processes ({e}); define its network's class in a "
            "module, not within a function, or use no workers"
        ) from None
    worker.update, worker.message = update, job.message


def _answer(worker: _Worker) -> Reply:
    try:
        (failure, t), parts = receive(worker.connection)
    except (EOFError, OSError):
        _dead(worker)
    client, worker.client = worker.client, None
    if failure is not None:
        raise failure
    assert client is not None  # only busy workers are asked
    # What a client keeps outlives the round; as views it would keep the update alive, too.
    changed = {k: {n: v.clone() for n, v in t.items()} for k, t in inside("changed", parts).items()}
    return Reply(client, inside("update", parts), changed, t)


def _dead(worker: _Worker) -> NoReturn:
    client, worker.client = worker.client, None
    worker.process.join()
    code = worker.process.exitcode
    lost = "; killed, perhaps for lack of memory: use fewer workers" if code == -9 else ""
    raise TrainingError(
        f"the process that trained client {client} ended without an answer, exit code {code}{lost}"
    )


def _serve(
    connection: Connection, clients: Sequence[ClientData], others: Sequence[Connection]
) -> None:
    """What a worker does until the pipe is closed."""
    # With the other ends of pipes open, no worker would hear that the main process is gone.
    for other in others:
        other.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the main process decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    keep_memory()
    update: Any = None
    message: Parts = {}
    with contextlib.suppress(EOFError, OSError):
        while True:
            (client, t, fresh, names, rest), parts = receive(connection)
            update = update if fresh is None else fresh
            held = message | inside("message", parts)
            message = {name: held[name] for name in names}
            plans = {
                k: Plan(p["rows"], p["weight"], p["lr"], *rest[k])
                for k, p in inside("plan", parts).items()
            }
            job = Job(client, message, inside("state", parts), clients[client], plans, t)
            _reply(connection, update, job)


def _reply(connection: Connection, update: ClientUpdate, job: Job) -> None:
    try:
        reply = work(update, job)
    except Exception as e:
        send(connection, (e, job.t), {})
        return
    send(
        connection, (None, reply.t), under("update", reply.update) | under("changed", reply.changed)
    )
