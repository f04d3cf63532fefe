"""Examples with a known origin: the site of each, and every site's own test examples."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedshift.datasets.base import Samples
from fedshift.datasets.images import Ints
from fedshift.errors import InputError
from fedshift.holdout import hold_out
from fedshift.sketch import sketched

TEST_SHARE = 0.3


@sketched
@dataclass(frozen=True, eq=False)
class Sites:
    """Example j is x[j] with label y[j] and comes from sites[site[j]]; label k is classes[k].

    Shapes: x uint8 [n, channels, height, width] or float32 [n, d]; y, site int64 [n].

    Raises InputError for x and y that are no `Samples`, or a site or label that has no name.
    """

    x: Tensor
    y: Tensor
    site: Tensor
    sites: tuple[str, ...]
    classes: tuple[str, ...]

    def __post_init__(self) -> None:
        Samples(self.x, self.y)  # for its checks
        if self.site.dtype != torch.int64 or self.site.shape != self.y.shape:
            raise InputError(
                f"site is {self.site.dtype} with shape {list(self.site.shape)}; it must be int64 "
                f"with one number for each of the {len(self.y)} examples"
            )
        _check_named("site", self.site, self.sites)
        _check_named("y", self.y, self.classes)

    def samples(self, rows: Ints) -> Samples:
        """The examples at `rows` [m], in that order."""
        return Samples(self.x, self.y).take(torch.from_numpy(rows))


@dataclass(frozen=True, eq=False)
class SiteSplit:
    """Rows of a `Sites`: train[i] for the training of site i, test[i] for its tests.

    All are ascending, and no row is in two of them.
    """

    train: tuple[Ints, ...]
    test: tuple[Ints, ...]


def split_sites(site: Ints, sites: int, seed: int, test: float = TEST_SHARE) -> SiteSplit:
    """Every site's rows divided by `fedshift.holdout.hold_out`; `site` [n] numbers sites from 0.

    A global test set is all test rows together.

    Raises InputError for a site so small that it would train or be tested on nothing.
    """
    parts = [np.flatnonzero(site == i).astype(np.int64) for i in range(sites)]
    return SiteSplit(*hold_out(parts, test, seed))


def pooled(data: Sites, split: SiteSplit) -> tuple[Samples, Samples]:
    """(all training examples, all test examples), site by site."""
    return (
        data.samples(np.concatenate(split.train)),
        data.samples(np.concatenate(split.test)),
    )


def _check_named(what: str, numbers: Tensor, names: tuple[str, ...]) -> None:
    if len(numbers) and not 0 <= int(numbers.min()) <= int(numbers.max()) < len(names):
        raise InputError(
            f"{what} goes from {int(numbers.min())} to {int(numbers.max())}, but there are "
            f"{len(names)} names: {', '.join(names)}"
        )
