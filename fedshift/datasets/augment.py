"""Random changes of training photographs, as in DomainBed: crop, mirror image, colours, grey.

Gulrajani and Lopez-Paz 2021, "In search of lost domain generalization" (arXiv 2007.01434); the
benchmark that the FedPALS authors build on has the same. Every image of a batch has its own
draws, from a generator with the batch's seed.
"""

from __future__ import annotations

import math
from importlib import import_module
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from fedshift.errors import InputError
from fedshift.seeds import generator

AREA, RATIO = (0.7, 1.0), (3 / 4, 4 / 3)
TRIES = 10
JITTER, GREY, MIRROR = 0.3, 0.1, 0.5
COLOURS = ("brightness", "contrast", "saturation", "hue")


class Draws(NamedTuple):
    """Uniform numbers in [0, 1) for B images, float64; more rows do not change the first ones.

    box [B, TRIES, 2] area and ratio; place [B, 2]; mirror [B]; colour, order [B, 4]; grey [B].
    """

    box: Tensor
    place: Tensor
    mirror: Tensor
    colour: Tensor
    order: Tensor
    grey: Tensor


def draw(images: int, seed: int) -> Draws:
    """The draws of a batch of `images` images."""
    sizes = [2 * TRIES, 2, 1, len(COLOURS), len(COLOURS), 1]
    # One row per image: padding a batch does not change the draws of its own images.
    table = torch.rand(images, sum(sizes), generator=generator(seed, "photos"), dtype=torch.float64)
    box, place, mirror, colour, order, grey = torch.split(table, sizes, dim=1)
    return Draws(box.view(-1, TRIES, 2), place, mirror[:, 0], colour, order, grey[:, 0])


def photos(x: Tensor, seed: int) -> Tensor:
    """Images x [B, 3, S, S], bytes or values in [-1, 1], changed at random: float in [-1, 1].

    In this order: a crop of 0.7 to 1 of the area and ratio 3/4 to 4/3, resized to S; mirrored in
    half of the cases; brightness, contrast, saturation (factors 0.7 to 1.3) and hue (shifted by up
    to 0.3 of the circle), in an order drawn for each image; grey in a tenth of the cases.

    As torchvision's transforms on Pillow images, except that values are not rounded to bytes
    between the steps. Raises InputError for images that are not square and of 3 channels, and
    where kornia cannot be imported.
    """
    if x.ndim != 4 or x.shape[1] != 3 or x.shape[2] != x.shape[3]:
        raise InputError(
            f'data.augment = "photos" is for square colour images, these are {tuple(x.shape[1:])}; '
            'use "none"'
        )
    u, kornia = draw(len(x), seed), kornia_module()
    images = x.float().div_(255.0) if x.dtype == torch.uint8 else (x + 1.0) / 2.0
    images = resized(images, crop(u.box, u.place, x.shape[2]), u.mirror < MIRROR)
    images = jittered(kornia, images.clamp_(0.0, 1.0), factors(u.colour), u.order.argsort(1))
    grey = kornia.color.rgb_to_grayscale(images).expand_as(images)
    return torch.where((u.grey < GREY).view(-1, 1, 1, 1), grey, images) * 2.0 - 1.0


def crop(box: Tensor, place: Tensor, size: int) -> Tensor:
    """(top, left, height, width) in pixels for each image of size x size: int64 [B, 4].

    Each of the tries in `box` [B, TRIES, 2] asks for an area of a size^2, a uniform in AREA, and a
    ratio r, log-uniform in RATIO: width sqrt(a r) size, height sqrt(a / r) size, rounded. The first
    that fits is placed by `place` [B, 2]; where none fits, the whole image is taken.
    """
    area = size * size * (AREA[0] + (AREA[1] - AREA[0]) * box[..., 0])
    low, high = map(math.log, RATIO)
    ratio = (low + (high - low) * box[..., 1]).exp()
    sides = torch.stack([(area / ratio).sqrt(), (area * ratio).sqrt()], -1).round().long()
    fits = (sides <= size).all(-1)
    # argmax gives the first of the largest, here the first try that fits.
    first = fits.int().argmax(1)
    taken = sides[torch.arange(len(sides)), first]
    taken = torch.where(fits.any(1, keepdim=True), taken, size)
    return torch.cat([(place * (size - taken + 1)).long(), taken], 1)


def resized(x: Tensor, boxes: Tensor, mirrored: Tensor) -> Tensor:
    """Each image's box, stretched to the whole image and mirrored where `mirrored`: [B, C, S, S].

    Bilinear within the box, pixel centres at (j + 1/2) / S. Boxes are no larger than the image, so
    that nothing is shrunk, and no smoothing against aliasing is needed.
    """
    size = x.shape[2]
    for axis in (0, 1):
        start, length = boxes[:, axis, None], boxes[:, 2 + axis, None]
        position = (torch.arange(size, dtype=torch.float64) + 0.5) * length / size - 0.5
        # The border's half pixels have only one neighbour inside the box.
        position = torch.minimum(position.clamp(min=0.0), length - 1.0)
        if axis:
            position = torch.where(mirrored[:, None], position.flip(1), position)
        before = position.floor().long()
        after = torch.minimum(before + 1, length - 1)
        fraction = _expand_along(position - before, axis, x).to(x.dtype)
        x = torch.lerp(_pick(x, start + before, axis), _pick(x, start + after, axis), fraction)
    return x


def _expand_along(values: Tensor, axis: int, x: Tensor) -> Tensor:
    """[B, S] along an axis of images: as [B, 1, S, 1] or [B, 1, 1, S], expanded like x."""
    return (values[:, None, :, None] if axis == 0 else values[:, None, None, :]).expand_as(x)


def _pick(x: Tensor, index: Tensor, axis: int) -> Tensor:
    """Rows (axis 0) or columns (axis 1) of each image by index [B, S]."""
    return torch.gather(x, 2 + axis, _expand_along(index, axis, x))


def factors(colour: Tensor) -> Tensor:
    """[B, 4]: three factors in 1 -+ JITTER, and a hue shift of -+ JITTER circles, in radians."""
    swing = JITTER * (2.0 * colour - 1.0)
    return torch.cat([1.0 + swing[:, :3], 2.0 * math.pi * swing[:, 3:]], 1)


def jittered(kornia: ModuleType, x: Tensor, by: Tensor, order: Tensor) -> Tensor:
    """x [B, 3, S, S] in [0, 1] through the four COLOURS by factors [B, 4], in each image's order.

    order int64 [B, 4]: which of COLOURS comes first, second, ... Values beyond [0, 1] are clipped
    after every step.
    """
    enhance = kornia.enhance
    steps = (
        enhance.adjust_brightness_accumulative,
        enhance.adjust_contrast_with_mean_subtraction,
        enhance.adjust_saturation_with_gray_subtraction,
        enhance.adjust_hue,
    )
    # Images whose next step is the same are changed together, so that a batch takes few calls.
    x = x.clone()
    for turn in order.T:
        for k, step in enumerate(steps):
            rows = (turn == k).nonzero().flatten()
            if len(rows):
                x[rows] = step(x[rows], by[rows, k].to(x.dtype))
    return x


def kornia_module() -> ModuleType:
    """The module kornia. Raises InputError, with how to install it, where it is missing."""
    try:
        return import_module("kornia")
    except ImportError as error:
        raise InputError(
            f'data.augment = "photos" changes colours with kornia, which cannot be imported '
            f'({error}). Run `pip install "fedshift[vision]"`, or set data.augment = "none".'
        ) from error
