"""Tasks that predict numbers, or several labels per example, and networks for them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import fedshift as fs

SITES = ("north", "south", "east", "west")


def prices(target: str = "north", n: int = 400, **options: Any) -> fs.Task:
    """y = x . (1, 2, -1) + 3 + noise; at "south" all y are larger by 1, at "east" x is wider."""
    draws = np.random.default_rng(0)
    site = draws.choice(SITES, n)
    x = draws.normal(size=(n, 3)) * np.where(site == "east", 2.0, 1.0)[:, None]
    y = x @ [1.0, 2.0, -1.0] + 3 + (site == "south") + 0.3 * draws.normal(size=n)
    given = x.astype(np.float32)
    return fs.Task.from_arrays(given, y, client=site, target=target, kind="regression", **options)


def symptoms(target: str = "north", n: int = 400, **options: Any) -> fs.Task:
    """Three labels, each the sign of one input; rarer in some hospitals."""
    draws = np.random.default_rng(0)
    site = draws.choice(SITES, n)
    x = draws.normal(size=(n, 3)).astype(np.float32)
    x[:, 0] += np.where(site == "north", 1.0, -0.5)
    options = {"classes": ["fever", "cough", "rash"]} | options
    return fs.Task.from_arrays(
        x, x > [0.0, 0.3, 1.0], client=site, target=target, kind="multilabel", **options
    )


def shifted(n: int = 1200) -> fs.Task:
    """p(x | y) is the same everywhere and p(y) is not: the target is like the smallest client."""
    draws = np.random.default_rng(1)
    site = draws.choice(["low", "middle", "high", "here"], n, p=[0.6, 0.2, 0.1, 0.1])
    centre = {"low": 0.0, "middle": 2.0, "high": 4.0, "here": 4.0}
    y = np.vectorize(centre.get)(site) + 0.5 * draws.normal(size=n)
    x = (y + draws.normal(size=n))[:, None].astype(np.float32)
    return fs.Task.from_arrays(x, y, client=site, target="here", kind="regression")


class Net(nn.Module):
    """One layer and a head, with features; a number of outputs as the task needs."""

    def __init__(self, task: fs.Task) -> None:
        super().__init__()
        self.body = nn.Linear(task.input_shape[0], 6)
        self.head = nn.Linear(6, len(task.outputs))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        features = torch.relu(self.body(x))
        return {"features": features, "logits": self.head(features)}


class Fixed(Net):
    """A head whose matrix is not trained."""

    def __init__(self, task: fs.Task) -> None:
        super().__init__(task)
        self.head.weight.requires_grad_(False)


class Routed(Net):
    """The same with a router."""

    def __init__(self, task: fs.Task) -> None:
        super().__init__(task)
        self.who = nn.Linear(6, len(task.clients))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        out = super().forward(x)
        return out | {"client_logits": self.who(out["features"])}


class Line(nn.Module):
    """x -> w . x + b as one number per example [n], not [n, 1]."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[:, 0]
