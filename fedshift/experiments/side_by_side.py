"""An experiment whose clients train by another backend than one after the other."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import torch

from fedshift.algorithms.base import Algorithm
from fedshift.engine.backends import Backend, loop
from fedshift.engine.device import on
from fedshift.engine.levers import channels_last
from fedshift.engine.probe import check_fit, probe
from fedshift.engine.rounds import Federation, Round, run
from fedshift.engine.stacked import Stacked
from fedshift.engine.traffic import Meter
from fedshift.engine.workers import Team, workers
from fedshift.errors import InputError, unknown
from fedshift.experiments.config import Config
from fedshift.experiments.experiment import Engine, check_deadline, check_retries
from fedshift.experiments.training import Play

Name = Literal["loop", "workers", "stacked", "dense", "channels-last", "cuda", "cuda-loop", "auto"]
# Those that can train several clients at once, in processes.
SPREAD = ("workers", "dense", "channels-last", "auto")
# Those of one process whose numbers do not depend on how fast they are.
ALONE = tuple(name for name in get_args(Name) if name not in ("workers", "auto"))
# Those that train whatever the loop trains, or find out themselves what they can.
FIT = ("loop", "workers", "cuda-loop", "auto")
# Faster ways to train one client, by name.
ONE_BY_ONE: Mapping[str, Callable[[Backend], Backend]] = {
    "channels-last": channels_last,
}
Say = Callable[[str], None]


def processes(count: int) -> Engine:
    """The engine that trains `count` clients at once, each on one thread.

    The result is that of one process bit for bit. Raises InputError for a count below 1, and for a
    configuration with more threads than one.
    """
    return backend_of("workers", count)


def backend_of(name: str, count: int | None = None, say: Say = lambda line: None) -> Engine:
    """The engine in this process by the backend of this name.

    count   processes of "workers", and the most that "auto" may take, None being one per core;
            "dense" and "channels-last" are one process unless it is given
    say     is told in one line what "auto" has chosen and why, once per experiment

    Raises InputError for a count below 1 or one that the backend has no use for, for "cuda" where
    there is no such device, and for workers where the configuration has more threads than one;
    "auto" then leaves them out.
    """
    Way(check_name(name)).alone()  # a device that is not there says so before anything is trained
    if count is not None and count < 1:
        raise InputError(f"--workers {count}: give 1 or more")
    if count is not None and name not in SPREAD:
        raise InputError(
            f"--workers {count} is for the backends {', '.join(SPREAD)}; {name} is one process"
        )
    if count is None:
        count = (os.cpu_count() or 1) if name in ("workers", "auto") else 0
    return _Chosen(Way(name, count), say)


def check_name(name: str) -> str:
    """The name of a backend. Raises InputError for any other."""
    if name == "winograd":
        raise InputError(
            "the backend winograd is gone, since it was hardly faster: use channels-last"
        )
    if name not in get_args(Name):
        raise unknown("backend", name, get_args(Name))
    return name


class Way(NamedTuple):
    """A backend by name, and in how many processes; 0: in this one."""

    name: str
    processes: int = 0

    def __str__(self) -> str:
        many = f"{self.processes} workers"
        if self.name == "workers":
            return many
        return f"{self.name} in {many}" if self.processes else self.name

    @property
    def numbers(self) -> str:
        """The name of what gives the same numbers bit for bit in as few processes as may be."""
        if self.name == "workers":
            return "loop"
        return str(self) if self.name == "dense" else self.name

    @staticmethod
    def again(numbers: str) -> Way:
        """The inverse of `numbers`."""
        name, _, many = numbers.partition(" in ")
        return Way(name, int(many.partition(" ")[0]) if many else 0)

    def alone(self) -> Backend:
        """Without processes."""
        if self.name.startswith("cuda"):
            return on("cuda", loop if self.name == "cuda-loop" else Stacked())
        if self.name in ("stacked", "dense"):
            return Stacked(dense=self.name == "dense")
        return self._each(loop)

    def over(self, team: Team) -> Backend:
        """In processes: whoever is idle gets the next client; "dense" gets its share at once."""
        if self.name == "dense":
            return team.blocks(Stacked(dense=True))
        return self._each(team)

    def _each(self, backend: Backend) -> Backend:
        return ONE_BY_ONE[self.name](backend) if self.name in ONE_BY_ONE else backend


@dataclass
class _Chosen:
    """The engine of a way, or of "auto" until the first run of an experiment has chosen one."""

    way: Way
    say: Say = field(repr=False)
    used: Way | None = None

    @property
    def backend(self) -> str:
        """By what it trains, or will."""
        return (self.used or self.way).numbers

    def __call__(self, config: Config, options: dict[str, Any]) -> Play:
        threads = config.training.threads
        spread = self.way.processes > 0 and self.way.name != "auto"
        if threads != 1 and spread:
            raise InputError(
                f"training.threads = {threads}, and workers have one thread each; set it to 1, or "
                "leave out --workers"
            )
        if not spread:
            check_deadline(config)
        if self.way.processes == 0:
            check_retries(config)
        limits = {"deadline": config.training.deadline, "retries": config.training.retries}
        # "auto" trains in this process first, and forks then: see `check_forked`.
        forks = threads == 1 and not torch.cuda.is_available()
        return partial(_play, self, forks, limits)


def _play(
    chosen: _Chosen,
    forks: bool,
    limits: dict[str, Any],
    algorithm: Algorithm,
    federation: Federation,
    rounds: int,
    *,
    cohort: int | None = None,
    backend: Backend = loop,
    after: Round | None = None,
) -> Iterator[Round]:
    """As `engine.rounds.run`; of `backend`, only a meter is used, which counts for the others.

    Raises UnfitError at once, before a round is asked for, for a backend that cannot train this.
    """
    if chosen.way.name not in FIT:
        check_fit(chosen.way.alone(), algorithm, federation, rounds, cohort=cohort, after=after)
    return _played(chosen, forks, limits, algorithm, federation, rounds, cohort, backend, after)


def _played(
    chosen: _Chosen,
    forks: bool,
    limits: dict[str, Any],
    algorithm: Algorithm,
    federation: Federation,
    rounds: int,
    cohort: int | None,
    backend: Backend,
    after: Round | None,
) -> Iterator[Round]:
    # A process more than there are clients in a round would never have one.
    most = len(federation.clients) if cohort is None else cohort
    with contextlib.ExitStack() as held:
        if chosen.way.name == "auto":
            count = min(chosen.way.processes, most) if forks else 0
            with _opened(federation, count) as contenders:
                named = {str(way): contender for way, contender in contenders.items()}
                spread = {str(way): way.processes for way in contenders if way.processes}
                found = probe(named, algorithm, federation, cohort, spread)
            chosen.way = next((w for w in contenders if str(w) == found.fastest), Way("loop"))
            chosen.say(found.line())
        own, count = chosen.way.alone(), min(chosen.way.processes, most)
        chosen.used = chosen.way._replace(processes=count)
        if count:
            team = held.enter_context(workers(federation.clients, count, **limits))
            own = chosen.way.over(team)
        if isinstance(backend, Meter):
            backend.backend, own = own, backend
        yield from run(algorithm, federation, rounds, cohort=cohort, backend=own, after=after)


@contextlib.contextmanager
def _opened(federation: Federation, count: int) -> Iterator[Mapping[Way, Backend]]:
    """All that may be faster than the loop; workers only if there are two or more."""
    ways = [Way("stacked"), Way("dense")]
    if federation.clients[0].x.dim() == 4:
        ways += [Way(name) for name in ONE_BY_ONE]
    if torch.cuda.is_available():
        ways += [Way("cuda"), Way("cuda-loop")]
    with contextlib.ExitStack() as held:
        contenders: dict[Way, Backend] = {way: way.alone() for way in ways}
        # Where processes cannot be forked there are none to choose.
        with contextlib.suppress(InputError):
            if count > 1:
                team = held.enter_context(workers(federation.clients, count))
                spread = [Way(name, count) for name in SPREAD if name != "auto"]
                contenders |= {way: way.over(team) for way in spread}
        yield contenders
