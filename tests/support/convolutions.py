"""Inputs, kernels and gradients of convolutions."""

from __future__ import annotations

import torch
from torch import Tensor

from fedshift.seeds import generator

Sizes = tuple[int, int, int, int, int]


def drawn(
    sizes: Sizes, dtype: torch.dtype = torch.float64, r: int = 3, border: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """x [n, c, h, w], a kernel [k, c, r, r], delta [n, k, h', w']."""
    n, c, k, h, w = sizes
    source, less = generator(0, "winograd"), r - 1 - 2 * border

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=source, dtype=torch.float64).to(dtype)

    return normal(n, c, h, w), normal(k, c, r, r), normal(n, k, h - less, w - less)


def relative_error(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).norm() / other.double().norm())
