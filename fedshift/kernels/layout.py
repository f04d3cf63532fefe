"""The memory layout of images."""

from __future__ import annotations

import torch
from torch import Tensor

from fedshift.errors import UnfitError


def channels_last(x: Tensor) -> Tensor:
    """The same images [B, C, H, W] with the channels of a pixel side by side in memory.

    Convolutions and the layers after them keep this layout, in which torch's pooling is vectorised.
    The values stay the same; what kernels compute from them differs by rounding. Raises UnfitError
    for inputs that are not images.
    """
    if x.dim() != 4:
        raise UnfitError(
            f"channels-last is for images [n, channels, height, width]; these inputs are "
            f"{tuple(x.shape)}. Use another backend"
        )
    _, c, h, w = x.shape
    # Set the strides by hand: with one channel both layouts are the same memory, and torch would
    # report the other one. Convolutions choose their kernels by the strides.
    laid = x.contiguous(memory_format=torch.channels_last)
    return laid.as_strided(x.shape, (c * h * w, 1, w * c, c))
