"""Networks that draw random numbers."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedshift import FedAvg, Federation, Local, Model, run
from fedshift.client.objectives import CrossEntropy
from fedshift.data import client_data, register
from fedshift.engine.processes.pool import workers
from fedshift.engine.stacking.stacked import Stacked
from fedshift.errors import FedshiftError
from fedshift.model import build
from fedshift.seeds import Seeds


class Net(nn.Module):
    """Two layers with something between them."""

    def __init__(self, between: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.between = nn.Linear(4, 8), nn.Linear(8, 3), between
        self.source = torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self, torch.relu(self.first(x))))


def federated(between: Any, objective: Any = None) -> tuple[FedAvg, Federation]:
    source = torch.Generator().manual_seed(1)
    data = [
        client_data(torch.randn(30, 4, generator=source), torch.arange(30) % 3, i) for i in (0, 1)
    ]
    model = build(lambda: Net(between), 0)
    federation = Federation(data, *model.init(), register(data, 3), Seeds.of(0))
    method = FedAvg(model, objective=objective or CrossEntropy(), local=Local(lr=0.1, batch=10))
    return method, federation


def ended(between: Any, rounds: int = 2, objective: Any = None, **how: Any) -> Tensor:
    *_, last = run(*federated(between, objective), rounds, **how)
    return last.server["params"]["last.weight"]


def dropout(net: nn.Module, h: Tensor) -> Tensor:
    return F.dropout(h, 0.5, net.training)


def repeated(between: Any, **how: Any) -> str:
    try:
        same = torch.equal(ended(between, **how), ended(between, **how))
    except FedshiftError as e:
        return f"refused: {e}"
    return "right" if same else "silent: two runs of equal seeds end at different models"


def trap_functional_dropout() -> str:
    """F.dropout in a forward, two runs of one seed."""
    return repeated(dropout)


def trap_rrelu() -> str:
    """F.rrelu in a forward, two runs of one seed."""
    return repeated(lambda net, h: F.rrelu(h - 1, training=net.training))


def trap_numpy_noise() -> str:
    """Noise from numpy's global generator in a forward."""
    return repeated(lambda net, h: h * float(np.random.normal()) if net.training else h)


def trap_stochastic_depth() -> str:
    """Stochastic depth by Python's random.random()."""
    return repeated(lambda net, h: h if random.random() < 0.5 else torch.tanh(h))


def trap_own_generator() -> str:
    """A torch.Generator among the network's attributes, at a round resumed and at one not."""

    def noisy(net: Any, h: Tensor) -> Tensor:
        return h * torch.rand(h.shape, generator=net.source) if net.training else h

    method, federation = federated(noisy)
    rounds = list(run(method, federation, 2))
    resumed = list(run(method, federation, 2, after=rounds[0]))
    same = torch.equal(*(r.server["params"]["last.weight"] for r in (rounds[-1], resumed[-1])))
    return "right" if same else "silent: a resumed run ends at another model"


def trap_default_rng() -> str:
    """A network with a numpy generator of its own."""
    source = np.random.default_rng(0)
    return repeated(lambda net, h: h * float(source.normal()))


def trap_draws_in_the_objective() -> str:
    """An objective that draws from torch's global generator."""

    class Noisy(CrossEntropy):
        def __call__(self, view: Any) -> Tensor:
            return super().__call__(view) * (1 + torch.rand(()))

    return repeated(lambda net, h: h, objective=Noisy())


def trap_workers_draw_otherwise() -> str:
    """Functional dropout in worker processes and in the loop."""
    with workers(federated(dropout)[1].clients, 2) as team:
        same = torch.equal(ended(dropout), ended(dropout, backend=team))
    return "right" if same else "silent: workers end at another model than the loop"


def trap_stacked_draws_otherwise() -> str:
    """Numpy noise with stacked clients."""
    noise = lambda net, h: h * float(np.random.normal()) if net.training else h  # noqa: E731
    try:
        same = torch.equal(ended(noise), ended(noise, backend=Stacked()))
    except FedshiftError as e:
        return f"refused: {e}"
    return "right" if same else "silent: stacked clients share their noise"


def trap_global_state_moved() -> str:
    """A run of a network with functional dropout between two draws of one's own."""
    torch.manual_seed(3)
    before = torch.get_rng_state()
    ended(dropout)
    unchanged = torch.equal(before, torch.get_rng_state())
    return "right" if unchanged else "silent: the process's generator was moved"


def trap_first_weights_from_numpy() -> str:
    """A network whose first weights numpy draws, built twice from one seed."""

    class Own(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            with torch.no_grad():
                self.weight.mul_(float(np.random.rand()))

    one, two = (build(Own, 0).init()[0]["weight"] for _ in range(2))
    return "right" if torch.equal(one, two) else "silent: one seed, two first models"


def trap_evaluation_draws() -> str:
    """Dropout that is on in evaluation as well: the same model scored twice."""
    from fedshift.data import Examples
    from fedshift.evaluation.scores import score

    model = Model(Net(lambda net, h: F.dropout(h, 0.5, True)))
    examples = Examples(torch.ones(20, 4), torch.arange(20) % 3)
    one, two = (score(model, *model.init(), examples, 3).loss_sum for _ in range(2))
    return "right" if one == two else "silent: one model, two scores"
