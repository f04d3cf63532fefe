"""The engine of a run whose clients are on machines of their own, as nodes of Flower."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from flwr.serverapp import Grid
from torch import Tensor

from fedshift.algorithms.method import Method
from fedshift.data import Task
from fedshift.engine.checks.gate import Dropped
from fedshift.engine.preflight.method import check_training, check_whole_models
from fedshift.engine.preflight.network import check_model
from fedshift.engine.run import Federation, Round
from fedshift.engine.traffic import Meter
from fedshift.errors import InputError
from fedshift.evaluation.scores import OwnScores, Score
from fedshift.experiments.config.schema import Training
from fedshift.experiments.events import dropped_event
from fedshift.experiments.folder.run_folder import EventLog
from fedshift.experiments.on_flower import on_grid, strategy_of
from fedshift.files import write
from fedshift.flower.routing import RemoteClients
from fedshift.flower.strategy import AlgorithmStrategy
from fedshift.record.folder import DEPLOYED, EVENTS
from fedshift.server.prior import Calibrator, Correction
from fedshift.tree import Params, Parts
from fedshift_deploy.machines.deployable import UNSCORED
from fedshift_deploy.machines.remote_sums import (
    calibrated_by,
    measured_by_clients,
    overhear,
    sites_of,
)


def validated(task: Task) -> dict[int, Tensor]:
    """Client id -> its validation examples of each label, [K]."""
    classes = len(task.classes)
    return {i: v.y.bincount(minlength=classes) for i, v in enumerate(task.validation)}


def name_of(folder: Path) -> str:
    """The run's name for its clients: a hash of its first event, which stays after a resume."""
    with (folder / EVENTS).open("rb") as f:
        return hashlib.sha256(f.readline()).hexdigest()[:32]


@dataclass
class News:
    """Writes events of a run while a round is still going on; t: the last complete round.

    The round's own event is written at its end, which may be an hour later. names: of the clients,
    if they have names.
    """

    folder: Path
    run: str
    t: int = 0
    names: Sequence[str] = ()

    def __call__(self, event: Mapping[str, Any]) -> None:
        # A question for scores does not say the round, so the event has to get it here.
        round_ = {"round": self.t} if event["event"] == "unscored" else {}
        name = {"name": self.names[event["client"]]} if self.names and "client" in event else {}
        EventLog(self.folder)({"event": event["event"], "run": self.run, **round_, **name, **event})


@dataclass
class Deployed:
    """The engine of clients on deployed nodes.

    waits      `patience`, `timeout` and `min_clients` of `strategy_of`
    opens      called once the clients have registered
    news       gets events
    on_sites   whether each client tests the model that it serves on its own test examples
    refits     see `OnSites`
    facts      what deployment.json says of this run
    asks       whether this engine asks clients to score models on their validation examples; if
               all rows stay at sites, it does not: the task's `RemoteScores` ask instead
    dealt      the task whose examples the clients were dealt; None if the server lacks them
    counts     each client's validation examples by label, if the server has these numbers
    """

    grid: Grid
    waits: Mapping[str, float]
    folder: Path
    opens: Callable[[Method, Federation, Params], None]
    news: News
    on_sites: bool = False
    refits: tuple[str, ...] = ("moment",)
    facts: Mapping[str, Any] = field(default_factory=dict)
    asks: bool = False
    dealt: Task | None = None
    counts: Mapping[int, Tensor] | None = None
    backend: str = "loop"
    tells_drops = True
    # `make(name=...)` builds the strategy of the run that `rounds` began; `made` is the one built.
    make: Callable[..., AlgorithmStrategy] | None = field(default=None, init=False, repr=False)
    made: AlgorithmStrategy | None = field(default=None, init=False, repr=False)

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
        """As `Engine`; the clients have the method's options from Flower's configuration."""
        check_model(algorithm.model, federation)
        check_training(algorithm, federation.params, training.rounds)
        if "clients" in (self.facts.get("measured_by"), self.facts.get("tested_by")):
            check_whole_models(algorithm, UNSCORED)
        self.make, self.made = partial(
            strategy_of, algorithm, federation, training, after=after, own=self.on_sites,
            dropping=self._drop, registers=partial(self._registered, algorithm, federation),
            tell=self.news, scoring=self._check_scores, places=True, **self.waits,
        ), None  # fmt: skip

        def played() -> Iterator[Round]:
            began, strategy = time.perf_counter(), self.strategy
            self.news.t = after.t if after else 0
            for current in on_grid(self.grid, strategy, training, meter=meter, began=began):
                self.news.t = current.t
                took_part = dict.fromkeys(sorted(strategy.took_part), Parts())
                # Clients keep their states to themselves: empty ones show who took part.
                yield current._replace(states=took_part) if self.on_sites else current

        return played()

    @property
    def strategy(self) -> AlgorithmStrategy:
        """The server's side of the run, made when it is first needed."""
        if self.made is None:
            assert self.make is not None  # `rounds` comes first
            # The run's name is a hash of its first event, which exists only once a round is asked
            # for: the strategy cannot be built in `rounds`.
            self.made = self.make(name=name_of(self.folder))
            overhear(self.grid, self.made.hear)
        return self.made

    def client_scores(self, current: Round) -> Mapping[int, Score] | None:
        """As `Engine`; only clients that are connected and answer are in it."""
        return measured_by_clients(self.strategy, self.grid, current) if self.asks else None

    def calibrator(self, current: Round) -> Calibrator:
        """As `Corrects`."""
        return calibrated_by(self.strategy, self.grid, current, self.counts)

    def corrected_scores(self, current: Round, correction: Correction) -> Mapping[int, Score]:
        """As `Corrects`; empty without validation examples."""
        if not self.facts.get("measured_by", "clients"):
            return {}
        return measured_by_clients(self.strategy, self.grid, current, correction)

    def own_scores(self, algorithm: Method, current: Round) -> Mapping[int, OwnScores]:
        """As `OnSites`."""
        measured_by_clients(self.strategy, self.grid, current)
        return self.strategy.tests

    def sites(self) -> RemoteClients:
        """As `OnSites`."""
        # The fits take messages to all clients, and come after the event of the last evaluation:
        # without an event of their own, the server would seem to hang.
        self.news({"event": "fits"})
        return sites_of(self.strategy, self.grid)

    def _registered(self, algorithm: Method, federation: Federation, table: Params) -> None:
        columns = {name: column.long().tolist() for name, column in table.items()}
        facts = {**self.facts, "registered": columns}
        write(self.folder / DEPLOYED, json.dumps(facts, indent=1) + "\n")
        self.opens(algorithm, federation, table)

    def _check_scores(self, client: int, score: Score, tests: OwnScores | None) -> None:
        """Refuse scores of other examples than the client's own.

        A client that claimed to have scored very many examples would decide the estimate alone.
        """
        pairs = [] if self.counts is None else [(score, self.counts[client])]
        if self.dealt is not None and tests is not None:
            y = self.dealt.tests[client].y
            pairs.append((tests.test, y.bincount(minlength=len(score.total))))
        if not all(torch.equal(one.total, counts) for one, counts in pairs):
            raise InputError("its counts are not those of the examples that it was dealt")

    def _drop(self, t: int, one: Dropped) -> None:
        self.news(dropped_event(self.news.run, t, one))
