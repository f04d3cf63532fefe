"""Networks that draw random numbers while they compute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedshift import FedAvg, Federation, Local, run
from fedshift.client.objectives import CrossEntropy
from fedshift.data import ClientData, client_data, register
from fedshift.model import build
from fedshift.seeds import Seeds, generator

CLASSES = 3


class Drawing(nn.Module):
    """A small network with a given function between its layers."""

    def __init__(self, between: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, CLASSES)
        self.between = between
        self.source = torch.Generator().manual_seed(3)
        self.kept = {"by name": [(torch.Generator().manual_seed(4), 1.0)]}

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self, torch.relu(self.first(x))))


def dropout(net: nn.Module, h: Tensor) -> Tensor:
    return F.dropout(h, 0.5, net.training)


def leaky(net: nn.Module, h: Tensor) -> Tensor:
    return F.rrelu(h - 0.5, training=net.training)


def torch_noise(net: nn.Module, h: Tensor) -> Tensor:
    return h + torch.randn_like(h) if net.training else h


def numpy_noise(net: nn.Module, h: Tensor) -> Tensor:
    return h * float(np.random.normal(1.0)) if net.training else h


def always(net: nn.Module, h: Tensor) -> Tensor:
    return F.dropout(h, 0.5, True)


def unforeseen(net: nn.Module, h: Tensor) -> Tensor:
    """Draws for full batches alone, so that a trial on two examples sees no draw."""
    return F.dropout(h, 0.5, net.training and len(h) > 2)


def clients(count: int = 3) -> list[ClientData]:
    source = generator(0, "randomness")
    return [
        client_data(torch.randn(30, 4, generator=source), torch.arange(30) % CLASSES, i)
        for i in range(count)
    ]


def federated(
    between: Any, seed: int = 0, objective: Any = None, draws: bool = False
) -> tuple[FedAvg, Federation]:
    model, data = replace(build(lambda: Drawing(between), 0), draws=draws), clients()
    federation = Federation(data, *model.init(), register(data, CLASSES), Seeds.of(seed))
    local = Local(lr=0.1, batch=10)
    return FedAvg(model, objective=objective or CrossEntropy(), local=local), federation


def ended(between: Any, seed: int = 0, draws: bool = False, **how: Any) -> dict[str, Tensor]:
    *_, last = run(*federated(between, seed, draws=draws), 3, **how)
    return last.server["params"]


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(v, b[k]) for k, v in a.items())
