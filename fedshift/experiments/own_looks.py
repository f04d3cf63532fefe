"""What each client's images go through, as configured, and in words."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from fedshift.datasets import heart, retina
from fedshift.experiments.config import Config
from fedshift.shifts import covariate
from fedshift.shifts.look_names import look_name
from fedshift.shifts.noise import noise_pool


def looks(config: Config, clients: int) -> tuple[Callable[[Tensor], Tensor], ...]:
    """What each client's images go through; () where they stay as they are.

    Raises InputError where the pool of looks has fewer entries than there are clients.
    """
    if config.shift.noise:
        return noise_pool(config.shift.noise, clients, config.seeds.resolved().split)
    kind, intensity = config.shift.transform, config.shift.intensity or "high"
    if kind == "none":
        return ()
    made = {
        "bits": lambda: covariate.bit_pool(intensity),
        "wide": covariate.wide_pool,
        "fashion": covariate.fashion_pool,
    }[kind]()
    return tuple(covariate.transform_of(made, i) for i in range(clients))


def look_names(config: Config, clients: int) -> tuple[str, ...] | None:
    """What sets each client's inputs apart, in words: its look, or its site; None for nothing."""
    sites = {"heart-disease": heart.SITES, "retina": retina.SITES}
    if config.shift.kind == "natural":
        return sites.get(config.data.name)
    return tuple(map(look_name, looks(config, clients))) or None
