"""Engines: what runs the rounds of an experiment, with its clients in this or other processes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pkgutil import resolve_name
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from fedshift.algorithms.method import Method
from fedshift.engine.backend_names import FIT, GONE, NAMES, ON_IMAGES, ONE_BY_ONE, QUICKER, SPREAD
from fedshift.engine.backends import Backend, loop
from fedshift.engine.choosing.fastest import check_fit, probe
from fedshift.engine.choosing.loop_or_workers import Quicker, forks_safely
from fedshift.engine.device import on
from fedshift.engine.processes.pool import Team, workers
from fedshift.engine.run import Federation, Round, run
from fedshift.engine.stacking.stacked import Stacked
from fedshift.engine.traffic import Meter
from fedshift.errors import InputError, unknown
from fedshift.evaluation.scores import OwnScores, Score
from fedshift.experiments.config.schema import Training
from fedshift.kernels.elsewhere import outputs_on
from fedshift.router.parts import Clients


class Engine(Protocol):
    """What runs the rounds of a run: in this process, in workers, or on Flower's nodes."""

    @property
    def backend(self) -> str:
        """Name of the backend whose results this engine reproduces bit for bit."""

    @property
    def tells_drops(self) -> bool:
        """Whether it reports a dropout during the round, and not only after it."""

    def rounds(
        self,
        algorithm: Method,
        federation: Federation,
        training: Training,
        options: Mapping[str, Any],
        *,
        after: Round | None,
        meter: Meter,
    ) -> Iterator[Round]:
        """All rounds after `after`, one by one.

        options: the method's options as chosen; an engine whose clients build the method
        themselves passes them on. meter: counts the bytes of each round. Raises InputError for
        training that the engine cannot do. Raises UnfitError for a method or network that its
        backend cannot train: at the call itself, and not at the first round.
        """

    def client_scores(self, current: Round) -> Mapping[int, Score] | None:
        """Each client's score of a round's model on its validation examples, by client id.

        None if this process holds those examples: it then computes the scores itself.
        """


@runtime_checkable
class OnSites(Protocol):
    """An engine whose clients keep their models to themselves and send counts and sums only."""

    def own_scores(self, algorithm: Method, current: Round) -> Mapping[int, OwnScores]:
        """The scores of the clients that answered, by id; `current` is the last round."""

    def sites(self) -> Clients:
        """All clients, to fit the last round's router again with their sums."""

    @property
    def on_sites(self) -> bool:
        """True if each client tests its own model on its own examples; False if the server does."""

    @property
    def refits(self) -> tuple[str, ...]:
        """The names of the fits to make."""


Say = Callable[[str], None]


def check_name(name: str) -> str:
    """The name of a backend. Raises InputError for any other."""
    if name in GONE:
        raise InputError(
            f"the backend {name} is gone, since it was hardly faster: use {GONE[name]}"
        )
    if name not in NAMES:
        raise unknown("backend", name, NAMES)
    return name


class Way(NamedTuple):
    """The name of a backend, and its number of worker processes; 0 for this process alone."""

    name: str
    processes: int = 0

    def __str__(self) -> str:
        many = f"{self.processes} workers"
        if self.name == "workers":
            return many
        return f"{self.name} in {many}" if self.processes else self.name

    @property
    def numbers(self) -> str:
        """Name of the backend with the same numbers bit for bit in the fewest processes."""
        if self.name in ("workers", QUICKER):
            return "loop"
        # A process of "dense" sums its clients as one, so last digits depend on how many there are.
        return str(self) if self.name == "dense" else self.name

    @staticmethod
    def parse(numbers: str) -> Way:
        """The inverse of `numbers`: "dense in 4 workers" as Way("dense", 4)."""
        name, _, many = numbers.partition(" in ")
        return Way(name, int(many.partition(" ")[0]) if many else 0)

    def alone(self) -> Backend:
        """The backend without worker processes."""
        # "cuda" trains stacked clients: one by one, a GPU mostly waits for its kernels to be
        # launched.
        if self.name.startswith("cuda"):
            return on("cuda", loop if self.name == "cuda-loop" else Stacked())
        if self.name in ("stacked", "dense"):
            return Stacked(dense=self.name == "dense")
        return self._each(loop)

    def over(self, team: Team) -> Backend:
        """The backend in worker processes.

        An idle worker gets the next client. With "dense" each gets one block of clients at once.
        """
        if self.name == "dense":
            return team.blocks(Stacked(dense=True))
        return self._each(team)

    def _each(self, backend: Backend) -> Backend:
        return resolve_name(ONE_BY_ONE[self.name])(backend) if self.name in ONE_BY_ONE else backend


def evaluating(engine: Engine) -> contextlib.AbstractContextManager[None]:
    """Within the block, models are evaluated on the device on which clients train."""
    on_gpu = isinstance(engine, InProcess) and engine.backend.startswith("cuda")
    return outputs_on("cuda") if on_gpu else contextlib.nullcontext()


def processes(count: int) -> Engine:
    """The engine that trains `count` clients at once, each on one thread.

    The result is that of one process bit for bit. Raises InputError for a count below 1, and for a
    configuration with more threads than one.
    """
    return backend_of("workers", count)


def default_engine() -> Engine:
    """The engine of runs that name no backend: `loop` or `workers`, whichever proves faster.

    The numbers are those of `loop` bit for bit.
    """
    return InProcess(Way(QUICKER, os.cpu_count() or 1))


def backend_of(name: str, count: int | None = None, say: Say = lambda line: None) -> Engine:
    """The engine that trains on this machine with the backend of this name.

    count   processes of "workers", and the most that "auto" may use; None means one per core.
            "dense" and "channels-last" use one process unless a count is given
    say     gets one line on what "auto" has chosen and why, once per experiment

    Raises InputError for a count below 1, for a count with a backend of one process, and for
    "cuda" without such a device. `rounds` refuses workers if the configuration asks for more than
    one thread; "auto" then does not try them.
    """
    Way(check_name(name)).alone()  # a missing device is refused before training
    if count is not None and count < 1:
        raise InputError(f"--workers {count}: give 1 or more")
    if count is not None and name not in SPREAD:
        raise InputError(
            f"--workers {count} is for the backends {', '.join(SPREAD)}; {name} is one process"
        )
    if count is None:
        count = (os.cpu_count() or 1) if name in ("workers", "auto") else 0
    return InProcess(Way(name, count), say)


@dataclass
class InProcess:
    """Trains clients on this machine; "auto" picks its backend in an experiment's first run.

    say: gets one line on what "auto" has chosen and why. used: the backend of the last run.
    """

    way: Way = Way("loop")
    say: Say = field(default=lambda line: None, repr=False)
    used: Way | None = None
    tells_drops = False

    def client_scores(self, current: Round) -> None:
        """As `Engine`; None, since this process holds all examples."""

    @property
    def backend(self) -> str:
        """As `Engine`; before the first run, the name of the backend that was asked for."""
        return (self.used or self.way).numbers

    def rounds(
        self,
        algorithm: Method,
        federation: Federation,
        training: Training,
        options: Mapping[str, Any],
        *,
        after: Round | None = None,
        meter: Meter | None = None,
    ) -> Iterator[Round]:
        """As `Engine`; the options are not needed here."""
        if self.way.name == QUICKER:
            self.way = _default_way(self.way, training)
        _check_limits(self.way, training)
        cohort = training.cohort
        # Backends outside FIT train some methods and networks only: refuse the others before any
        # file of the run is written.
        if self.way.name not in FIT:
            backend = self.way.alone()
            check_fit(backend, algorithm, federation, training.rounds, cohort=cohort, after=after)
        if self.way.processes and self.way.name != QUICKER:
            return self._spread(algorithm, federation, training, after, meter)
        self.used, backend = self.way, self.way.alone()
        if self.way.name == QUICKER:
            count = min(self.way.processes, _useful_processes(federation, training))
            hire = partial(workers, federation.clients, count)
            backend = Quicker(hire, count, training.rounds)
        played = run(
            algorithm, federation, training.rounds,
            cohort=cohort, backend=backend, after=after, meter=meter,
        )  # fmt: skip
        return backend.during(played) if isinstance(backend, Quicker) else played

    def _spread(
        self, algorithm: Method, federation: Federation, training: Training,
        after: Round | None, meter: Meter | None,
    ) -> Iterator[Round]:  # fmt: skip
        """Rounds trained in worker processes, unless "auto" finds another way faster."""
        cohort = training.cohort
        most = _useful_processes(federation, training)
        if self.way.name == "auto":
            # "auto" trains in this process first, and forks then: see `check_forked`.
            forks = training.threads == 1 and not torch.cuda.is_available()
            count = min(self.way.processes, most) if forks else 0
            self.way = _fastest(algorithm, federation, cohort, count, self.say)
        way = self.used = self.way._replace(processes=min(self.way.processes, most))
        with contextlib.ExitStack() as stack:
            backend = way.alone()
            if way.processes:
                backend = way.over(stack.enter_context(workers(federation.clients, way.processes)))
            yield from run(
                algorithm, federation, training.rounds,
                cohort=cohort, backend=backend, after=after, meter=meter,
            )  # fmt: skip


def _useful_processes(federation: Federation, training: Training) -> int:
    """One process for each client of a round: more of them would stay idle."""
    return len(federation.clients) if training.cohort is None else training.cohort


def _default_way(way: Way, training: Training) -> Way:
    """What trains if no backend was named: the faster of workers and loop, or the loop."""
    spread = training.threads == 1 and way.processes > 1 and forks_safely()
    return way if spread else Way("loop")


def _check_limits(way: Way, training: Training) -> None:
    """Raise InputError for threads that the backend cannot respect, and what is Flower's."""
    spread = way.processes > 0 and way.name not in ("auto", QUICKER)
    if training.threads != 1 and spread:
        raise InputError(
            f"training.threads = {training.threads}, and workers have one thread each; set it to "
            "1, or leave out --workers"
        )
    for name, given in (("deadline", training.deadline), ("retries", training.retries)):
        if given:
            raise InputError(
                f"training.{name} = {given:g} is for Flower, whose clients may be late or fail; "
                "leave it out here"
            )


def _fastest(
    algorithm: Method, federation: Federation, cohort: int | None, count: int, say: Say
) -> Way:
    """The backend that is fastest in the first steps of round 1, with up to `count` processes."""
    with _open_contenders(federation, count) as contenders:
        named = {str(way): contender for way, contender in contenders.items()}
        spread = {str(way): way.processes for way in contenders if way.processes}
        probed = probe(named, algorithm, federation, cohort, spread)
    say(probed.line())
    return next((way for way in contenders if str(way) == probed.fastest), Way("loop"))


@contextlib.contextmanager
def _open_contenders(federation: Federation, count: int) -> Iterator[Mapping[Way, Backend]]:
    """The backends that "auto" compares with the loop; workers only if `count` is above 1."""
    left_out = ("auto", *(ON_IMAGES if federation.clients[0].x.dim() != 4 else ()))
    ways = [Way(name) for name in ("stacked", "dense", *ONE_BY_ONE) if name not in left_out]
    if torch.cuda.is_available():
        ways += [Way("cuda"), Way("cuda-loop")]
    with contextlib.ExitStack() as stack:
        contenders: dict[Way, Backend] = {way: way.alone() for way in ways}
        # Where processes cannot be forked, `workers` raises, and the others are compared alone.
        with contextlib.suppress(InputError):
            if count > 1:
                team = stack.enter_context(workers(federation.clients, count))
                spread = [Way(name, count) for name in SPREAD if name not in left_out]
                contenders |= {way: way.over(team) for way in spread}
        yield contenders
