"""Random crops that are resized to the whole image, as an augmentation beside a feature shift."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedshift.arguments import check_fields
from fedshift.errors import InputError
from fedshift.shifts.colour import check_images

_TRIES = 10


@dataclass(frozen=True)
class RandomResizedCrop:
    """Each image becomes a random box of itself, resized bilinearly to the image's own size.

    Per image, up to ten times: area share s ~ U(scale), log ratio r ~ U(log ratio), box of
    round(sqrt(s h w / r)) rows and round(sqrt(s h w r)) columns; the first one that fits is taken,
    at a uniform place. If none fits: the largest central box with its ratio in bounds. Pixel j of
    the result reads position (j + 1/2) b / w - 1/2 of the box of b columns, clamped to the box.

    Szegedy et al. 2014, arXiv 1409.4842, Section 6; the procedure is torchvision's. The FedDRM
    authors' code does this with scale 0.9 to 1 before the colours are changed, freshly for every
    image that is read, in training and in testing; their paper does not mention it. Here nothing
    calls it: a client's images are made once, and cropping test images would add noise to every
    accuracy. To follow their code, `crop(images, generator)` before the transform.

    images [n, 3 or 1, h, w] in [0, 1] to the same; all draws come from `generator`.

    Raises InputError for shares or ratios out of order, and images as in `check_images`.
    """

    scale: tuple[float, float] = (0.9, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise InputError(f"scale={self.scale}; allowed: 0 < low <= high <= 1")
        if not 0 < self.ratio[0] <= self.ratio[1] < math.inf:
            raise InputError(f"ratio={self.ratio}; allowed: 0 < low <= high")

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        n, _, height, width = check_images(images).shape
        top, left, rows, columns = self.boxes(n, height, width, generator)
        down, across = _positions(top, rows, height), _positions(left, columns, width)
        # Rows, then columns: bilinear interpolation is the product of two linear ones.
        out = _interpolated(images, down[:, None, :, None], 2)
        return _interpolated(out, across[:, None, None, :], 3).clamp(0, 1)

    def boxes(
        self, n: int, height: int, width: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(top, left, rows, columns) of n boxes, int64 [n] each."""
        # All tries of all images at once, so that the number of draws does not depend on which fit.
        u = torch.rand(4, n, _TRIES, generator=generator, dtype=torch.float64)
        low, high = (math.log(r) for r in self.ratio)
        area = (self.scale[0] + (self.scale[1] - self.scale[0]) * u[0]) * height * width
        ratio = (low + (high - low) * u[1]).exp()
        rows, columns = (area / ratio).sqrt().round(), (area * ratio).sqrt().round()
        fits = (rows >= 1) & (rows <= height) & (columns >= 1) & (columns <= width)
        first = fits.int().argmax(1, keepdim=True)  # of equal values the first; 0 if none fits
        box = (rows, columns, (height - rows + 1) * u[2], (width - columns + 1) * u[3])
        drawn = torch.stack([v.gather(1, first)[:, 0] for v in box]).floor()
        central = drawn.new_tensor(_central(height, width, self.ratio))[:, None]
        tall, wide, top, left = torch.where(fits.any(1), drawn, central).long()
        return top, left, tall, wide


def _central(height: int, width: int, ratio: tuple[float, float]) -> tuple[int, int, int, int]:
    """(rows, columns, top, left) of the largest central box with columns / rows within `ratio`."""
    rows = min(height, round(width / ratio[0]))
    columns = min(width, round(height * ratio[1]))
    return rows, columns, (height - rows) // 2, (width - columns) // 2


def _positions(start: Tensor, length: Tensor, size: int) -> Tensor:
    """Positions [n, size] that the result's pixels read, for boxes of `length` from `start`."""
    j = torch.arange(size, dtype=torch.float64)
    offset = (j + 0.5) * (length / size)[:, None] - 0.5
    return start[:, None] + torch.minimum(offset.clamp(min=0), (length - 1)[:, None])


def _interpolated(images: Tensor, positions: Tensor, axis: int) -> Tensor:
    """Linear interpolation along `axis` at `positions`: n at axis 0, the size at `axis`."""
    positions = positions.to(images.device)
    low = positions.floor().long()
    high = (low + 1).clamp(max=images.shape[axis] - 1)
    share = (positions - low).to(images.dtype)
    a, b = (images.gather(axis, i.expand_as(images)) for i in (low, high))
    return a + (b - a) * share
