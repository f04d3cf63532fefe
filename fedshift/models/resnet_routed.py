"""The ResNet-18 of the FedDRM experiments, with and without its client branch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from torch import nn

from fedshift.errors import check_name
from fedshift.models.resnet import Block, backbone
from fedshift.models.routed import Routed, projection, untouched

Init = Literal["kaiming", "torch"]

_GROUPS, _FEATURES, _PROJECTED = 16, 512, 256


def resnet18_routed(
    classes: int, clients: int | None = None, *, channels: int = 3, init: Init = "kaiming"
) -> Routed:
    """ResNet-18 with GroupNorm(16), stem of one 3x3 convolution, and a projection per branch.

    Inputs [n, channels, h, w] of about 32 pixels a side. The backbone gives a trunk of 512 numbers;
    the class projection (512 -> 256, LayerNorm, ReLU) belongs to `body`; `head` is 256 -> K. With
    `clients`, `router` is a projection of the same kind and a client head 256 -> M.

    Parameters, for 3 channels: backbone 11,168,832; each projection 131,840; head 257 K; client
    head 257 M.

    init  "kaiming": normal, variance 2 / fan out for convolutions and 2 / fan in for dense layers;
          biases 0; scale 0 for the last norm of each residual block, so that a block starts as
          relu(shortcut(x)). "torch": what torch's layers draw.

    Source: Wang et al. 2026 (FedDRM), arXiv 2509.23049, Section 4, which says ResNet-18, 512 and
    256; stem, norms, activation and initialisation are those of the authors' code.

    Raises InputError for another init.
    """
    draw: dict[str, Callable[[nn.Module], None]] = {"kaiming": kaiming, "torch": untouched}
    check_name("init", init, draw)
    stages = (
        lambda: backbone(18, "group", "cifar", channels, _GROUPS),
        lambda: projection(_FEATURES, _PROJECTED),
    )
    return Routed(stages, _PROJECTED, classes, clients, shared=1, init=draw[init])


def kaiming(net: nn.Module) -> None:
    """Draw first weights as the FedDRM authors do, see `resnet18_routed`; norms keep torch's 1, 0.

    He et al. 2015, arXiv 1502.01852; zero scales: Goyal et al. 2017, arXiv 1706.02677, Section 5.1.
    """
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, nn.Linear):
            nn.init.kaiming_normal_(module.weight, mode="fan_in", nonlinearity="relu")
        elif isinstance(module, Block):
            last = module.residual[-1]
            if isinstance(last, nn.GroupNorm | nn.BatchNorm2d):
                nn.init.zeros_(last.weight)
        if isinstance(module, nn.Conv2d | nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
