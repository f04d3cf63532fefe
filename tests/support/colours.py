"""Random images and every kind of colour."""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor

from fedshift.seeds import generator


def images(n: int = 4, channels: int = 3, side: int = 9, key: int = 0) -> Tensor:
    return torch.rand(n, channels, side, side, generator=generator("covariate", key))


def pixels() -> Tensor:
    """Every colour with channels in quarters (all ties, greys, black, white), then random ones."""
    grid = torch.tensor(list(product((0, 0.25, 0.5, 0.75, 1), repeat=3)))
    return torch.cat((grid, images(1, 3, 30)[0].reshape(3, -1).T)).T.reshape(1, 3, 1, -1)


def close(a: Tensor, b: Tensor, atol: float = 1e-6) -> bool:
    return torch.allclose(a, b, rtol=0, atol=atol)
