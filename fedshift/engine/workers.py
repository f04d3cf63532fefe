"""Clients side by side: processes of one thread each, which live as long as the run.

Workers are forked, so that they share the clients' data with this process; messages and states go
to them through pipes, updates come back. The result is that of `loop` on one thread bit for bit,
whatever the number of workers and the order in which they finish. `Team.blocks` hands each worker
many clients at a time, for a backend that trains them together.

A round may have a deadline. Whoever has not answered by then is ended, its clients have no answer,
and another process takes its place.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import signal
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any, NamedTuple

import torch

from fedshift.client.plans import Drawn, Draws
from fedshift.data import ClientData, Plan
from fedshift.engine.allocator import keep_memory
from fedshift.engine.backends import Backend, ClientUpdate, Job, Reply, loop
from fedshift.engine.wire import inside, receive, send, under
from fedshift.errors import InputError, TrainingError
from fedshift.tree import Params, Parts

Jobs = tuple[Job, ...]
# Shares of a round for each process: while it trains one, the replies of the other are summed.
SHARES = 2


class _Task(NamedTuple):
    """What a worker does with jobs; `within` None: one after the other."""

    update: ClientUpdate
    within: Backend | None = None


@dataclass(eq=False)
class _Worker:
    """One process, what it is busy with and for which time, and the last that it was told."""

    process: ForkProcess
    connection: Connection
    jobs: Jobs = ()
    attempt: int = 0
    task: _Task | None = None
    message: Parts = field(default_factory=dict)


@dataclass(eq=False)
class Team:
    """Processes that train clients; replaced are those that died or were ended.

    As a `Backend`, each gets one client at a time: whoever is idle gets the next.
    """

    clients: Sequence[ClientData]
    members: list[_Worker]
    deadline: float | None
    retries: int

    def __call__(self, update: ClientUpdate, jobs: Iterable[Job]) -> Iterator[Reply]:
        """The replies as they come."""
        return _share_out(self, _Task(update), ((job,) for job in jobs))

    def blocks(self, within: Backend) -> Backend:
        """Processes train equal shares of a round's clients by `within`, which is pickled."""

        def spread(update: ClientUpdate, jobs: Iterable[Job]) -> Iterator[Reply]:
            todo = tuple(jobs)
            each = max(1, -(-len(todo) // (SHARES * len(self.members))))
            shares = (todo[i : i + each] for i in range(0, len(todo), each))
            return _share_out(self, _Task(update, within), shares)

        return spread

    def hire(self) -> _Worker:
        """A new process."""
        return _hire(self.clients, [w.connection for w in self.members])

    def replace(self, worker: _Worker) -> None:
        """End a process, and put a new one in its place that has been told nothing yet."""
        worker.process.kill()
        worker.process.join()
        worker.connection.close()
        fresh = _hire(self.clients, [w.connection for w in self.members if w is not worker])
        worker.process, worker.connection, worker.jobs = fresh.process, fresh.connection, ()
        worker.task, worker.message = None, {}


@contextlib.contextmanager
def workers(
    clients: Sequence[ClientData],
    count: int,
    *,
    deadline: float | None = None,
    retries: int = 0,
) -> Iterator[Team]:
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
    team = Team(clients, [], deadline, retries)
    try:
        for _ in range(count):
            team.members.append(team.hire())
        yield team
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
        if worker.jobs:  # at work for nobody; it would not notice for a while
            worker.process.terminate()
    for worker in team:
        worker.process.join()


def _share_out(team: Team, task: _Task, shares: Iterable[Jobs]) -> Iterator[Reply]:
    """Whoever is idle gets the next share, until all are done or the time is over."""
    waiting, end = iter(shares), _end(team.deadline)
    for worker, jobs in zip(
        team.members, itertools.islice(waiting, len(team.members)), strict=False
    ):
        _assign(team, worker, task, jobs)
    while busy := [worker for worker in team.members if worker.jobs]:
        ready = set(wait([w.connection for w in busy], None if end is None else end - _now()))
        if end is not None and _now() >= end:
            for worker in busy:
                team.replace(worker)
            return
        for worker in busy:
            if worker.connection in ready and (replies := _answer(team, worker, task)) is not None:
                for jobs in itertools.islice(waiting, 1):
                    _assign(team, worker, task, jobs)
                yield from replies


_now = time.monotonic


def _end(deadline: float | None) -> float | None:
    return None if deadline is None else _now() + deadline


def _assign(team: Team, worker: _Worker, task: _Task, jobs: Jobs, attempt: int = 0) -> None:
    about, trees = _packed(jobs, worker.message)
    worker.jobs, worker.attempt = jobs, attempt
    try:
        send(worker.connection, (None if worker.task == task else task, about), trees)
    except OSError:
        _died(team, worker, task)
        return
    except Exception as e:  # pickle has a kind of error for each kind of object
        worker.jobs = ()
        raise InputError(
            f"this method cannot be sent to other processes ({e}); define its network's class in a "
            "module, not within a function, or use no workers"
        ) from None
    worker.task, worker.message = task, jobs[-1].message


def _packed(jobs: Jobs, message: Parts) -> tuple[list[Any], list[Parts]]:
    """Jobs for a pipe, but for what the message before each, first this one, holds already.

    Of plans that are not drawn yet, how to draw them.
    """
    about, trees = [], []
    for job in jobs:
        new = {k: v for k, v in job.message.items() if message.get(k) is not v}
        tree = under("message", new) | under("state", job.state)
        if isinstance(job.plans, Drawn):
            how: Any = job.plans.draws.phases, job.plans.draws.seed
        else:
            how = {k: p[3:] for k, p in job.plans.items()}
            tree |= under("plan", {k: _tensors(p) for k, p in job.plans.items()})
        about.append((job.client, job.t, tuple(job.message), how))
        trees.append(tree)
        message = job.message
    return about, trees


def _tensors(plan: Plan) -> Params:
    return {"rows": plan.rows, "weight": plan.weight, "lr": plan.lr}


def _unpacked(
    about: list[Any], trees: Sequence[Parts], message: Parts, clients: Sequence[ClientData]
) -> list[Job]:
    """What `_packed` packed."""
    jobs = []
    for (client, t, names, how), tree in zip(about, trees, strict=True):
        held = message | inside("message", tree)
        message = {name: held[name] for name in names}
        data, plans = clients[client], inside("plan", tree)
        drawn: Mapping[str, Plan]
        if isinstance(how, tuple):
            phases, seed = how
            drawn = Drawn(Draws(phases, t, seed, {client: data}), client)
        else:
            drawn = {k: Plan(p["rows"], p["weight"], p["lr"], *how[k]) for k, p in plans.items()}
        jobs.append(Job(client, message, inside("state", tree), data, drawn, t))
    return jobs


def _answer(team: Team, worker: _Worker, task: _Task) -> list[Reply] | None:
    """What came back; None where the process is gone and its clients are trained again."""
    assert worker.jobs  # only busy workers are asked
    try:
        (failure, about), trees = receive(worker.connection)
    except (EOFError, OSError):
        _died(team, worker, task)
        return None
    worker.jobs = ()
    if failure is not None:
        raise failure
    return [_reply_of(client, t, tree) for (client, t), tree in zip(about, trees, strict=True)]


def _reply_of(client: int, t: int, parts: Parts) -> Reply:
    # What a client keeps outlives the round; as views it would keep the update alive, too.
    changed = {k: {n: v.clone() for n, v in t.items()} for k, t in inside("changed", parts).items()}
    return Reply(client, inside("update", parts), changed, t)


def _died(team: Team, worker: _Worker, task: _Task) -> None:
    """Train the clients again in a new process, or end the run where that was done often enough."""
    jobs, attempt = worker.jobs, worker.attempt
    assert jobs  # a worker that has nothing to do is not spoken to
    worker.process.join()
    code = worker.process.exitcode
    # SIGTERM goes to whole groups of processes; whether the run ends is for the main one to say.
    if attempt < team.retries + (code == -signal.SIGTERM):
        team.replace(worker)
        _assign(team, worker, task, jobs, attempt + 1)
        return
    worker.jobs = ()
    lost = "; killed, perhaps for lack of memory: use fewer workers" if code == -9 else ""
    raise TrainingError(
        f"the process that trained {_named(jobs)} ended without an answer, exit code {code}{lost}"
    )


def _named(jobs: Jobs) -> str:
    ids = [str(job.client) for job in jobs]
    if len(ids) == 1:
        return f"client {ids[0]}"
    return f"clients {', '.join(ids[:5])}{', ...' if len(ids) > 5 else ''}"


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
    task: Any = None
    message: Parts = {}
    with contextlib.suppress(EOFError, OSError):
        while True:
            (fresh, about), trees = receive(connection)
            task = task if fresh is None else fresh
            jobs = _unpacked(about, trees, message, clients)
            message = jobs[-1].message
            _reply(connection, task, jobs)


def _reply(connection: Connection, task: _Task, jobs: Sequence[Job]) -> None:
    try:
        replies = list((task.within or loop)(task.update, jobs))
    except Exception as e:
        send(connection, (e, ()), ())
        return
    trees = [under("update", reply.update) | under("changed", reply.changed) for reply in replies]
    send(connection, (None, [(reply.client, reply.t) for reply in replies]), trees)
