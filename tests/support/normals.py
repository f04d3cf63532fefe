"""Numbers from a normal distribution."""

from __future__ import annotations

import torch
from torch import Tensor


def drawn(*shape: int, seed: int = 0) -> Tensor:
    source = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=source, dtype=torch.float64)
