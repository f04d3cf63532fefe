"""An experiment on deployed Flower nodes: the ServerApp and ClientApp that Flower loads by name.

The run's configuration holds the experiment's TOML ("experiment"), what gives a client's data
("site", "module:function" from (TOML, partition) to a Site), and where results go ("out").
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedshift.algorithms.base import Algorithm
from fedshift.engine.checks.gate import Dropped
from fedshift.engine.run import Federation, Round
from fedshift.engine.traffic import Meter
from fedshift.engine.trial import check_model, check_training
from fedshift.errors import InputError
from fedshift.evaluation.scores import Score
from fedshift.experiments.config import Config, Training
from fedshift.experiments.experiment import dropped_event, record
from fedshift.experiments.folder import EventLog, kept_in, reserved
from fedshift.experiments.load import validate
from fedshift.experiments.on_flower import on_grid, strategy_of
from fedshift.experiments.python_names import is_python
from fedshift.experiments.resume import reopened
from fedshift.experiments.task import Prepared, prepare
from fedshift.experiments.training import silent
from fedshift.files import is_file, write
from fedshift.flower import AlgorithmStrategy
from fedshift.flower.client import Site, app_of, partition
from fedshift.flower.quiet import KEEP
from fedshift.flower.rounds import measured_by_clients, overhear
from fedshift.record.folder import CONFIG, DEPLOYED, EVENTS, SERVING, SUMMARY

# Flower imports this module and looks for these names (deploy/place.py writes them into the app).
server_app = ServerApp()


def configured(text: str) -> Config:
    """The experiment. Raises InputError for what only a simulation can do."""
    config = validate(tomllib.loads(text), text=text, origin="experiment")
    if config.method.options.get("ess") == "auto":
        raise InputError('method.ess = "auto" trains one model per candidate; deploy with a number')
    named = [config.model.name, config.method.name, *config.metrics.extra]
    if config.data.source is not None or any(map(is_python, named)):
        raise InputError(
            "a deployed federation runs no file that an experiment names, since its text comes by "
            "message: use data, networks and methods of the library, or `fedshift run`"
        )
    if config.shift.target == "clients":
        raise InputError(
            'shift.target = "clients" is measured on models that never leave their clients; '
            "simulate it (--engine flower-sim)"
        )
    return config


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Train, evaluate on the server's examples, and leave a run folder."""
    given = context.run_config
    config = configured(str(given["experiment"]))
    waits = {k: float(given[k]) for k in ("patience", "timeout")}

    prepared = prepare(config)
    measures = config.data.validation > 0
    with _folder(Path(str(given["out"])), config, prepared) as folder:
        # Every round: on Flower one takes seconds at least, and a checkpoint less.
        keeper = kept_in(folder, config, prepared, 1)
        engine = Deployed(grid, waits, folder, config.name, str(given.get("site", "")), measures)
        record(folder, config, prepared, silent, engine, keeper)


@contextlib.contextmanager
def _folder(out: Path, config: Config, prepared: Prepared) -> Iterator[Path]:
    """A new run folder, or that of a run whose server has ended before it."""
    again = f"{os.environ.get(SERVING, 'fedshift deploy server FOLDER')} --resume {{}}"
    if is_file(out / CONFIG) and not is_file(out / SUMMARY):
        with reopened(out, config, prepared, again=again) as (folder, _):
            yield folder
    else:
        with reserved(out, config.name, again) as folder:
            yield folder


def name_of(folder: Path) -> str:
    """The name by which clients know a run, also when it goes on: its first event has its time."""
    with (folder / EVENTS).open("rb") as f:
        return hashlib.sha256(f.readline()).hexdigest()[:32]


@dataclass
class Deployed:
    """The engine of clients on deployed nodes.

    waits: `patience` and `timeout` of the strategy. label: the run's in its events. site: what
    gives clients their data. measures: whether clients have validation examples.
    """

    grid: Grid
    waits: Mapping[str, float]
    folder: Path
    label: str
    site: str = ""
    measures: bool = True
    backend: str = "loop"
    tells_drops = True
    strategy: AlgorithmStrategy | None = field(default=None, init=False)

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
        """As `Engine`; the clients have the method's options from Flower."""
        check_model(algorithm.model, federation)
        check_training(algorithm, federation.params, training.rounds)
        self._make = partial(
            strategy_of, algorithm, federation, training, **self.waits, after=after,
            dropping=self._drop,
        )  # fmt: skip

        def played() -> Iterator[Round]:
            began = time.perf_counter()
            yield from on_grid(self._begun(), self.grid, training, meter, began)

        return played()

    def measured(self, current: Round) -> Mapping[int, Score] | None:
        """As `Engine`: sums of each client that is connected and answers."""
        if not self.measures:
            return None
        return measured_by_clients(self._begun(), self.grid, current)

    def _begun(self) -> AlgorithmStrategy:
        """The strategy, with all clients registered."""
        if self.strategy is None:
            # Its name exists only once a round is requested: then the first event is on disk.
            self.strategy = self._make(name=name_of(self.folder))
            overhear(self.grid, self.strategy.hear)
            self.strategy.begin(self.grid)
            self._describe(self.strategy)
        return self.strategy

    def _describe(self, strategy: AlgorithmStrategy) -> None:
        """Leave in the run folder what is true of this run because it is deployed."""
        table = {} if strategy.met is None else strategy.met.table
        options = " ".join(f"--{name} {value:g}" for name, value in self.waits.items())
        facts = {
            "command": f"{os.environ.get(SERVING, 'fedshift deploy server FOLDER')} {options}",
            "site": self.site,
            "measured_by": "clients" if self.measures else None,
            "registered": {name: column.long().tolist() for name, column in table.items()},
        }
        write(self.folder / DEPLOYED, json.dumps(facts, indent=1) + "\n")

    def _drop(self, t: int, one: Dropped) -> None:
        # Written here, since the round that would say so may go on for an hour.
        EventLog(self.folder)(dropped_event(self.label, t, one))


def site_of(context: Context) -> Site:
    """What this node's client has, from the function that the run's configuration names."""
    module, _, name = str(context.run_config["site"]).partition(":")
    text = str(context.run_config["experiment"])
    # First: the text comes by message, and must name no file that the site's function would run.
    config = configured(text)
    site: Site = getattr(import_module(module), name)(text, partition(context))
    # Here, not in the app: only the run's configuration says how many.
    torch.set_num_threads(config.training.threads)
    return site


def state_folder() -> Path | None:
    """The configured folder for this node's client state between rounds, or None."""
    path = os.environ.get(KEEP)
    return Path(path) if path else None


# States are never opened here: on real machines they are the clients' own.
client_app = app_of(site_of, threads=1, open_states=False, keep=state_folder())
