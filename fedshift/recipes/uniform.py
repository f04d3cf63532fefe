"""Methods that average clients' models uniformly, whatever their sizes."""

from __future__ import annotations

from dataclasses import replace

from fedshift.algorithms.fedavg import FedAvg
from fedshift.recipes import one_model
from fedshift.recipes.setting import Setting
from fedshift.recipes.traits import ContrastiveMu, Temperature, Traits
from fedshift.server.combine import Mean
from fedshift.server.weights import Uniform

__all__ = ["fedavg_uniform", "moon_uniform"]
TRAITS = {"fedavg_uniform": Traits(page="fedavg"), "moon_uniform": Traits(page="moon")}


def fedavg_uniform(setting: Setting) -> FedAvg:
    """FedAvg that averages clients' models uniformly, whatever their sizes.

    Reference: FedAvg as the MADE/MOON report on EMNIST-Digits states it.
    Note: with clients of one size it is fedavg.
    """
    return replace(one_model.fedavg(setting), combine=Mean(Uniform()))


def moon_uniform(setting: Setting, *, mu: ContrastiveMu = 1.0, tau: Temperature = 0.5) -> FedAvg:
    """MOON that averages clients' models uniformly, whatever their sizes.

    Reference: the MADE/MOON report on EMNIST-Digits, after Li, He and Song 2021, arXiv 2103.16257.
    Note: the weights are chosen: as in the report's FedAvg; MOON's authors weigh by size.
    """
    return replace(one_model.moon(setting, mu=mu, tau=tau), combine=Mean(Uniform()))
