"""Dense networks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

from torch import Tensor, nn

from fedshift.arguments import called, check_whole
from fedshift.errors import InputError
from fedshift.models.routed import Routed, projection


class Mlp(nn.Module):
    """Flatten, then hidden layers with ReLU, then K logits; `hidden = ()` is softmax regression."""

    def __init__(self, shape: tuple[int, ...], hidden: tuple[int, ...], classes: int) -> None:
        super().__init__()
        for name, given in (("shape", shape), ("hidden", hidden)):
            if isinstance(given, int | str):
                raise InputError(
                    f"Mlp {name} must be a tuple, got {called(given)}; give ({given},)"
                )
        check_whole("Mlp classes", classes, 1)
        if any(width < 1 for width in hidden):
            raise InputError(f"hidden widths must be 1 or more, got {list(hidden)}")
        widths = (math.prod(shape), *hidden)
        # Flatten inside the body, so that images and vectors are both accepted.
        layers: list[nn.Module] = [nn.Flatten()]
        for a, b in pairwise(widths):
            layers += [nn.Linear(a, b), nn.ReLU()]
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        features = self.body(x)
        return {"features": features, "logits": self.head(features)}

    def chain(self) -> Sequence[nn.Module]:
        """The modules that give the logits in turn."""
        return self.body, self.head


def routed_mlp(
    shape: tuple[int, ...], hidden: tuple[int, ...], classes: int, clients: int | None = None
) -> Routed:
    """Hidden layers with LayerNorm and ReLU, then K logits; with `clients`, a client branch.

    The branches share all hidden layers but the last, of which each has its own. Raises InputError
    without hidden layers, for widths below 1, and for clients below 1.
    """
    if not hidden or any(width < 1 for width in hidden):
        raise InputError(f"hidden must name one width or more, each at least 1, got {list(hidden)}")
    widths = (math.prod(shape), *hidden)

    def stage(a: int, b: int) -> Callable[[], nn.Module]:
        return lambda: nn.Sequential(nn.Flatten(), *projection(a, b))

    stages = [stage(a, b) for a, b in pairwise(widths)]
    return Routed(stages, hidden[-1], classes, clients, shared=len(stages) - 1)
