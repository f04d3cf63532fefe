"""An experiment whose clients train by another backend than one after the other."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, get_args

from fedshift.algorithms.base import Algorithm
from fedshift.engine.backends import Backend, loop
from fedshift.engine.probe import probe
from fedshift.engine.rounds import Federation, Round, run
from fedshift.engine.stacked import Stacked
from fedshift.engine.traffic import Meter
from fedshift.engine.workers import workers
from fedshift.errors import InputError, unknown
from fedshift.experiments.config import Config
from fedshift.experiments.experiment import Engine
from fedshift.experiments.training import Play

Name = Literal["loop", "workers", "stacked", "auto"]
Say = Callable[[str], None]


def processes(count: int) -> Engine:
    """The engine that trains `count` clients at once, each on one thread.

    The result is that of one process bit for bit. Raises InputError for a count below 1, and for a
    configuration with more threads than one.
    """
    return backend_of("workers", count)


def backend_of(name: str, count: int | None = None, say: Say = lambda line: None) -> Engine:
    """The engine in this process by the backend of this name.

    count   processes of "workers", and the most that "auto" may take; None: one per core
    say     is told in one line what "auto" has chosen and why, once per experiment

    Raises InputError for a count below 1 or one that the backend has no use for, and for workers
    where the configuration has more threads than one; "auto" then leaves them out.
    """
    if name not in get_args(Name):
        raise unknown("backend", name, get_args(Name))
    if count is not None and count < 1:
        raise InputError(f"--workers {count}: give 1 or more")
    if count is not None and name in ("loop", "stacked"):
        raise InputError(
            f"--workers {count} is for the backends workers and auto; {name} is one process"
        )
    return partial(_play_of, _Chosen(name, count or os.cpu_count() or 1, say))


@dataclass
class _Chosen:
    """A backend's name, or "auto" until the first run of an experiment has chosen one."""

    name: str
    count: int
    say: Say = field(repr=False)


def _play_of(chosen: _Chosen, config: Config, options: dict[str, Any]) -> Play:
    threads = config.training.threads
    if threads != 1 and chosen.name == "workers":
        raise InputError(
            f"training.threads = {threads}, and workers have one thread each; set it to 1, or "
            "leave out --workers"
        )
    return partial(_play, chosen, threads == 1)


def _play(
    chosen: _Chosen,
    forks: bool,
    algorithm: Algorithm,
    federation: Federation,
    rounds: int,
    *,
    cohort: int | None = None,
    backend: Backend = loop,
    after: Round | None = None,
) -> Iterator[Round]:
    """As `engine.rounds.run`; of `backend`, only a meter is used, which counts for the others."""
    with contextlib.ExitStack() as held:
        if chosen.name == "auto":
            with _opened(federation, chosen.count if forks else 1) as contenders:
                found = probe(contenders, algorithm, federation, cohort)
            chosen.name = found.fastest.rpartition(" ")[2]
            chosen.say(found.line())
        own: Backend = Stacked() if chosen.name == "stacked" else loop
        if chosen.name == "workers":
            own = held.enter_context(workers(federation.clients, chosen.count))
        if isinstance(backend, Meter):
            backend.backend, own = own, backend
        yield from run(algorithm, federation, rounds, cohort=cohort, backend=own, after=after)


@contextlib.contextmanager
def _opened(federation: Federation, count: int) -> Iterator[Mapping[str, Backend]]:
    """All that may be faster than the loop; workers only if there are two or more."""
    with contextlib.ExitStack() as held:
        contenders: dict[str, Backend] = {"stacked": Stacked()}
        # Where processes cannot be forked there are none to choose.
        with contextlib.suppress(InputError):
            if count > 1:
                team = held.enter_context(workers(federation.clients, count))
                contenders[f"{count} workers"] = team
        yield contenders
