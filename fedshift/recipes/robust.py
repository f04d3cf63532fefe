"""FedAvg with a combination rule that a minority of bad clients cannot move far."""

from __future__ import annotations

from typing import Annotated

from fedshift.algorithms.fedavg import FedAvg
from fedshift.errors import InputError
from fedshift.recipes.setting import Setting
from fedshift.recipes.traits import Traits, method
from fedshift.server.combine import Combine
from fedshift.server.robust import Geometric, Krum, Median, Trimmed
from fedshift.server.weights import BySize

Cut = Annotated[float, "the part of a cohort that is cut at either end"]


@method(Traits(page="robust", fixes_weights=True))
def fedmedian(setting: Setting) -> FedAvg:
    """The median of the clients' changes, coordinate by coordinate.

    Reference: Yin, Chen, Ramchandran and Bartlett 2018, "Byzantine-robust distributed learning:
    towards optimal statistical rates", arXiv 1803.01498, Algorithm 1, option I.
    Note: one client, one vote; no network with BatchNorm.
    """
    return _robust(setting, "fedmedian", Median())


@method(Traits(page="robust", fixes_weights=True))
def fedtrimmed(setting: Setting, *, share: Cut = 0.2) -> FedAvg:
    """The mean of the clients' changes without the extreme ones, coordinate by coordinate.

    Reference: Yin, Chen, Ramchandran and Bartlett 2018, arXiv 1803.01498, Algorithm 1, option II.
    Note: share of a cohort cut at either end; one client, one vote; no network with BatchNorm.
    """
    return _robust(setting, "fedtrimmed", Trimmed(share))


@method(Traits(page="robust", fixes_weights=True))
def krum(setting: Setting, *, byzantine: int = 1) -> FedAvg:
    """The change of the client that is nearest to its neighbours.

    Reference: Blanchard, El Mhamdi, Guerraoui and Stainer 2017, "Machine learning with adversaries:
    Byzantine tolerant gradient descent", arXiv 1703.02757.
    Note: cohorts of 2 byzantine + 3 or more; one client, one vote; no network with BatchNorm.
    """
    return _robust(setting, "krum", Krum(byzantine))


@method(Traits(page="robust", fixes_weights=True))
def multikrum(setting: Setting, *, byzantine: int = 1, keep: int = 3) -> FedAvg:
    """The mean of the `keep` changes that are nearest to their neighbours.

    Reference: Blanchard, El Mhamdi, Guerraoui and Stainer 2017, arXiv 1703.02757, "Multi-Krum".
    Note: cohorts of 2 byzantine + 3 and of byzantine + keep or more; no network with BatchNorm.
    """
    return _robust(setting, "multikrum", Krum(byzantine, keep))


@method(Traits(page="robust"))
def rfa(setting: Setting) -> FedAvg:
    """The geometric median of the clients' changes, weighed by sample sizes.

    Reference: Pillutla, Kakade and Harchaoui 2019, "Robust aggregation for federated learning"
    (RFA), arXiv 1912.13445.
    Note: a client that claims half of all samples decides alone; no network with BatchNorm.
    """
    return _robust(setting, "rfa", Geometric(BySize()))


def _robust(setting: Setting, name: str, combine: Combine) -> FedAvg:
    statistics = [k for k, v in setting.model.net.named_buffers() if v.is_floating_point()]
    if statistics:
        raise InputError(
            f'{name} combines changes of parameters; this network also has "{statistics[0]}", '
            "which clients send as values and the server averages, so that one bad client moves it "
            "at will. Use a network with GroupNorm"
        )
    return FedAvg(setting.model, local=setting.local, combine=combine, server=setting.server)
