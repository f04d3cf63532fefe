"""An experiment whose clients train in processes side by side."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from fedshift.algorithms.base import Algorithm
from fedshift.engine.backends import Backend, loop
from fedshift.engine.rounds import Federation, Round, run
from fedshift.engine.traffic import Meter
from fedshift.engine.workers import workers
from fedshift.errors import InputError
from fedshift.experiments.config import Config
from fedshift.experiments.experiment import Engine
from fedshift.experiments.training import Play


def processes(count: int) -> Engine:
    """The engine that trains `count` clients at once, each on one thread.

    The result is that of one process bit for bit. Raises InputError for a count below 1, and for a
    configuration with more threads than one.
    """
    if count < 1:
        raise InputError(f"--workers {count}: give 1 or more")
    return partial(_play_of, count)


def _play_of(count: int, config: Config, options: dict[str, Any]) -> Play:
    threads = config.training.threads
    if threads != 1:
        raise InputError(
            f"training.threads = {threads}, and workers have one thread each; set it to 1, or "
            "leave out --workers"
        )
    return partial(_play, count)


def _play(
    count: int,
    algorithm: Algorithm,
    federation: Federation,
    rounds: int,
    *,
    cohort: int | None = None,
    backend: Backend = loop,
    after: Round | None = None,
) -> Iterator[Round]:
    """As `engine.rounds.run`; of `backend`, only a meter is used, which counts for the workers."""
    with workers(federation.clients, count) as team:
        if isinstance(backend, Meter):
            backend.backend, team = team, backend
        yield from run(algorithm, federation, rounds, cohort=cohort, backend=team, after=after)
