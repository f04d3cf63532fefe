"""FedALA's mixing of two fixed models on one client."""

from __future__ import annotations

import torch

from fedshift.client.local import Local
from fedshift.client.mixing import Mix
from fedshift.client.objectives import CrossEntropy
from fedshift.data import Plan
from fedshift.model import Model
from fedshift.seeds import generator
from fedshift.tree import Params
from support.federations import make_clients

STILL = 1e-300  # a rate that changes no number


def models(model: Model, count: int = 2) -> list[Params]:
    """The model's parameters with different noise, in float64."""
    source = generator(0, "models")
    params, _ = model.init()
    return [
        {k: v.double() + 0.3 * torch.randn(v.shape, generator=source) for k, v in params.items()}
        for _ in range(count)
    ]


def split(params: Params, names: tuple[str, ...]) -> tuple[Params, Params]:
    inside = {k: params[k] for k in names}
    return inside, {k: v for k, v in params.items() if k not in names}


def plan_of(n: int, batch: int = 8) -> Plan:
    return Local(epochs=1, batch=batch).plan(n, 1, torch.Generator().manual_seed(0))


def learn(model: Model, mix: Mix, mixing: Params, plan: Plan, epochs: int = 1) -> Params:
    """W after some epochs between two fixed models, on client 3."""
    old, new = models(model)
    data = make_clients()[3]
    data = data._replace(x=data.x.double(), w=data.w.double())
    (a, _), (b, below) = (split(m, tuple(mixing)) for m in (old, new))
    return mix(model, CrossEntropy(), a, b, below, mixing, {}, {}, data, plan, epochs)
