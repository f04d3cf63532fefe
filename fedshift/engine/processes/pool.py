"""Clients side by side: processes of one thread each, which live as long as the run.

Workers are forked, so that they share the clients' data with this process. Messages and states go
to them through pipes (`engine.processes.pipe`), and updates come back. The result is that of `loop`
on one thread, bit for bit, whatever the number of workers and the order in which they finish.
`Team.blocks` hands each worker many clients at a time, for a backend that trains them together;
there sums may be sums of sums.

A round may have a deadline. A worker that has not answered by then is killed, its clients have no
answer, and a new process takes its place.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import signal
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess

from fedshift.arguments import check_listed, check_number, check_whole
from fedshift.data import ClientData, of_importance
from fedshift.engine.backend_checks import check_backend
from fedshift.engine.backends import Backend, Block, ClientUpdate, Job, Reply
from fedshift.engine.processes.messages import (
    Jobs,
    check_clients,
    cut,
    named,
    packed,
    with_separate_plans,
)
from fedshift.engine.processes.pipe import UnsentError, receive, send, shared
from fedshift.engine.processes.waiting import heard
from fedshift.engine.processes.worker import Task, serve
from fedshift.engine.sums.summing import TermsOf, streamed
from fedshift.errors import InputError, TrainingError
from fedshift.kernels.products import faster
from fedshift.randomness import one_at_a_time
from fedshift.sketch import sketched
from fedshift.tree import Parts

# Shares of a round for each worker: while it trains one, the main process sums the other's replies.
SHARES = 2
# Bytes that a pipe may buffer, where the system allows as many: with the usual 200 KB processes
# wake each other a hundred times for 16 MB.
BUFFER = 1 << 22
# Seconds that a process may take to end whose pipe is broken.
ENDING = 1.0
# This process's ends of the pipes of all teams. Workers close the copies that they inherit: an open
# copy would keep other workers waiting after this process has ended.
OURS: set[Connection] = set()


@dataclass(eq=False)
class _Worker:
    """One process, the jobs it is busy with, how often they were tried, and what it was sent last.

    room: memory that both processes see
    """

    process: ForkProcess
    connection: Connection
    room: memoryview
    jobs: Jobs = ()
    attempt: int = 0
    task: Task | None = None
    message: Parts = field(default_factory=dict)


@sketched
@dataclass(eq=False)
class Team:
    """Processes that train clients; those that die or are killed are replaced.

    As a `Backend`, it gives each idle process the next client. It plays one round at a time:
    continuing an earlier one raises InputError.
    """

    clients: Sequence[ClientData]
    members: list[_Worker]
    deadline: float | None
    retries: int
    round: object = None

    def __call__(self, update: ClientUpdate, jobs: Iterable[Job]) -> Iterator[Reply]:
        """The replies as they come."""
        return _replies(self.stream(update, jobs))

    def stream(
        self, update: ClientUpdate, jobs: Iterable[Job], terms_of: TermsOf | None = None
    ) -> Iterator[Block]:
        """The same; single clients are not summed where they are trained."""
        return _share_out(self, Task(update), ((job,) for job in jobs), self.members)

    def blocks(self, within: Backend) -> Backend:
        """Processes train shares of a round's clients by `within`, which is pickled.

        Each sums what it trains where it may (`engine.sums.summing`), in another order than `loop`.
        This process trains the first one's share: with as many others as cores, it would have to
        wait for a core before it could read their answers. It does not where there is a deadline,
        because it cannot kill itself, nor where there is one worker only.
        """
        check_backend(within)
        return _Blocks(self, within)

    def hire(self) -> _Worker:
        """A new process."""
        return _hire(self.clients, shared())

    def replace(self, worker: _Worker) -> None:
        """Kill a process and start a new one in its place, which has been sent nothing yet."""
        _end_all([worker])
        # The new process uses the same shared memory: another one would stay mapped in all others.
        fresh = _hire(self.clients, worker.room)
        worker.process, worker.connection = fresh.process, fresh.connection
        worker.task, worker.message = None, {}


@dataclass(frozen=True)
class _Blocks:
    """`Team.blocks`."""

    team: Team
    within: Backend

    def __call__(self, update: ClientUpdate, jobs: Iterable[Job]) -> Iterator[Reply]:
        return _replies(self.stream(update, jobs))

    def stream(
        self, update: ClientUpdate, jobs: Iterable[Job], terms_of: TermsOf | None = None
    ) -> Iterator[Block]:
        """The same, but that each other process sums its clients' updates."""
        todo, task, members = tuple(jobs), Task(update, self.within, terms_of), self.team.members
        alone = self.team.deadline is not None or len(members) < 2
        count, others = (0, members) if alone else (len(todo) // len(members), members[1:])
        most = max(1, len(others)) * (SHARES if alone else 1)
        shares = list(cut(todo[count:], most))
        if len(shares) > most:  # sums stay until the end, and would be more than updates
            task = task._replace(terms_of=None)

        def here() -> Iterator[Block]:
            return streamed(self.within)(update, with_separate_plans(todo[:count]))

        return _share_out(self.team, task, shares, others, here)


def _replies(came: Iterable[Block]) -> Iterator[Reply]:
    """Clients one by one, for callers other than the rounds of a run."""
    for one in came:
        yield from one.replies()
        del one  # while the next one is trained


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
    backend raises what `loop` raises, TrainingError where a process dies once too often, and
    InputError after the `with` block.
    """
    check_workers(clients, count, deadline, retries)
    team = Team(of_importance(clients), [], deadline, retries)  # as a federation has them
    faster()  # asked here, all processes answer alike
    try:
        for _ in range(count):
            team.members.append(team.hire())
        yield team
    finally:
        _end_all(team.members)
        team.members.clear()


def check_workers(clients: object, count: int, deadline: float | None, retries: int) -> None:
    """Raise InputError for invalid arguments of `workers`, and where processes cannot fork."""
    check_whole("the number of workers", count)
    check_whole("retries", retries)
    if deadline is not None:
        check_number("deadline", deadline)
    if count < 1:
        raise InputError(f"{count} workers; give 1 or more")
    check_listed("clients", clients, ClientData, "give federation.clients")
    if retries < 0 or not (deadline is None or deadline > 0):
        raise InputError(
            f"deadline={deadline}, retries={retries}; allowed: deadline > 0, retries >= 0"
        )
    if "fork" not in multiprocessing.get_all_start_methods():
        raise InputError("workers need a system that can fork processes; leave them out")
    # Checked here, because Python itself only asserts it.
    if multiprocessing.current_process().daemon:
        raise InputError(
            "workers cannot be made in a daemonic process, as those of multiprocessing.Pool are; "
            "leave them out there, or use concurrent.futures.ProcessPoolExecutor"
        )


def _hire(clients: Sequence[ClientData], room: memoryview) -> _Worker:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    for end in (ours, theirs):
        # Linux gives as much as it allows, others refuse what they do not.
        with (
            contextlib.suppress(OSError),
            socket.fromfd(end.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as line,
        ):
            line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
    given = (theirs, room, clients, (ours, *OURS))
    process = context.Process(target=serve, args=given, daemon=True)
    with theirs:
        try:
            process.start()
        except OSError:
            ours.close()
            raise
    OURS.add(ours)
    return _Worker(process, ours, room)


def _end_all(team: Sequence[_Worker]) -> None:
    """Kill processes whose work is not needed.

    Closing the pipe is not enough: a process forked later may have inherited the other end.
    """
    for worker in team:
        worker.process.kill()
        worker.connection.close()
        OURS.discard(worker.connection)
        worker.jobs = ()
    for worker in team:
        worker.process.join()


def _share_out(
    team: Team, task: Task, shares: Iterable[Jobs], members: Sequence[_Worker],
    here: Callable[[], Iterable[Block]] = tuple,
) -> Iterator[Block]:  # fmt: skip
    """Give each idle worker the next share, until all are done or the time is over.

    here: trains this process's share while the workers train the first ones.
    """
    if not team.members:
        raise InputError("these workers have ended; run within the `with` block that made them")
    waiting, end, this = iter(shares), _end(team.deadline), object()
    team.round = this
    _free(team)  # of a round that was abandoned
    try:
        for worker, jobs in zip(members, itertools.islice(waiting, len(members)), strict=False):
            _assign(team, worker, task, jobs, end)
        yield from here()
        while (busy := [w for w in members if w.jobs]) or team.round is not this:
            if team.round is not this:
                raise InputError(
                    "another round began on these workers; what was left of this one is lost"
                )
            late = end is not None and _now() >= end
            # Answers that arrived before the deadline count, even if they are read after it.
            ready = heard([w.connection for w in busy], end, task.patience)
            if late and not ready:
                return
            for worker in busy:
                if worker.connection not in ready:
                    continue
                replies = _answer(team, worker, task, end)
                for jobs in () if replies is None or late else itertools.islice(waiting, 1):
                    _assign(team, worker, task, jobs, end)
                yield from replies or ()
    finally:
        if team.round is this:
            _free(team)


def _free(team: Team) -> None:
    """Kill workers that are late or orphaned by an error; their answers would be discarded."""
    for worker in team.members:
        if worker.jobs:
            team.replace(worker)


_now = time.monotonic


def _end(deadline: float | None) -> float | None:
    return None if deadline is None else _now() + deadline


def _assign(
    team: Team, worker: _Worker, task: Task, jobs: Jobs, end: float | None, attempt: int = 0
) -> None:
    check_clients(team.clients, jobs)
    about = packed(jobs, worker.message)
    worker.jobs, worker.attempt = jobs, attempt
    terms = None if task.terms_of is None else task.terms_of([job.client for job in jobs])
    bare = task._replace(terms_of=None)
    try:
        news = None if _knows(worker, bare) else bare
        with one_at_a_time():  # elsewhere a pass may have other tensors in the network's places
            send(worker.connection, (news, about, terms), worker.room, end)
    except TimeoutError:
        team.replace(worker)
    except OSError:
        _died(team, worker, task, end)
    except UnsentError as e:
        worker.jobs = ()
        raise InputError(
            f"this method cannot be sent to other processes ({e}); define its network's class, and "
            "what trains within them, in a module, not within a function, or use no workers"
        ) from None
    else:
        worker.task, worker.message = bare, jobs[-1].message


def _knows(worker: _Worker, task: Task) -> bool:
    """True if the worker already has this task; tasks that cannot be compared are sent again."""
    try:
        return bool(worker.task == task)
    except Exception:  # whatever an __eq__ of one's own may raise
        return False


def _answer(team: Team, worker: _Worker, task: Task, end: float | None) -> list[Block] | None:
    """The worker's answer; None where it is gone and its clients are trained again."""
    assert worker.jobs  # only busy workers are asked
    try:
        answer: list[Block] | Exception = receive(worker.connection, worker.room, end)
    except TimeoutError:  # it began to answer before the deadline, and did not finish
        team.replace(worker)
        return None
    except (EOFError, OSError):
        _died(team, worker, task, end)
        return None
    worker.jobs = ()
    if isinstance(answer, Exception):
        raise answer
    return answer


def _died(team: Team, worker: _Worker, task: Task, end: float | None) -> None:
    """Train the clients again in a new process, or end the run after the last retry."""
    jobs, attempt = worker.jobs, worker.attempt
    assert jobs  # an idle worker is sent nothing
    worker.process.join(ENDING)
    code = worker.process.exitcode
    team.replace(worker)
    # SIGTERM often goes to a whole process group; the main process decides whether the run ends.
    if attempt < team.retries + (code == -signal.SIGTERM):
        _assign(team, worker, task, jobs, end, attempt + 1)
        return
    lost = "; killed, perhaps for lack of memory: use fewer workers" if code == -9 else ""
    how = "broke its pipe" if code is None else f"ended without an answer, exit code {code}{lost}"
    raise TrainingError(f"the process that trained {named(jobs)} {how}")
