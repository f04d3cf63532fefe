"""FedAvg with one extra, its fields by position as its page names them."""

from __future__ import annotations

from typing import Any

from fedshift.algorithms.afl import Afl
from fedshift.algorithms.fedala import FedAla
from fedshift.algorithms.fedas import FedAs
from fedshift.algorithms.fedavg import Extra, FedAvg
from fedshift.algorithms.feddyn import FedDyn
from fedshift.algorithms.fednova import FedNova
from fedshift.algorithms.fedpac import FedPac
from fedshift.algorithms.scaffold import Scaffold
from fedshift.client.local import Local
from fedshift.client.mixing import Mix
from fedshift.client.objectives import CrossEntropy, Term
from fedshift.client.sharing import Share
from fedshift.model import Model
from fedshift.server.combine import Combine, Mean
from fedshift.server.weights import Uniform

PLAIN = CrossEntropy()
HEAD = ("head.",)
HOST = ("objective", "local", "share", "combine", "server")


def _with(extra: type[Extra], model: Model, given: dict[str, Any], **usual: Any) -> FedAvg:
    host = usual | {k: v for k, v in given.items() if k in HOST}
    own = {k: v for k, v in given.items() if k not in HOST}
    return FedAvg(model, extras=(extra(**own),), **host)


def scaffold(
    model: Model, option: Any = "II", objective: Term = PLAIN, local: Any = Local(), **given: Any
) -> FedAvg:
    given |= {"option": option, "objective": objective, "local": local}
    return _with(Scaffold, model, given, combine=Mean(Uniform()))


def feddyn(
    model: Model, alpha: float = 0.1, objective: Term = PLAIN, local: Any = Local(), **given: Any
) -> FedAvg:
    given |= {"alpha": alpha, "objective": objective, "local": local}
    return _with(FedDyn, model, given, combine=Mean(Uniform()))


def fednova(
    model: Model, objective: Term = PLAIN, local: Any = Local(), combine: Combine = Mean(),
    **given: Any,
) -> FedAvg:  # fmt: skip
    given |= {"objective": objective, "local": local, "combine": combine}
    return _with(FedNova, model, given)


def afl(model: Model, gamma: float = 0.1, **given: Any) -> FedAvg:
    return _with(Afl, model, given | {"gamma": gamma})


def fedala(model: Model, mix: Mix | None = Mix(), **given: Any) -> FedAvg:
    return _with(FedAla, model, given | {"mix": mix})


def fedas(model: Model, **given: Any) -> FedAvg:
    return _with(FedAs, model, given, share=Share(HEAD))


def fedpac(model: Model, fit: Local = Local(), local: Local = Local(), **given: Any) -> FedAvg:
    phases = Local(**(vars(fit) | {"only": HEAD})), Local(**(vars(local) | {"frozen": HEAD}))
    return _with(FedPac, model, given | {"local": phases})
