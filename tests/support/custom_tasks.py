"""Small tasks and networks for tests of `fedshift.fit`."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import fedshift as fs

RATES = {"north": 0.7, "south": 0.2, "east": 0.4, "west": 0.55}


def rows(n: int = 400, seed: int = 0) -> tuple[NDArray[np.float32], NDArray[np.str_], list[str]]:
    """x [n, 4], labels and hospitals; the share of "ill" differs between hospitals."""
    draws = np.random.default_rng(seed)
    site = draws.choice(list(RATES), n)
    ill = draws.random(n) < np.vectorize(RATES.get)(site)
    x = draws.normal(size=(n, 4)).astype(np.float32)
    x[:, 0] += 1.5 * ill
    return x, np.where(ill, "ill", "well"), list(site)


def hospitals(target: str = "north", n: int = 400, seed: int = 0) -> fs.Task:
    """Three hospitals that train, and one that is the target; or four with tests of their own."""
    x, y, site = rows(n)
    return fs.Task.from_arrays(x, y, client=site, target=target, seed=seed)


class Net(nn.Module):
    """A network of the task, by its shape and classes."""

    def __init__(self, task: fs.Task) -> None:
        super().__init__()
        self.body = nn.Linear(task.input_shape[0], 8)
        self.head = nn.Linear(8, len(task.classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.body(x)))
