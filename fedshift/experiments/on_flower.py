"""An experiment whose clients run in Flower's simulation."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from fedshift.algorithms.base import Algorithm
from fedshift.engine.backends import Backend, loop
from fedshift.engine.run import Federation, Round
from fedshift.engine.traffic import Meter
from fedshift.engine.trial import check_model, check_training
from fedshift.errors import InputError
from fedshift.experiments.config import Config, Method
from fedshift.experiments.experiment import Engine, federation_of, method_of
from fedshift.experiments.load import dumps, validate
from fedshift.experiments.task import Prepared, prepare
from fedshift.experiments.training import Play
from fedshift.flower.installed import check_flower
from fedshift.flower.quiet import quiet

if TYPE_CHECKING:
    from flwr.serverapp import Grid

    from fedshift.flower.client import Site


def flower_simulation(actors: int | None = None) -> Engine:
    """The engine that runs clients in Flower's simulation, `actors` at once (as many as CPUs).

    Same rounds as in one process, bit for bit. Without telemetry, update checks and downloads.
    Raises InputError where Flower or Ray is missing, and for fewer than 1 actor.
    """
    check_flower(simulation=True)
    if actors is not None and actors < 1:
        raise InputError(f"--actors {actors}: give 1 or more")
    return partial(_play_of, actors)


def _play_of(actors: int | None, config: Config, options: dict[str, Any]) -> Play:
    chosen = Method(name=config.method.name, **options)
    return partial(_play, config.model_copy(update={"method": chosen}), actors)


def _play(
    config: Config,
    actors: int | None,
    algorithm: Algorithm,
    federation: Federation,
    rounds: int,
    *,
    cohort: int | None = None,
    backend: Backend = loop,
    after: Round | None = None,
) -> Iterator[Round]:
    """As `engine.run.run`; of `backend`, only a meter is used, which is told the traffic."""
    if after is not None:
        raise InputError(
            "a run on Flower cannot be resumed: its clients' states end with it; use the engine "
            "in-process"
        )
    check_model(algorithm.model, federation)
    check_training(algorithm, federation.params, rounds)
    asks = config.shift.target == "clients"
    with quiet():
        # Not before: Flower reads its environment when it is imported.
        from fedshift.flower import client_app
        from fedshift.flower.simulation import simulation

        threads, site = config.training.threads, partial(configured_site, dumps(config))
        app = client_app(site, threads=threads, open_states=asks)
        with simulation(app, len(federation.clients), actors=actors) as grid:
            yield from on_grid(
                grid, config, algorithm, federation, rounds, cohort=cohort, backend=backend
            )


def on_grid(
    grid: Grid,
    config: Config,
    algorithm: Algorithm,
    federation: Federation,
    rounds: int,
    *,
    cohort: int | None = None,
    backend: Backend = loop,
    patience: float = 600.0,
    timeout: float = 3600.0,
    after: Round | None = None,
    name: str = "",
) -> Iterator[Round]:
    """The rounds of a configuration on Flower nodes; a meter as `backend` is told the traffic.

    timeout: seconds for a round, or the configuration's deadline where that is less; after, name:
    as in `AlgorithmStrategy`.
    """
    from fedshift.flower import AlgorithmStrategy, play

    strategy = AlgorithmStrategy(
        algorithm,
        clients=len(federation.clients),
        classes=federation.table["labels"].shape[1],
        seeds=federation.seeds,
        cohort=cohort,
        first=(federation.params, federation.buffers),
        patience=patience,
        timeout=min(timeout, config.training.deadline or timeout),
        gate=federation.gate,
        retries=config.training.retries,
        after=after,
        name=name,
    )
    asks = config.shift.target == "clients"
    for current in play(
        strategy, grid, rounds, states=lambda t: asks and config.training.evaluates(t)
    ):
        if isinstance(backend, Meter):
            backend.last = strategy.traffic
        yield current


def configured_site(text: str, client: int) -> Site:
    """What client `client` of a configuration (TOML) has: for the processes that clients run in."""
    from fedshift.flower.client import Site

    algorithm, federation, prepared = _built(text)
    return Site(
        algorithm,
        federation.clients[client],
        federation.seeds.batch,
        prepared.task.validation[client],
        (federation.params, federation.buffers),
    )


@cache
def _built(text: str) -> tuple[Algorithm, Federation, Prepared]:
    """Once per process: all its clients share the data."""
    config = validate(tomllib.loads(text), text=text)
    prepared = prepare(config)
    algorithm = method_of(config, prepared)(**config.method.options)
    return algorithm, federation_of(config, prepared), prepared
