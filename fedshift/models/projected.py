"""Networks with MOON's projection head between features and classifier."""

from __future__ import annotations

from torch import Tensor, nn

from fedshift.errors import InputError
from fedshift.models.dense import Mlp
from fedshift.models.lenet import LeNet

WIDTH = 256


class Projected(nn.Module):
    """z = W_2 relu(W_1 f + b_1) + b_2 on the features f [n, width] of `body`; logits W z + b.

    W_1 is [width, width], W_2 [out, width]. "features" is z, which MOON's term compares: the head
    is part of the network in prediction, too, so compare methods on one network, with or without.

    `body` holds all up to z, `head` is the classifier.

    Li, He and Song 2021 (MOON), arXiv 2103.16257, Section 3.2, with out = 256; the authors' code
    has the layers above, and no normalisation but in the cosine. Raises InputError unless out >= 1.
    """

    def __init__(self, body: nn.Module, width: int, classes: int, out: int = WIDTH) -> None:
        super().__init__()
        if out < 1:
            raise InputError(f"a projection to {out} features; give 1 or more")
        # In the body: MOON's term and the head both see z, and the head stays one layer.
        projection = (nn.Linear(width, width), nn.ReLU(), nn.Linear(width, out))
        self.body = nn.Sequential(body, *projection)
        self.head = nn.Linear(out, classes)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        z = self.body(x)
        return {"features": z, "logits": self.head(z)}


def projected_mlp(
    shape: tuple[int, ...], hidden: tuple[int, ...], classes: int, out: int = WIDTH
) -> Projected:
    """`Mlp`'s hidden layers under a projection head. Raises InputError without hidden layers."""
    if not hidden:
        raise InputError("a projection head needs features to project: give one hidden layer")
    return Projected(Mlp(shape, hidden, classes).body, hidden[-1], classes, out)


def projected_lenet(channels: int, size: int, classes: int, out: int = WIDTH) -> Projected:
    """`LeNet`'s 84 features under a projection head."""
    net = LeNet(channels, size, classes)
    return Projected(net.body, net.head.in_features, classes, out)
