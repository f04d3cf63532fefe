"""The memory layout of images."""

from __future__ import annotations

import torch
from torch import Tensor

from fedshift.errors import UnfitError


def channels_last(x: Tensor) -> Tensor:
    """The same images [B, C, H, W] with an example's channels of one pixel side by side in memory.

    Convolutions and what follows them then keep to that layout, whose pooling is vectorised. Values
    are the same, and what kernels make of them is but for rounding. Raises UnfitError for inputs of
    another form.
    """
    if x.dim() != 4:
        raise UnfitError(
            f"channels-last is for images [n, channels, height, width]; these inputs are "
            f"{tuple(x.shape)}. Use another backend"
        )
    _, c, h, w = x.shape
    # Strides are written out: with one channel both layouts are the same, and torch would report
    # the other one, by which convolutions choose their kernels.
    laid = x.contiguous(memory_format=torch.channels_last)
    return laid.as_strided(x.shape, (c * h * w, 1, w * c, c))
