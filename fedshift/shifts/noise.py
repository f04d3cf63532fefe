"""Feature shift by Gaussian noise that grows with the client's id."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedshift.arguments import check_fields
from fedshift.errors import InputError
from fedshift.seeds import generator, numpy_generator
from fedshift.shifts.base import check_count
from fedshift.shifts.colour import check_images
from fedshift.shifts.covariate import Pool


@dataclass(frozen=True)
class GaussianNoise:
    """x -> clip(x + e, 0, 1), e ~ N(0, deviation^2) independently for each value.

    `deviation` is a standard deviation, on images [n, 3 or 1, h, w] in [0, 1]; 0 changes nothing.
    The noise of an image is drawn from (seed, client, the image itself). It does not depend on the
    other images in the batch, and differs between images.

    Raises InputError unless the deviation is a finite number of at least 0, and for a client below
    0.
    """

    deviation: float
    seed: int = 0
    client: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        if not (math.isfinite(self.deviation) and self.deviation >= 0.0):
            raise InputError(
                f"noise of standard deviation {self.deviation}; allowed: a finite number >= 0"
            )
        check_count("client", self.client, 0)

    def __call__(self, images: Tensor) -> Tensor:
        check_images(images)
        if not self.deviation or not len(images):
            return images  # torch.stack refuses an empty list
        noise = torch.stack([self._drawn(image) for image in images])
        return (images + self.deviation * noise).clamp(0.0, 1.0)

    def _drawn(self, image: Tensor) -> Tensor:
        # Keyed by the pixels, so that an image has the same noise in every batch and split.
        digest = hashlib.blake2b(image.contiguous().numpy().data, digest_size=8).hexdigest()
        rng = generator(self.seed, "noise", self.client, digest)
        return torch.randn(image.shape, generator=rng, dtype=image.dtype)


@dataclass(frozen=True)
class Shared:
    """Image j of a set goes through entry o_j of a pool; equally many through each, or one more.

    The order o is drawn by (seed, number of images): for test images that look like those of all
    clients.
    Raises InputError for an empty pool.
    """

    pool: Pool
    seed: int = 0

    def __post_init__(self) -> None:
        check_count("looks in the pool", len(self.pool), 1)

    def __call__(self, images: Tensor) -> Tensor:
        # Dealt in turn from a random order: parts differ in size by at most one image.
        order = numpy_generator(self.seed, "shared looks").permutation(len(images))
        changed = images.clone()  # the caller's images stay
        for i, rows in enumerate(order[k :: len(self.pool)] for k in range(len(self.pool))):
            changed[rows] = self.pool[i](images[rows])
        return changed


def noise_pool(sigma: float, clients: int, seed: int = 0) -> Pool:
    """Entry i - 1 adds noise of standard deviation sigma i / M, i = 1, ..., M: no client is clean.

    Source: the MADE/MOON report, which writes N(0, sigma i / M) with sigma = 0.5 and does not say
    whether that is a variance. Chosen: a standard deviation, as NIID-Bench's code has it (Li et al.
    2022, arXiv 2102.02079; sigma i / (M - 1) from i = 0 there). Raises InputError for sigma below
    0 and no clients.
    """
    check_count("clients", clients, 1)
    # From 1: at i = 0 the first client would see clean images.
    steps = range(1, clients + 1)
    return tuple(GaussianNoise(sigma * i / clients, seed, i - 1) for i in steps)
