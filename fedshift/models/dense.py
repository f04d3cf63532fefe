"""Dense networks."""

from __future__ import annotations

import math
from itertools import pairwise

from torch import Tensor, nn

from fedshift.errors import InputError


class Mlp(nn.Module):
    """Flatten, then hidden layers with ReLU, then K logits; `hidden = ()` is softmax regression."""

    def __init__(self, shape: tuple[int, ...], hidden: tuple[int, ...], classes: int) -> None:
        super().__init__()
        if any(width < 1 for width in hidden):
            raise InputError(f"hidden widths must be 1 or more, got {list(hidden)}")
        widths = (math.prod(shape), *hidden)
        layers: list[nn.Module] = [nn.Flatten()]
        for a, b in pairwise(widths):
            layers += [nn.Linear(a, b), nn.ReLU()]
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        features = self.body(x)
        return {"features": features, "logits": self.head(features)}
