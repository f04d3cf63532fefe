"""Feature shift: clients that see the same kinds of images in other colours or brightness.

All transforms act on each pixel alone, in floats: images in [0, 1], [n, 3 or 1, h, w], to the same.
They are pure, draw nothing, and raise InputError for other input (`colour.check_images`).

Source of values, order and indices: Wang et al. 2026, "FedDRM" (arXiv 2509.23049), Section 4, and
the authors' code, which works on 8-bit images and rounds after each step; here nothing is rounded
(chosen: exact definitions that a test can execute).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from fedshift.arguments import check_fields
from fedshift.errors import InputError, check_name
from fedshift.shifts.base import check_count
from fedshift.shifts.colour import check_images, hsv_to_rgb, rgb_to_hsv

Transform = Callable[[Tensor], Tensor]
Pool = tuple[Transform, ...]

# Luma of ITU-R BT.601. torchvision has 0.2989, which makes a grey darker by 1e-4.
_LUMA = (0.299, 0.587, 0.114)

# PIL's gamma table turns a float into a byte by this factor and rounding down; it keeps v/255.
_TO_BYTE = 255.999

_BITS = {
    "low": ((0.9, 1.1), (-0.01, 0.01), (0.9, 1.1)),
    "mid": ((0.75, 1.25), (-0.05, 0.05), (0.7, 1.3)),
    "high": ((0.6, 1.4), (-0.1, 0.1), (0.5, 1.5)),
}
_WIDE = ((0.6, 1.0, 1.4), (-0.15, 0.0, 0.15), (0.4, 1.0, 1.6))
_WIDE_BITS = 2


@dataclass(frozen=True)
class Gamma:
    """x -> x^gamma; below 1 brightens, above 1 darkens, 1 changes nothing.

    Raises InputError for gamma that is not a finite number above 0.
    """

    gamma: float

    def __post_init__(self) -> None:
        if not _finite(self.gamma) or self.gamma <= 0:
            raise InputError(f"gamma={self.gamma!r}; allowed: a finite number above 0.")

    def __call__(self, images: Tensor) -> Tensor:
        return check_images(images) ** self.gamma


@dataclass(frozen=True)
class Brightness:
    """x -> min(factor x, 1).

    Raises InputError for a factor that is not a finite number of at least 0.
    """

    factor: float

    def __post_init__(self) -> None:
        _check_factor("brightness", self.factor)

    def __call__(self, images: Tensor) -> Tensor:
        return (self.factor * check_images(images)).clamp(max=1)


@dataclass(frozen=True)
class Invert:
    """x -> 1 - x."""

    def __call__(self, images: Tensor) -> Tensor:
        return 1 - check_images(images)


@dataclass(frozen=True)
class Saturation:
    """x -> clip(kappa x + (1 - kappa) g, 0, 1), g = 0.299 R + 0.587 G + 0.114 B at the same pixel.

    kappa = `factor`: 0 leaves grey, 1 changes nothing. Greys, and images of one channel, stay as
    they are.

    Raises InputError for a factor that is not a finite number of at least 0.
    """

    factor: float

    def __post_init__(self) -> None:
        _check_factor("saturation", self.factor)

    def __call__(self, images: Tensor) -> Tensor:
        if check_images(images).shape[1] == 1:
            return images
        # A weighted mean, as eyes see brightness; kappa above 1 moves away from it.
        grey = (images * images.new_tensor(_LUMA).view(3, 1, 1)).sum(1, keepdim=True)
        return (self.factor * images + (1 - self.factor) * grey).clamp(0, 1)


@dataclass(frozen=True)
class Hue:
    """H -> (H + shift) mod 1 in hue, saturation, value (`colour.rgb_to_hsv`), and back.

    `shift` is in turns: 1/3 makes red green, green blue and blue red, whole numbers change nothing.
    Greys, and images of one channel, stay as they are.

    Raises InputError for a shift that is not a finite number.
    """

    shift: float

    def __post_init__(self) -> None:
        if not _finite(self.shift):
            raise InputError(f"hue shift={self.shift!r}; allowed: a finite number, in turns.")

    def __call__(self, images: Tensor) -> Tensor:
        # Greys have no hue; a whole turn would only add the rounding of the way there and back.
        if check_images(images).shape[1] == 1 or self.shift % 1 == 0:
            return images
        hsv = rgb_to_hsv(images)
        return hsv_to_rgb(torch.cat(((hsv[:, :1] + self.shift) % 1.0, hsv[:, 1:]), 1))


@dataclass(frozen=True)
class Posterise:
    """The `bits` top bits of each 8-bit value: x -> s floor(v / s) / 255.

    v = min(floor(255.999 x), 255) and s = 2^(8 - bits). This v is the byte that the authors' 8-bit
    path has after its gamma step, so on bytes v/255 `Gamma` and `Posterise` together are that path.

    Raises InputError unless bits is 1..8.
    """

    bits: int

    def __post_init__(self) -> None:
        check_count("bits", self.bits, 1, 8)

    def __call__(self, images: Tensor) -> Tensor:
        step = 2.0 ** (8 - self.bits)
        # 8 - bits low bits are dropped: multiples of `step` are left.
        byte = (check_images(images) * _TO_BYTE).floor().clamp(max=255)
        return (byte / step).floor() * step / 255


@dataclass(frozen=True)
class Compose:
    """The steps one after the other, the first one first; no steps change nothing."""

    steps: tuple[Transform, ...]

    def __post_init__(self) -> None:
        check_fields(self)

    def __call__(self, images: Tensor) -> Tensor:
        check_images(images)
        for step in self.steps:
            images = step(images)
        return images


def bit_pool(intensity: str = "high") -> Pool:
    """Eight transforms: saturation, then hue, then gamma, each at one of two values.

    Entry i takes gamma by bit 0 of i, hue by bit 1 and saturation by bit 2 (0: the first value).

    | intensity | gamma | hue shift | saturation |
    | low | 0.9, 1.1 | -0.01, 0.01 | 0.9, 1.1 |
    | mid | 0.75, 1.25 | -0.05, 0.05 | 0.7, 1.3 |
    | high | 0.6, 1.4 | -0.1, 0.1 | 0.5, 1.5 |

    "high" is the setting of FedDRM's Tables 1, 2 and 4; all three are in its Figure 5.

    Raises InputError for another intensity.
    """
    check_name("intensity", intensity, _BITS)
    gammas, hues, saturations = _BITS[intensity]
    return tuple(
        Compose((Saturation(kappa), Hue(turn), Gamma(gamma)))
        for kappa, turn, gamma in product(saturations, hues, gammas)
    )


def wide_pool() -> Pool:
    """54 transforms: saturation, hue, gamma at three values each, and 2-bit posterising or none.

    Entry i takes gamma 0.6, 1, 1.4 by i mod 3, hue -0.15, 0, 0.15 by floor(i/3) mod 3, saturation
    0.4, 1, 1.6 by floor(i/9) mod 3, and is posterised from 27 on. So 8 clients, which take the
    first eight, all have saturation 0.4. FedDRM's Table 3; indices and bits are the authors'
    code's.
    """
    gammas, hues, saturations = _WIDE
    return tuple(
        Compose((Saturation(kappa), Hue(turn), Gamma(gamma), *last))
        for last, kappa, turn, gamma in product(
            ((), (Posterise(_WIDE_BITS),)), saturations, hues, gammas
        )
    )


def fashion_pool() -> Pool:
    """Eight transforms of grey images: brightness, then gamma 2 or none, then inversion or none.

    Entry i takes brightness 0.5, 1.5 by bit 0 of i, inversion by bit 1 and gamma by bit 2. In the
    authors' code, and in no table of the paper; there on images of 32 x 32 in three channels.
    """
    return tuple(
        Compose((Brightness(factor), *darker, *negative))
        for darker, negative, factor in product(((), (Gamma(2.0),)), ((), (Invert(),)), (0.5, 1.5))
    )


def transform_of(pool: Pool, client: int) -> Transform:
    """What client i's images go through: entry i of the pool.

    Raises InputError for a client that the pool has no entry for.
    """
    do = f"Use at most {len(pool)} clients, or a larger pool; wide_pool() has 54 entries."
    return pool[check_count("client", client, 0, len(pool) - 1, do)]


def _finite(value: object) -> bool:
    # True is an int, but no factor.
    return isinstance(value, int | float) and value is not True and math.isfinite(value)


def _check_factor(name: str, value: float) -> None:
    if not _finite(value) or value < 0:
        raise InputError(f"{name} factor={value!r}; allowed: a finite number of at least 0.")
