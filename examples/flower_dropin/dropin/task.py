"""Network, data, training and testing: nothing here knows of Flower or FedPALS."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn

from fedshift.datasets import load

CLASSES = 10
# Where the model will be used: sandals, shirts, sneakers and bags.
TARGET = [0.0, 0.0, 0.0, 0.0, 0.0, 0.25, 0.25, 0.25, 0.25, 0.0]


def network() -> nn.Module:
    """Two layers, from a fixed seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, CLASSES))


@cache
def images() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(x, y) to train on and (x, y) to test on; x scaled to [-1, 1]."""
    data = load("fashion-mnist-mini")
    x, test = (part.x.float() / 127.5 - 1 for part in (data.train, data.test))
    return x, data.train.y, test, data.test.y


def client_data(partition: int, partitions: int) -> tuple[Tensor, Tensor]:
    """Client i's clothes: three kinds out of ten, neighbours on the list, 200 images at most."""
    x, y, _, _ = images()
    kinds = torch.tensor([(partition * 10 // partitions + k) % CLASSES for k in range(3)])
    rows = torch.isin(y, kinds).nonzero().flatten()[partition::partitions][:200]
    return x[rows], y[rows]


def target_data() -> tuple[Tensor, Tensor]:
    """Test images of the kinds that the target has, as many of each."""
    _, _, x, y = images()
    kinds = torch.tensor(TARGET).nonzero().flatten()
    rows = torch.isin(y, kinds).nonzero().flatten()
    return x[rows], y[rows]


def train(net: nn.Module, x: Tensor, y: Tensor, epochs: int, lr: float) -> float:
    """Local SGD; the mean loss of the last epoch."""
    optimizer = torch.optim.SGD(net.parameters(), lr)
    source, losses = torch.Generator().manual_seed(0), []
    for _ in range(epochs):
        losses = []
        for rows in torch.randperm(len(y), generator=source).split(32):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(x[rows]), y[rows])
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    return sum(losses) / max(len(losses), 1)


def accuracy(net: nn.Module, x: Tensor, y: Tensor) -> float:
    """The share of right answers."""
    with torch.no_grad():
        return float((net(x).argmax(1) == y).double().mean())
