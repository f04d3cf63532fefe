"""The LeNet with group normalisation of the FedDRM experiments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from torch import nn

from fedshift.errors import InputError, check_name
from fedshift.models.routed import Routed, projection

Sharing = Literal["deep", "mid", "shallow", "none"]
_SMALLEST = 16


@dataclass(frozen=True)
class Widths:
    """The widths of a LeNet-GN; the default is the FedDRM authors' network.

    channels  of the two convolutions
    groups    of the GroupNorm after each; they must divide the channels
    dense     of the dense layers of the trunk
    branch    of the class branch and of the client branch

    Raises InputError for widths below 1 and groups that do not divide the channels.
    """

    channels: tuple[int, int] = (32, 64)
    groups: tuple[int, int] = (8, 16)
    dense: tuple[int, ...] = (512, 256)
    branch: int = 128

    def __post_init__(self) -> None:
        widths = (*self.channels, *self.groups, *self.dense, self.branch)
        if not self.dense or any(width < 1 for width in widths):
            raise InputError(f"{self}: all widths must be 1 or more, with one dense layer at least")
        if any(c % g for c, g in zip(self.channels, self.groups, strict=True)):
            raise InputError(f"groups={self.groups} must divide channels={self.channels}")


# For 28 x 28 grey images and 8 clients: 55,896 parameters beside the classifier.
SMALL = Widths(channels=(8, 16), groups=(4, 4), dense=(120,), branch=84)


def lenet_gn(
    channels: int,
    size: int,
    classes: int,
    clients: int | None = None,
    *,
    sharing: Sharing = "deep",
    widths: Widths | None = None,
) -> Routed:
    """LeNet with GroupNorm and LayerNorm; inputs [n, channels, size, size].

    Stages: conv 5x5 -> 32, GN(8), ReLU, pool 2; conv 5x5 -> 64, GN(16), ReLU, pool 2; dense -> 512
    -> 256; branch -> 128, each dense layer with LN and ReLU; then the classifier 128 -> K, and from
    a client branch 128 -> M. `widths` gives other numbers. No padding: 32 pixels leave 64*5*5
    values before the dense layers, 28 leave 64*4*4.

    sharing, the stages that a client branch has in common with the class branch:
    "deep"     both convolutions and the dense layers
    "mid"      both convolutions
    "shallow"  the first convolution
    "none"     nothing: two networks

    Without `clients` there is no client branch, and `sharing` changes nothing. First weights are
    torch's: the authors' code defines another initialisation and never calls it.

    Source: Wang et al. 2026 (FedDRM), arXiv 2509.23049, Figure 6; layers from the authors' code,
    which fixes 3 channels of 32 pixels and K = 10.

    Raises InputError for another level of sharing, and images below 16 pixels a side.
    """
    check_name("sharing", sharing, get_args(Sharing))
    if size < _SMALLEST:
        raise InputError(f"this LeNet needs images of at least {_SMALLEST} pixels, got {size}")
    sizes = Widths() if widths is None else widths
    (first, second), (first_groups, second_groups) = sizes.channels, sizes.groups
    side = ((size - 4) // 2 - 4) // 2
    stages = (
        lambda: _convolution(channels, first, first_groups),
        lambda: _convolution(first, second, second_groups),
        lambda: _dense(second * side * side, sizes.dense),
        lambda: projection(sizes.dense[-1], sizes.branch),
    )
    # How many of the four stages; the last one, the projection, is never shared.
    shared = {"deep": 3, "mid": 2, "shallow": 1, "none": 0}[sharing]
    return Routed(stages, sizes.branch, classes, clients, shared=shared)


def _convolution(inputs: int, outputs: int, groups: int) -> nn.Sequential:
    # ReLU after pooling: the same function and gradients, on a quarter of the elements.
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 5), nn.GroupNorm(groups, outputs), nn.MaxPool2d(2), nn.ReLU()
    )


def _dense(inputs: int, widths: tuple[int, ...]) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Flatten()]
    for a, b in zip((inputs, *widths), widths, strict=False):
        layers += projection(a, b)
    return nn.Sequential(*layers)
