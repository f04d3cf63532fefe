"""Small images for a network with a convolution, a pool and a linear layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedshift.client.local import Local
from fedshift.data import client_data, register
from fedshift.engine.run import Federation
from fedshift.model import build
from fedshift.recipes import Setting
from fedshift.seeds import Seeds, generator
from support.federations import CLASSES, TARGET


class Pooled(nn.Module):
    """Two convolutions with pooling, which record the memory layout of their inputs."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(channels, 6, 3, padding=1), nn.Conv2d(6, 8, 3, padding=1)
        self.head = nn.Linear(8 * 4, CLASSES)
        self.seen: list[tuple[int, ...]] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x)
        self.seen.append(x.stride())
        x = nn.functional.max_pool2d(x.relu(), 2)
        return self.head(nn.functional.max_pool2d(self.two(x).relu(), 2).flatten(1))


def images(channels: int, dtype: torch.dtype) -> tuple[Federation, Setting]:
    source = generator(0, "images")
    clients = [
        client_data(
            torch.randn(n, channels, 8, 8, generator=source).to(dtype),
            torch.randint(CLASSES, (n,), generator=source), i,
        )
        for i, n in enumerate((9, 14, 6))
    ]  # fmt: skip
    model = build(lambda: Pooled(channels), 1)
    params = {k: v.to(dtype) for k, v in model.init()[0].items()}
    federation = Federation(clients, params, {}, register(clients, CLASSES), Seeds.of(0))
    return federation, Setting(model, TARGET, Local(lr=0.1, batch=5))
