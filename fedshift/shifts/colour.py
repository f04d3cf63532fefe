"""Checks of images as floats; red, green, blue to hue, saturation, value and back."""

from __future__ import annotations

import torch
from torch import Tensor

from fedshift.errors import InputError

_CHANNELS = (1, 3)
# Where red, green and blue stand on the circle of hues, in sixths, seen from the decoding formula.
_PLACES = (5.0, 3.0, 1.0)


def check_images(images: Tensor) -> Tensor:
    """`images` when they are floats in [0, 1] of shape [n, 3 or 1, h, w]; n = 0 is accepted.

    Raises InputError for another type or shape, values outside [0, 1] and NaN.
    """
    if not isinstance(images, Tensor) or not images.is_floating_point():
        kind = getattr(images, "dtype", type(images).__name__)
        raise InputError(
            f"images are {kind}; allowed: floats in [0, 1]. Give bytes as x.float() / 255."
        )
    if images.ndim != 4 or images.shape[1] not in _CHANNELS:
        raise InputError(
            f"images have shape {list(images.shape)}; allowed: [n, 3, height, width] or "
            "[n, 1, height, width]. Give one image as x[None]."
        )
    if images.numel():
        low, high = (float(v) for v in images.aminmax())
        if low != low:  # NaN
            raise InputError("images contain NaN; allowed: numbers in [0, 1].")
        if low < 0 or high > 1:
            raise InputError(
                f"images have values from {low:g} to {high:g}; allowed: 0 to 1. Feature shifts "
                "come before any normalisation: scale bytes by 1/255, and to [-1, 1] afterwards."
            )
    return images


def rgb_to_hsv(images: Tensor) -> Tensor:
    """Red, green, blue in [0, 1] to hue in [0, 1), saturation and value in [0, 1].

    With a the largest and b the smallest of (R, G, B):

        V = a,  S = (a - b) / a (0 for black),
        H = ((G - B) / (a - b)) / 6 mod 1      if R = a,
            (2 + (B - R) / (a - b)) / 6        if G = a > R,
            (4 + (R - G) / (a - b)) / 6        otherwise;  0 for greys.

    Shapes: [n, 3, h, w] to the same. Source: Smith 1978, "Color gamut transform pairs"; the values
    are those of Python's `colorsys`.
    """
    red, green, blue = images.unbind(1)
    value = images.amax(1)
    spread = value - images.amin(1)
    # Where the denominator would be 0 the numerators are too, so any other one will do.
    over = torch.where(spread > 0, spread, 1.0)
    sector = torch.where(
        red == value,
        (green - blue) / over,
        torch.where(green == value, 2 + (blue - red) / over, 4 + (red - green) / over),
    )
    hue = torch.where(spread > 0, (sector / 6) % 1.0, 0.0)
    saturation = spread / torch.where(value > 0, value, 1.0)
    return torch.stack((hue, saturation, value), 1)


def hsv_to_rgb(images: Tensor) -> Tensor:
    """Hue (any number, modulo 1), saturation, value in [0, 1] to red, green, blue in [0, 1].

        C_j = V - V S max(0, min(k, 4 - k, 1)),  k = (j + 6 H) mod 6,  j = 5, 3, 1 for R, G, B.

    Shapes: [n, 3, h, w] to the same. Inverse of `rgb_to_hsv`.
    """
    hue, saturation, value = images.unbind(1)
    parts = []
    # By arithmetic for all pixels at once; `colorsys` branches over six sectors.
    for place in _PLACES:
        k = (place + 6 * hue) % 6
        share = torch.minimum(k, 4 - k).clamp(0, 1)
        parts.append(value - value * saturation * share)
    return torch.stack(parts, 1)
