"""Train clients in worker processes, of one thread each, which live as long as the run.

Workers are forked once the method and the clients are there, and share both with this process
without a copy: no code travels, so that classes made in a function or a notebook work. Messages and
states go to them through pipes, as arrays, and updates come back. The result is that of `loop` on
one thread, bit for bit, however many workers there are and whichever finishes first.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import multiprocessing
import os
import pickle
import signal
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any

import torch
from torch import Tensor

from fedshift.algorithms.method import Method
from fedshift.arguments import check_listed, check_whole
from fedshift.data import ClientData, Surveyed, of_importance
from fedshift.engine.backends import Backend, Job, Reply, Stage, check_backend, loop
from fedshift.engine.checks.replies import unplain
from fedshift.engine.federation import Federation
from fedshift.errors import FedshiftError, InputError, TrainingError
from fedshift.kernels.allocator import keep_memory
from fedshift.randomness import undrawn
from fedshift.sketch import sketched
from fedshift.tree import Parts

# Seconds to wait for a process whose pipe is broken to end, so that its exit code can be read.
ENDING = 1.0
# The workers of all teams. A forked worker inherits copies of their pipes' ends and closes these:
# it learns that this process has ended only once no copy of its own is open.
OURS: set[_Worker] = set()

# A tensor as it travels: its type, its shape and its bytes.
Array = tuple[torch.dtype, tuple[int, ...], Any]


@dataclass(eq=False)
class _Worker:
    """A worker process of the process `owner`: its jobs, and the message that it was sent last."""

    process: ForkProcess
    connection: Connection
    owner: int
    jobs: Sequence[Job] = ()
    message: Parts = field(default_factory=dict)


@sketched
@dataclass(eq=False)
class Team:
    """A backend of `count` worker processes: each idle one gets the next client.

    One round is trained at a time: to read on in the replies of an earlier one raises InputError.
    """

    clients: Sequence[ClientData]
    count: int
    members: list[_Worker] = field(default_factory=list)
    ended: bool = False
    # What the workers were forked with.
    _stage: Stage | None = field(default=None, repr=False)
    _within: Backend = loop
    _turn: object = None  # identifies the round that is being trained

    def blocks(self, within: Backend) -> Shares:
        """A backend of these workers, each of which trains a share of a round by `within`."""
        check_backend(within)
        return Shares(self, within)

    def begin(self, algorithm: Method, federation: Federation, within: Backend = loop) -> None:
        """Fork the workers of a run. Later, a process that torch lets use a GPU could not."""
        drops, seed = federation.gate.on_bad == "drop", federation.seeds.batch
        self._fork(Stage(algorithm, 0, federation.clients, seed, drops), within)

    def __call__(self, stage: Stage, jobs: Iterable[Job]) -> Iterator[Reply]:
        """Replies in the order in which workers finish."""
        return self.train(stage, ((job,) for job in jobs), loop)

    def train(
        self, stage: Stage, shares: Iterable[Sequence[Job]], within: Backend
    ) -> Iterator[Reply]:
        """Train each share by `within` in one worker."""
        if self.ended:
            raise InputError("these workers have ended; run within the `with` block that made them")
        if self._within is not within or self._stage is None or not _alike(self._stage, stage):
            self._fork(stage, within)
        turn = self._turn = object()
        self._free()  # workers that are still busy with a round that was abandoned
        left = iter(shares)
        try:
            for worker in self.members:
                self._assign(worker, stage.t, next(left, ()))
            while busy := [w for w in self.members if w.jobs]:
                ready = wait([w.connection for w in busy])
                for worker in busy:
                    if worker.connection not in ready:
                        continue
                    replies = self._answer(worker)
                    self._assign(worker, stage.t, next(left, ()))
                    yield from replies
                    if self._turn is not turn:
                        raise InputError(
                            "another round began on these workers; what was left of this one is "
                            "lost"
                        )
        finally:
            if self._turn is turn:
                self._free()

    def end(self) -> None:
        """End all workers."""
        self.ended = True
        self._kill()

    def _fork(self, stage: Stage, within: Backend) -> None:
        _check_clients(self.clients, stage.clients)
        self._kill()
        self._stage, self._within = stage, within
        for _ in range(self.count):
            self.members.append(_hire(stage, within))

    def _free(self) -> None:
        """Replace workers that are busy; their answers would be discarded."""
        assert self._stage is not None
        for i, worker in enumerate(self.members):
            if worker.jobs:
                _end([worker])
                self.members[i] = _hire(self._stage, self._within)

    def _kill(self) -> None:
        _end(self.members)
        self.members.clear()

    def _assign(self, worker: _Worker, t: int, jobs: Sequence[Job]) -> None:
        if not jobs:
            return
        packed = []
        for job in jobs:
            # Most of a message is the same for all clients: it travels once.
            new = {k: v for k, v in job.message.items() if worker.message.get(k) is not v}
            packed.append((job.client, [*job.message], pack(new), pack(job.state)))
            worker.message = job.message
        worker.jobs = jobs
        try:
            worker.connection.send((t, packed))
        except OSError:
            self._died(worker)

    def _answer(self, worker: _Worker) -> list[Reply]:
        try:
            answer = worker.connection.recv()
        except (EOFError, OSError):
            self._died(worker)
        worker.jobs = ()
        if isinstance(answer, Exception):
            raise answer
        return [Reply(i, unpack(sent), unpack(kept), t, why) for i, sent, kept, t, why in answer]

    def _died(self, worker: _Worker) -> None:
        worker.process.join(ENDING)
        code = worker.process.exitcode
        lost = "; killed, perhaps for lack of memory: use fewer workers" if code == -9 else ""
        how = "broke its pipe" if code is None else f"ended without an answer, exit code {code}"
        ids = ", ".join(str(job.client) for job in worker.jobs[:5])
        ids += ", ..." if len(worker.jobs) > 5 else ""
        many = "s" if len(worker.jobs) > 1 else ""
        raise TrainingError(f"the process that trained client{many} {ids} {how}{lost}")


@dataclass(frozen=True, eq=False)
class Shares:
    """What `Team.blocks` gives: each worker trains a share of the round by `within`."""

    team: Team
    within: Backend

    def begin(self, algorithm: Method, federation: Federation) -> None:
        """As `Team.begin`."""
        self.team.begin(algorithm, federation, self.within)

    def __call__(self, stage: Stage, jobs: Iterable[Job]) -> Iterator[Reply]:
        """Replies share by share."""
        todo = list(jobs)
        size = max(1, -(-len(todo) // self.team.count))
        shares = (todo[i : i + size] for i in range(0, len(todo), size))
        return self.team.train(stage, shares, self.within)


def _alike(one: Stage, other: Stage) -> bool:
    """Whether workers forked with one stage can train the other."""
    same = one.algorithm is other.algorithm and one.clients is other.clients
    return same and (one.seed, one.drops, one.trainer, one.most) == (
        other.seed, other.drops, other.trainer, other.most,
    )  # fmt: skip


@contextlib.contextmanager
def workers(clients: Sequence[ClientData], count: int) -> Iterator[Team]:
    """A backend of `count` processes, to be used within the `with` block.

        with workers(federation.clients, 2) as backend:
            for played in run(algorithm, federation, 10, backend=backend): ...

    Raises InputError for a count below 1 and where processes cannot be forked. The backend raises
    what `loop` raises, TrainingError if a process dies, and InputError after the `with` block and
    for a run of other clients.
    """
    check_whole("the number of workers", count)
    if count < 1:
        raise InputError(f"{count} workers; give 1 or more")
    check_listed("clients", clients, ClientData, "give federation.clients")
    if "fork" not in multiprocessing.get_all_start_methods():
        raise InputError("workers need a system that can fork processes; leave them out")
    # Checked here, because Python itself only asserts it.
    if multiprocessing.current_process().daemon:
        raise InputError(
            "workers cannot be made in a daemonic process, as those of multiprocessing.Pool are; "
            "leave them out there, or use concurrent.futures.ProcessPoolExecutor"
        )
    # Without examples of importance 0, as in the federation that will run.
    team = Team(of_importance(clients), count)
    try:
        yield team
    finally:
        team.end()


def _check_clients(given: Sequence[ClientData], clients: Sequence[ClientData]) -> None:
    """InputError if a run has other clients than those that the workers were made for."""
    if given is clients or isinstance(given, Surveyed):  # made on demand: it would make each
        return
    for i, data in enumerate(clients):
        here = given[i] if i < len(given) else None
        if here is not data and (
            here is None
            or not all(a is b or torch.equal(a, b) for a, b in zip(here, data, strict=True))
        ):
            raise InputError(
                f"client {i} has other examples than the one that these workers were made for; "
                "make them with the clients of the federation that runs"
            )


def _hire(stage: Stage, within: Backend) -> _Worker:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    given = (theirs, (ours, *(worker.connection for worker in OURS)), stage, within)
    process = context.Process(target=_serve, args=given, daemon=True)
    with theirs:
        try:
            process.start()
        except OSError:
            ours.close()
            raise
    worker = _Worker(process, ours, os.getpid())
    OURS.add(worker)
    return worker


def _end(members: Sequence[_Worker]) -> None:
    """Kill processes whose work is not needed.

    Closing the pipe is not enough: a process forked later may have inherited the other end.
    """
    for worker in members:
        worker.process.kill()
        worker.connection.close()
        OURS.discard(worker)
    for worker in members:
        worker.process.join()


@atexit.register
def _end_those_left() -> None:
    """End the workers of teams that were never ended: at exit they would be waited for."""
    _end([worker for worker in OURS if worker.owner == os.getpid()])


def pack(parts: Parts) -> dict[str, dict[str, Array]]:
    """Parts as they travel: arrays pickle by their bytes, torch would hand over files."""
    return {part: {k: _array(v) for k, v in tree.items()} for part, tree in parts.items()}


def _array(v: Tensor) -> Array:
    plain = v.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return v.dtype, tuple(v.shape), plain.reshape(-1).view(torch.uint8).numpy()


def unpack(parts: dict[str, dict[str, Array]]) -> Parts:
    """The inverse of `pack`."""
    return {part: {k: _tensor(*v) for k, v in tree.items()} for part, tree in parts.items()}


def _tensor(kind: torch.dtype, shape: tuple[int, ...], data: Any) -> Tensor:
    # Into memory aligned by torch: elsewhere kernels may round differently.
    made = torch.empty(shape, dtype=kind)
    made.reshape(-1).view(torch.uint8).numpy()[:] = data
    return made


def _serve(
    connection: Connection, others: Sequence[Connection], stage: Stage, within: Backend
) -> None:
    """Answer jobs until the pipe is closed.

    others: copies of the main process's ends of pipes, inherited by the fork.
    """
    # While a copy of the main process's end is open, a worker does not notice that it has ended.
    for other in others:
        other.close()
    # A signal often goes to every process of a terminal or a group; the main process decides what
    # to do, and ends its workers.
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    # Workers share the cores; and the number of threads decides the order of sums, hence the bits.
    torch.set_num_threads(1)
    keep_memory()
    message: Parts = {}
    # The fork may have happened within `torch.no_grad()` or inference mode.
    with torch.inference_mode(False), torch.enable_grad(), contextlib.suppress(EOFError, OSError):
        while True:
            t, packed = connection.recv()
            stage = stage if t == stage.t else replace(stage, t=t)
            jobs = []
            for client, names, new, state in packed:
                message = message | unpack(new)
                message = {name: message[name] for name in names}
                jobs.append(Job(client, t, message, unpack(state)))
            connection.send(_answered(stage, within, jobs))


def _answered(stage: Stage, within: Backend, jobs: Sequence[Job]) -> object:
    """What is sent back: the packed replies, or the error that training raised."""
    try:
        with undrawn(stage.algorithm.model.net):
            return [_packed(reply) for reply in within(stage, jobs)]
    except Exception as e:
        return e if _arrives(e) else TrainingError(f"{type(e).__name__}: {e}")


def _packed(reply: Reply) -> tuple[Any, ...]:
    for parts, did in ((reply.update, "sent"), (reply.changed, "would keep")):
        if odd := unplain(parts):
            return reply.client, {}, {}, reply.t, f"it {did} {odd}"
    return reply.client, pack(reply.update), pack(reply.changed), reply.t, reply.failed


def _arrives(e: Exception) -> bool:
    """Whether an error can be rebuilt from its arguments in the main process."""
    if not (isinstance(e, FedshiftError) or type(e).__module__ == "builtins"):
        return False
    try:
        return type(copy.copy(e)) is type(e) and bool(pickle.dumps(e))
    except Exception:
        return False
