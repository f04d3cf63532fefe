"""An experiment whose clients run in Flower's simulation."""

from __future__ import annotations

import time
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from fedshift.algorithms.method import Method as Algorithm
from fedshift.engine.preflight.method import check_training
from fedshift.engine.preflight.network import check_model
from fedshift.engine.run import Federation, Round
from fedshift.engine.traffic import Meter
from fedshift.errors import InputError
from fedshift.experiments.config.load import dumps, validate
from fedshift.experiments.config.schema import Config, Method, Training
from fedshift.experiments.experiment import federation_of, method_of
from fedshift.experiments.task.preparing import Prepared, prepare
from fedshift.flower.installed import check_flower
from fedshift.flower.quiet import quiet

if TYPE_CHECKING:
    from flwr.serverapp import Grid

    from fedshift.flower.client import Site
    from fedshift.flower.strategy import AlgorithmStrategy


@dataclass(frozen=True)
class FlowerSimulation:
    """The engine of clients in Flower's simulation, `actors` at a time (by default one per CPU).

    The rounds are those of one process, bit for bit. Flower's telemetry, update checks and
    downloads are off. Raises InputError if Flower or Ray is missing, and for fewer than 1 actor.
    """

    config: Config
    actors: int | None = None
    backend: str = "loop"
    tells_drops = False

    def __post_init__(self) -> None:
        check_flower(simulation=True)
        if self.actors is not None and self.actors < 1:
            raise InputError(f"--actors {self.actors}: give 1 or more")

    def rounds(
        self,
        algorithm: Algorithm,
        federation: Federation,
        training: Training,
        options: Mapping[str, Any],
        *,
        after: Round | None,
        meter: Meter,
    ) -> Iterator[Round]:
        """As `Engine`. Raises InputError for a run that is to be resumed."""
        if after is not None:
            raise InputError(
                "a run on Flower cannot be resumed: its clients' states end with it; use the "
                "engine in-process"
            )
        check_model(algorithm.model, federation)
        check_training(algorithm, federation.params, training.rounds)
        began = time.perf_counter()
        # Clients build the method themselves, so they need the options that were chosen.
        method = Method(name=self.config.method.name, **options)
        config = self.config.model_copy(update={"method": method})
        asks = config.shift.target == "clients"
        # For the whole run, since processes that start later read the environment, too.
        with quiet():
            # Imported here, because Flower reads its environment when it is imported.
            from fedshift.flower import client_app
            from fedshift.flower.simulation import simulation

            site = partial(configured_site, dumps(config))
            # Only a simulation may read clients' states, and only to score the clients' models.
            app = client_app(site, threads=training.threads, open_states=asks)
            with simulation(app, len(federation.clients), actors=self.actors) as grid:
                strategy = strategy_of(algorithm, federation, training)
                yield from on_grid(
                    grid, strategy, training, meter=meter, asks_states=asks, began=began
                )

    def client_scores(self, current: Round) -> None:
        """As `Engine`; None, since the server's process holds all examples."""


def strategy_of(
    algorithm: Algorithm,
    federation: Federation,
    training: Training,
    *,
    timeout: float = 3600.0,
    **given: Any,
) -> AlgorithmStrategy:
    """The method as a Flower strategy.

    timeout: seconds for a round; the training's deadline counts if it is less. given: more
    arguments of `AlgorithmStrategy`.
    """
    from fedshift.flower import AlgorithmStrategy

    return AlgorithmStrategy(
        algorithm,
        clients=len(federation.clients),
        classes=federation.table["labels"].shape[1],
        seeds=federation.seeds,
        cohort=training.cohort,
        first=(federation.params, federation.buffers),
        timeout=min(timeout, training.deadline or timeout),
        gate=federation.gate,
        retries=training.retries,
        **given,
    )


def on_grid(
    grid: Grid,
    strategy: AlgorithmStrategy,
    training: Training,
    *,
    meter: Meter,
    asks_states: bool = False,
    began: float | None = None,
) -> Iterator[Round]:
    """The rounds on Flower's nodes; the meter gets the traffic of each.

    asks_states: whether clients send what they keep after rounds that are evaluated. began: when
    the wait for clients began, by `time.perf_counter`.
    """
    from fedshift.flower import play

    began = time.perf_counter() if began is None else began
    strategy.begin(grid)
    # Clients may take minutes to connect, which must not count as time of round 1.
    meter.waited = time.perf_counter() - began
    for current in play(
        strategy, grid, training.rounds, states=lambda t: asks_states and training.evaluates(t)
    ):
        meter.last = strategy.traffic
        yield current


def configured_site(text: str, client: int) -> Site:
    """Client `client` of a configuration (TOML), built in the process that it runs in."""
    from fedshift.flower.client import Site

    algorithm, federation, prepared = built_from(text)
    tests = prepared.task.tests
    return Site(
        algorithm,
        federation.clients[client],
        federation.seeds.batch,
        prepared.task.validation[client],
        (federation.params, federation.buffers),
        tests[client] if tests else None,
    )


@cache
def built_from(text: str) -> tuple[Algorithm, Federation, Prepared]:
    """(method, federation, experiment) of a TOML text; all clients of a process share them."""
    config = validate(tomllib.loads(text), text=text)
    prepared = prepare(config)
    algorithm = method_of(config.method, config.training, prepared)(**config.method.options)
    return algorithm, federation_of(config.method, prepared), prepared
