"""The demo: FedAvg, FedPALS and the oracle on one task, from data that ship with the package."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from fedshift.experiments.config import Config, Method
from fedshift.experiments.experiment import Experiment, run_experiment
from fedshift.experiments.folder import EventLog, write_run
from fedshift.experiments.load import load_config
from fedshift.experiments.task import prepare
from fedshift.experiments.training import Listener, listeners


def demo_config(overrides: Sequence[str] = ()) -> Config:
    """The shipped demo.toml with overrides."""
    return load_config(Path(str(files("fedshift.experiments") / "demo.toml")), overrides)


def method_configs(config: Config) -> tuple[Config, ...]:
    """FedAvg, the configured method, and the oracle, all else equal."""
    chosen = (Method(name="fedavg"), config.method, Method(name="oracle"))
    return tuple(config.model_copy(update={"method": m, "name": m.name}) for m in chosen)


def run_demo(config: Config, folder: Path, listen: Listener) -> list[tuple[Path, Experiment]]:
    """Train the three methods on the same clients, first model and batches; one folder each."""
    prepared, done = prepare(config), []
    for one in method_configs(config):
        place = folder / one.method.name
        place.mkdir()
        heard = listeners(EventLog(place), listen)
        experiment = run_experiment(one, listen=heard, prepared=prepared)
        write_run(place, experiment)
        done.append((place, experiment))
    return done
