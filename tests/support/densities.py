"""FedDisk settings whose densities differ after a few small batches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fedshift import recipes
from fedshift.algorithms.feddisk import FedDisk
from fedshift.engine.run import Federation, Round
from fedshift.recipes import Setting
from support.by_hand import final


def direct(setting: Setting, **options: Any) -> FedDisk:
    given = {"estimator": "direct", "density_rounds": 2, "hidden": (6,), "low": -8.0, "high": 8.0}
    return recipes.feddisk(setting, **(given | {"useful": 0.0} | options))


def fast(algorithm: FedDisk) -> FedDisk:
    """Small batches and large steps, so that densities differ after few of them."""
    return replace(algorithm, local=replace(algorithm.local, lr=0.05, batch=8))


def weighed(algorithm: FedDisk, federation: Federation, cohort: int | None = None) -> Round:
    return final(algorithm, federation, algorithm.rounds_before_inner, cohort=cohort)
