"""The two-convolution network of the FedPALS experiments."""

from __future__ import annotations

from torch import Tensor, nn

from fedshift.errors import InputError


class LeNet(nn.Module):
    """conv 6@5x5, pool, conv 16@5x5, pool, 120, 84, K; inputs [n, channels, size, size].

    LeCun et al. 1998 with ReLU and max pooling, as in the FedPALS authors' development code. No
    padding, so size 28 gives 16*4*4 features before the dense layers and size 32 gives 16*5*5.
    `body` ends at the 84 features, `head` is the classifier.
    """

    def __init__(self, channels: int, size: int, classes: int) -> None:
        super().__init__()
        side = ((size - 4) // 2 - 4) // 2  # twice: 5 x 5 without padding, then a pool of 2
        if side < 1:
            raise InputError(f"LeNet needs images of at least 16 pixels a side, got {size}")
        # ReLU after pooling: the same function and gradients, on a quarter of the elements.
        self.body = nn.Sequential(
            nn.Conv2d(channels, 6, 5), nn.MaxPool2d(2), nn.ReLU(),
            nn.Conv2d(6, 16, 5), nn.MaxPool2d(2), nn.ReLU(),
            nn.Flatten(), nn.Linear(16 * side * side, 120), nn.ReLU(),
            nn.Linear(120, 84), nn.ReLU(),
        )  # fmt: skip
        self.head = nn.Linear(84, classes)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        features = self.body(x)
        return {"features": features, "logits": self.head(features)}
