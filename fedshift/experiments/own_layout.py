"""Networks of several inputs, which lie packed in one row of numbers."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fedshift.model import Model
from fedshift.tasks.layout import Layout


class Unpacking(nn.Module):
    """A network that gets x [n, D] as the task's layout packs its inputs."""

    def __init__(self, net: nn.Module, layout: Layout) -> None:
        super().__init__()
        self.net, self.layout = net, layout

    def forward(self, x: Tensor) -> Any:
        """The network's outputs for the inputs that x holds."""
        given = self.layout.unpack(x)
        return self.net(*given) if isinstance(given, tuple) else self.net(given)


def packed(model: Model, layout: Layout | None) -> Model:
    """The model for packed inputs; the same one where there is no layout."""
    if layout is None or isinstance(model.net, Unpacking):
        return model
    return Model(Unpacking(model.net, layout), model.freeze_norm)


def inner(net: nn.Module) -> nn.Module:
    """The user's network."""
    return net.net if isinstance(net, Unpacking) else net
