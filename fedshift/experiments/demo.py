"""The demo: FedAvg, FedPALS and the oracle on one task, from data that ship with the package."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from fedshift.experiments.config.load import load_with_source
from fedshift.experiments.config.places import Source
from fedshift.experiments.config.schema import Config, Method


def demo_config(overrides: Sequence[str] = ()) -> tuple[Config, Source]:
    """The shipped demo.toml with overrides, and what says where a key was set."""
    return load_with_source(Path(str(files("fedshift.experiments") / "demo.toml")), overrides)


def method_configs(config: Config) -> tuple[Config, ...]:
    """FedAvg, the configured method, and the oracle, all else equal."""
    chosen = (Method(name="fedavg"), config.method, Method(name="oracle"))
    return tuple(config.model_copy(update={"method": m, "name": m.name}) for m in chosen)
