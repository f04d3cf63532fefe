"""Train clients in worker processes, of one thread each, which live as long as the run.

Workers are forked, so that they share the clients' examples with this process without a copy.
Messages and states go to them through pipes (`engine.processes.pipe`), and updates come back. The
result is that of `loop` on one thread, bit for bit, however many workers there are and whichever
finishes first. `Team.blocks` gives each worker many clients at a time, for a backend that trains
them together; their sums are then added in another order.

A round may have a deadline. A worker that has not answered by then is killed and replaced, and its
clients count as not having answered.
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
    cut_jobs,
    in_words,
    pack,
    with_separate_plans,
)
from fedshift.engine.processes.pipe import UnsentError, receive, send, share_memory
from fedshift.engine.processes.waiting import wait_for
from fedshift.engine.processes.worker import Task, serve
from fedshift.engine.sums.summing import TermsOf, stream_of
from fedshift.errors import InputError, TrainingError
from fedshift.randomness import one_at_a_time
from fedshift.sketch import sketched
from fedshift.tree import Parts

# Shares of a round per worker. While it trains the second, the main process sums the first.
SHARES = 2
# Bytes that a pipe may buffer, if the system allows it. With the usual 200 KB, the two processes
# wake each other about a hundred times for a message of 16 MB.
BUFFER = 1 << 22
# Seconds to wait for a process whose pipe is broken to end, so that its exit code can be read.
ENDING = 1.0
# This process's ends of the pipes of all teams. A forked worker inherits copies of them and closes
# these: a worker learns that this process has ended only once no copy of its pipe's end is open.
OURS: set[Connection] = set()


@dataclass(eq=False)
class _Worker:
    """One worker process.

    room     memory that it shares with this process
    jobs     what it is busy with; empty: it is idle
    attempt  how often these jobs have been tried before
    task     the task that it was sent last, and has
    message  the message that it was sent last, and has
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
    """A backend of worker processes; one that dies or is killed is replaced.

    Each idle worker gets the next client. One round is trained at a time: to read on in the replies
    of an earlier one raises InputError.

    round: identifies the round that is being trained, see `_share_out`
    """

    clients: Sequence[ClientData]
    members: list[_Worker]
    deadline: float | None
    retries: int
    round: object = None

    def __call__(self, update: ClientUpdate, jobs: Iterable[Job]) -> Iterator[Reply]:
        """Replies in the order in which workers finish."""
        return _replies(self.stream(update, jobs))

    def stream(
        self, update: ClientUpdate, jobs: Iterable[Job], terms_of: TermsOf | None = None
    ) -> Iterator[Block]:
        """The same as blocks. Workers do not sum here: each gets one client at a time."""
        return _share_out(self, Task(update), ((job,) for job in jobs), self.members)

    def blocks(self, within: Backend) -> Backend:
        """A backend whose workers train shares of a round's clients together, by `within`.

        `within` is pickled. A worker sums its clients' updates if it may (`engine.sums.summing`),
        in another order than `loop` does. This process trains a share itself, in place of the first
        worker: with a worker on every core, it would wait for a core before it could read answers.
        With a deadline it trains none, because it cannot kill itself when it is late; nor with a
        single worker.
        """
        check_backend(within)
        return _Blocks(self, within)

    def hire(self) -> _Worker:
        """Start a worker."""
        return _hire(self.clients, share_memory())

    def replace(self, worker: _Worker) -> None:
        """Kill a worker's process and start a new one in its place."""
        _end_all([worker])
        # With the same shared memory: processes that inherited it keep it mapped as long as they
        # live, so that new memory for each new process would add up.
        fresh = _hire(self.clients, worker.room)
        worker.process, worker.connection = fresh.process, fresh.connection
        worker.task, worker.message = None, {}  # the new process has been sent nothing


@dataclass(frozen=True)
class _Blocks:
    """What `Team.blocks` gives."""

    team: Team
    within: Backend

    def __call__(self, update: ClientUpdate, jobs: Iterable[Job]) -> Iterator[Reply]:
        return _replies(self.stream(update, jobs))

    def stream(
        self, update: ClientUpdate, jobs: Iterable[Job], terms_of: TermsOf | None = None
    ) -> Iterator[Block]:
        """The same as blocks; each worker may sum its clients' updates."""
        todo, task, members = tuple(jobs), Task(update, self.within, terms_of), self.team.members
        workers_only = self.team.deadline is not None or len(members) < 2
        count, others = (0, members) if workers_only else (len(todo) // len(members), members[1:])
        planned = max(1, len(others)) * (SHARES if workers_only else 1)
        shares = list(cut_jobs(todo[count:], planned))
        # Sums wait in memory for the end of the round, one set per share. With more shares than
        # planned (the answers of one would be too large), unsummed updates need less memory.
        if len(shares) > planned:
            task = task._replace(terms_of=None)

        def here() -> Iterator[Block]:
            return stream_of(self.within)(update, with_separate_plans(todo[:count]))

        return _share_out(self.team, task, shares, others, here)


def _replies(came: Iterable[Block]) -> Iterator[Reply]:
    """Reply by reply, for callers other than a round, which takes blocks."""
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

    deadline  seconds for a round; clients that have not answered by then have no answer, and the
              gate must drop them (`Gate("drop")`). Results then depend on the clock. None: no limit
    retries   how often a client is trained again, in a new process, after its process died

    The algorithm is pickled, so its network's class must be defined in a module. Raises InputError
    for a count below 1, limits out of range, and where processes cannot be forked. The backend
    raises what `loop` raises, TrainingError if a process dies more often than `retries` allow, and
    InputError after the `with` block.
    """
    check_workers(clients, count, deadline, retries)
    # Without examples of importance 0, as in the federation that will send the jobs.
    team = Team(of_importance(clients), [], deadline, retries)
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
        # Linux lowers a request above its limit; other systems refuse it.
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
    """Give each idle worker the next share, until all are done or the deadline has passed.

    here: trains this process's own share, while the workers train their first ones.
    """
    if not team.members:
        raise InputError("these workers have ended; run within the `with` block that made them")
    # `this` identifies the round: if another one begins while a caller still reads the replies of
    # this one, `team.round` is another object, and this one must not touch the workers any more.
    waiting, end, this = iter(shares), _end(team.deadline), object()
    team.round = this
    _free(team)  # workers that are still busy with a round that was abandoned
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
            # An answer that arrived before the deadline counts, even if it is read after it.
            ready = wait_for([w.connection for w in busy], end, task.patience)
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
    about = pack(jobs, worker.message)
    worker.jobs, worker.attempt = jobs, attempt
    terms = None if task.terms_of is None else task.terms_of([job.client for job in jobs])
    bare = task._replace(terms_of=None)
    try:
        news = None if _knows(worker, bare) else bare
        # A pass in another thread may have put its own tensors into the network for the moment.
        with one_at_a_time():
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
    except Exception:  # a user's __eq__ may raise anything
        return False


def _answer(team: Team, worker: _Worker, task: Task, end: float | None) -> list[Block] | None:
    """Receive a worker's answer; None if it has none, because it is late or has died."""
    assert worker.jobs  # only busy workers are listened to
    try:
        answer: list[Block] | Exception = receive(worker.connection, worker.room, end)
    except TimeoutError:  # it began to answer before the deadline, but did not finish
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
    """Train a dead worker's clients again in a new process, or end the run after the last retry."""
    jobs, attempt = worker.jobs, worker.attempt
    assert jobs  # only a worker that was given jobs is written to or read from
    worker.process.join(ENDING)
    code = worker.process.exitcode
    team.replace(worker)
    # SIGTERM often goes to a whole process group, the main process too, which then decides whether
    # the run ends. One more attempt gives it the time; it does not count as a retry.
    if attempt < team.retries + (code == -signal.SIGTERM):
        _assign(team, worker, task, jobs, end, attempt + 1)
        return
    lost = "; killed, perhaps for lack of memory: use fewer workers" if code == -9 else ""
    how = "broke its pipe" if code is None else f"ended without an answer, exit code {code}{lost}"
    raise TrainingError(f"the process that trained {in_words(jobs)} {how}")
