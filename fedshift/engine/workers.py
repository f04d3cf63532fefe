"""Clients side by side: processes of one thread each, which live as long as the run.

Workers are forked, so that they share the clients' data with this process; messages and states go
to them through pipes, updates come back. The result is that of `loop` on one thread bit for bit,
whatever the number of workers and the order in which they finish.

A round may have a deadline. Whoever has not answered by then is ended, its client has no answer,
and another process takes its place.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any

import torch

from fedshift.data import ClientData, Plan
from fedshift.engine.allocator import keep_memory
from fedshift.engine.backends import Backend, ClientUpdate, Job, Reply, work
from fedshift.engine.wire import inside, receive, send, under
from fedshift.errors import InputError, TrainingError
from fedshift.tree import Parts


@dataclass(eq=False)
class _Worker:
    """One process, what it is busy with and for which time, and the last that it was told."""

    process: ForkProcess
    connection: Connection
    job: Job | None = None
    attempt: int = 0
    update: ClientUpdate | None = None
    message: Parts = field(default_factory=dict)


@dataclass(eq=False)
class _Team:
    """All processes; replaced are those that died or were ended."""

    clients: Sequence[ClientData]
    members: list[_Worker]
    deadline: float | None
    retries: int

    def hire(self) -> _Worker:
        """A new process."""
        return _hire(self.clients, [w.connection for w in self.members])

    def replace(self, worker: _Worker) -> None:
        """End a process, and put a new one in its place that has been told nothing yet."""
        worker.process.kill()
        worker.process.join()
        worker.connection.close()
        fresh = _hire(self.clients, [w.connection for w in self.members if w is not worker])
        worker.process, worker.connection, worker.job = fresh.process, fresh.connection, None
        worker.update, worker.message = None, {}


@contextlib.contextmanager
def workers(
    clients: Sequence[ClientData],
    count: int,
    *,
    deadline: float | None = None,
    retries: int = 0,
) -> Iterator[Backend]:
    """A backend of `count` processes, to be used within the `with` block.

        with workers(federation.clients, 2) as backend:
            for played in run(algorithm, federation, 10, backend=backend): ...

    deadline  seconds for a round; clients that have not answered by then give no answer (the gate
              must drop them). None: as long as it takes. With one, results depend on the clock
    retries   how often a client whose process died is trained again, in a new process

    The algorithm is pickled: its network's class must be one that a module defines. Raises
    InputError for a count below 1, limits out of range and where processes cannot be forked; the
    backend raises what `loop` raises, and TrainingError where a process dies once too often.
    """
    if count < 1:
        raise InputError(f"{count} workers; give 1 or more")
    if retries < 0 or not (deadline is None or deadline > 0):
        raise InputError(
            f"deadline={deadline}, retries={retries}; allowed: deadline > 0, retries >= 0"
        )
    if "fork" not in multiprocessing.get_all_start_methods():
        raise InputError("workers need a system that can fork processes; leave them out")
    team = _Team(clients, [], deadline, retries)
    try:
        for _ in range(count):
            team.members.append(team.hire())
        yield lambda update, jobs: _share_out(team, update, jobs)
    finally:
        _dismiss(team.members)


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
        if worker.job is not None:  # at work for nobody; it would not notice for a while
            worker.process.terminate()
    for worker in team:
        worker.process.join()


def _share_out(team: _Team, update: ClientUpdate, jobs: Iterable[Job]) -> Iterator[Reply]:
    """Whoever is idle gets the next client, until all are done or the time is over."""
    waiting, end = iter(jobs), _end(team.deadline)
    for worker, job in zip(
        team.members, itertools.islice(waiting, len(team.members)), strict=False
    ):
        _assign(team, worker, update, job)
    while busy := [worker for worker in team.members if worker.job is not None]:
        ready = set(wait([w.connection for w in busy], None if end is None else end - _now()))
        if end is not None and _now() >= end:
            for worker in busy:
                team.replace(worker)
            return
        for worker in busy:
            if worker.connection in ready and (reply := _answer(team, worker, update)) is not None:
                for job in itertools.islice(waiting, 1):
                    _assign(team, worker, update, job)
                yield reply


_now = time.monotonic


def _end(deadline: float | None) -> float | None:
    return None if deadline is None else _now() + deadline


def _assign(team: _Team, worker: _Worker, update: ClientUpdate, job: Job, attempt: int = 0) -> None:
    """Send a job, but for what the last message to this worker held already."""
    new = {k: v for k, v in job.message.items() if worker.message.get(k) is not v}
    plans = {k: {"rows": p.rows, "weight": p.weight, "lr": p.lr} for k, p in job.plans.items()}
    rest = {k: p[3:] for k, p in job.plans.items()}
    about = job.client, job.t, None if worker.update == update else update, tuple(job.message), rest
    parts = under("message", new) | under("state", job.state) | under("plan", plans)
    worker.job, worker.attempt = job, attempt
    try:
        send(worker.connection, about, parts)
    except OSError:
        _died(team, worker, update)
        return
    except Exception as e:  # pickle has a kind of error for each kind of object
        worker.job = None
        raise InputError(
            f"this method cannot be sent to other processes ({e}); define its network's class in a "
            "module, not within a function, or use no workers"
        ) from None
    worker.update, worker.message = update, job.message


def _answer(team: _Team, worker: _Worker, update: ClientUpdate) -> Reply | None:
    """What came back; None where the process is gone and its client is trained again."""
    assert worker.job is not None  # only busy workers are asked
    try:
        (failure, t), parts = receive(worker.connection)
    except (EOFError, OSError):
        _died(team, worker, update)
        return None
    client, worker.job = worker.job.client, None
    if failure is not None:
        raise failure
    # What a client keeps outlives the round; as views it would keep the update alive, too.
    changed = {k: {n: v.clone() for n, v in t.items()} for k, t in inside("changed", parts).items()}
    return Reply(client, inside("update", parts), changed, t)


def _died(team: _Team, worker: _Worker, update: ClientUpdate) -> None:
    """Train the client again in a new process, or end the run where that was done often enough."""
    job, attempt = worker.job, worker.attempt
    assert job is not None  # a worker that has nothing to do is not spoken to
    worker.process.join()
    code = worker.process.exitcode
    # SIGTERM goes to whole groups of processes; whether the run ends is for the main one to say.
    if attempt < team.retries + (code == -signal.SIGTERM):
        team.replace(worker)
        _assign(team, worker, update, job, attempt + 1)
        return
    worker.job = None
    lost = "; killed, perhaps for lack of memory: use fewer workers" if code == -9 else ""
    raise TrainingError(
        f"the process that trained client {job.client} ended without an answer, exit code "
        f"{code}{lost}"
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
