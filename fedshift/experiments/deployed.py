"""An experiment on deployed Flower nodes: the ServerApp and ClientApp that Flower loads by name.

The run's configuration holds the experiment's TOML ("experiment"), what gives a client's data
("site", "module:function" from (TOML, partition) to a Site), and where results go ("out").
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedshift.algorithms.base import Algorithm
from fedshift.engine.run import Federation, Round
from fedshift.engine.traffic import Meter
from fedshift.engine.trial import check_model, check_training
from fedshift.errors import InputError
from fedshift.experiments.config import Config, Training
from fedshift.experiments.experiment import record
from fedshift.experiments.folder import kept_in, reserved
from fedshift.experiments.load import validate
from fedshift.experiments.on_flower import on_grid
from fedshift.experiments.python_names import is_python
from fedshift.experiments.resume import reopened
from fedshift.experiments.task import Prepared, prepare
from fedshift.experiments.training import silent
from fedshift.files import is_file
from fedshift.flower.client import Site, app_of, partition
from fedshift.flower.quiet import KEEP
from fedshift.record.folder import CONFIG, EVENTS, SUMMARY

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
    # 0: all. Folders of earlier versions have no such line.
    waits["min_clients"] = int(given.get("min_clients", 0))

    prepared = prepare(config)
    with _folder(Path(str(given["out"])), config, prepared) as folder:
        # Every round: on Flower one takes seconds at least, and a checkpoint less.
        keeper = kept_in(folder, config, prepared, 1)
        record(folder, config, prepared, silent, Deployed(grid, waits, folder), keeper)


@contextlib.contextmanager
def _folder(out: Path, config: Config, prepared: Prepared) -> Iterator[Path]:
    """A new run folder, or that of a run whose server has ended before it."""
    if is_file(out / CONFIG) and not is_file(out / SUMMARY):
        with reopened(out, config, prepared) as (folder, _):
            yield folder
    else:
        with reserved(out, config.name) as folder:
            yield folder


def name_of(folder: Path) -> str:
    """The name by which clients know a run, also when it goes on: its first event has its time."""
    with (folder / EVENTS).open("rb") as f:
        return hashlib.sha256(f.readline()).hexdigest()[:32]


@dataclass(frozen=True)
class Deployed:
    """The engine of clients on deployed nodes.

    waits: `patience`, `timeout` and `min_clients` (0: all) of `on_grid`
    """

    grid: Grid
    waits: Mapping[str, float]
    folder: Path
    backend: str = "loop"

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

        def played() -> Iterator[Round]:
            # The name exists only once a round is requested: then the first event is on disk.
            yield from on_grid(
                self.grid, algorithm, federation, training, meter=meter, after=after,
                name=name_of(self.folder), patience=self.waits["patience"],
                timeout=self.waits["timeout"],
                min_clients=int(self.waits.get("min_clients", 0)) or None,
            )  # fmt: skip

        return played()


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
