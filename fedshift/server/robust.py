"""Combination rules that a minority of arbitrary changes cannot move far.

Each client has one vote, since sizes and labels are only claims, which must not give influence. The
engine has refused changes that are not finite before they get here, and named the client.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import torch
from torch import Tensor

from fedshift.arguments import Counted, NotNegative, Positive, check_fields, check_whole
from fedshift.errors import InputError
from fedshift.real import described, number
from fedshift.server.combine import Weighed
from fedshift.server.weights import Uniform, Weights
from fedshift.tree import Params, map_, weighted_sum

# Entries of a change that are converted to float64 at a time.
BLOCK = 1 << 16


@dataclass(frozen=True)
class Median(Weighed):
    """v_k = median_i v_ik, coordinate by coordinate; the mean of the middle two if C is even.

    Yin et al. 2018, "Byzantine-robust distributed learning: towards optimal statistical rates",
    arXiv 1803.01498, Definition 1. Leaves [C, ...] -> [...]; weights are ignored.
    """

    def __call__(self, weights: Tensor, stacked: Params, seed: int) -> Params:
        return map_(lambda leaf: _trimmed_mean(leaf, (len(leaf) - 1) // 2), stacked)


@dataclass(frozen=True)
class Trimmed(Weighed):
    """Coordinate by coordinate, the mean without the floor(share C) smallest and largest values.

    Yin et al. 2018, arXiv 1803.01498, Definition 2. share = 0 is the plain mean. Raises InputError
    for a share outside [0, 0.5).
    """

    share: float = 0.2

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0.0 <= number(self.share) < 0.5:
            raise InputError(
                f"share must be at least 0 and less than 0.5, got {described(self.share)}"
            )

    def __call__(self, weights: Tensor, stacked: Params, seed: int) -> Params:
        # 1e-9, because in floating point 0.29 * 100 is 28.999999999999996, and must count as 29.
        return map_(lambda leaf: _trimmed_mean(leaf, int(self.share * len(leaf) + 1e-9)), stacked)


@dataclass(frozen=True)
class Krum(Weighed):
    """The mean of the `keep` changes with the smallest scores

        s_i = sum of the C - f - 2 smallest ||v_i - v_j||^2 over j != i,

    where f = `byzantine` is how many clients may be malicious. Blanchard et al. 2017, "Machine
    learning with adversaries", arXiv 1703.02757, Section 4; keep = 1 is Krum, more is Multi-Krum.
    Ties go to the lower client id. Raises InputError for f < 0 or keep < 1, and for a cohort
    smaller than 2f + 3 or than keep + f.
    """

    byzantine: Annotated[int, partial(check_whole, least=0)] = 1
    keep: Counted = 1

    def __post_init__(self) -> None:
        check_fields(self)

    def weigh(self, table: Params) -> Tensor:
        # Checked here, too, so that a run with too few clients is refused before a client trains.
        self._check(len(table["n"]))
        return super().weigh(table)

    def __call__(self, weights: Tensor, stacked: Params, seed: int) -> Params:
        # A stable sort, so that ties go to the lower client id.
        near = self.scores(stacked).argsort(stable=True)[: self.keep]
        chosen = torch.zeros_like(weights).index_fill(0, near, 1.0 / self.keep)
        return weighted_sum(chosen, stacked)

    def scores(self, stacked: Params) -> Tensor:
        """s [C] of the changes, leaves [C, ...]."""
        square = square_distances(stacked)
        count = len(square)
        self._check(count)
        square.fill_diagonal_(torch.inf)
        return square.sort(dim=1).values[:, : count - self.byzantine - 2].sum(1)

    def _check(self, count: int) -> None:
        """Raise InputError for a cohort that is too small."""
        least = max(2 * self.byzantine + 3, self.keep + self.byzantine)
        if count < least:
            raise InputError(
                f"{count} clients' changes are too few for byzantine={self.byzantine} and "
                f"keep={self.keep}; take at least {least} clients a round, or lower these"
            )


@dataclass(frozen=True)
class Geometric(Weighed):
    """argmin_v sum_i a_i ||v - v_i||, by Weiszfeld's steps; the norm is over the whole model.

        b_i = a_i / max(`floor`, ||v - v_i||),  v <- sum_i b_i v_i / sum_i b_i

    Pillutla, Kakade and Harchaoui 2019, "Robust aggregation for federated learning" (RFA), arXiv
    1912.13445, Algorithm 2. The steps start at the median of each coordinate; in the paper they
    start at the mean, which one huge change moves so far that many steps are needed. They end when
    no coefficient b_i / sum b changes by more than `tolerance`, or after `steps`; the paper takes a
    few. a_i is 1/C by default, n_i / n in the paper. Raises InputError for values out of range.
    """

    weights: Weights = Uniform()
    floor: Positive = 1e-6
    steps: Counted = 200
    tolerance: NotNegative = 1e-9

    def __post_init__(self) -> None:
        check_fields(self)

    def __call__(self, weights: Tensor, stacked: Params, seed: int) -> Params:
        # Start at the median, not at the mean, which one huge change moves far away.
        v = Median()(weights, stacked, seed)
        before = torch.zeros_like(weights)
        for _ in range(self.steps):
            b = weights / distances_to(v, stacked).clamp(min=self.floor)
            a = b / b.sum()
            v = weighted_sum(a, stacked)
            if float((a - before).abs().max()) <= self.tolerance:
                break
            before = a
        return v


def square_distances(stacked: Params) -> Tensor:
    """||v_i - v_j||^2 [C, C] in float64; leaves [C, ...] of one model.

    Computed from differences: from inner products, one huge change would hide the distances between
    the others in rounding.
    """
    count = len(next(iter(stacked.values())))
    total = torch.zeros(count, count, dtype=torch.float64)
    # cdist by default takes inner products for large inputs.
    exact = "donot_use_mm_for_euclid_dist"
    for block in (piece for leaf in stacked.values() for piece in _blocks(leaf)):
        total += torch.cdist(block, block, compute_mode=exact).square()
    return total


def distances_to(v: Params, stacked: Params) -> Tensor:
    """||v - v_i|| [C] in float64; leaves [...] of v and [C, ...] of the changes."""
    total = torch.zeros(len(next(iter(stacked.values()))), dtype=torch.float64)
    for name, leaf in stacked.items():
        centre = v[name].flatten()[None]
        for part, block in zip(_blocks(centre), _blocks(leaf), strict=True):
            total += (block - part).square().sum(1)
    return total.sqrt()


def _blocks(leaf: Tensor) -> Iterator[Tensor]:
    """Yield leaf [C, ...] in pieces of at most [C, BLOCK], each converted to float64."""
    for piece in torch.split(leaf.flatten(1), BLOCK, dim=1):
        yield piece.double()


def _trimmed_mean(leaf: Tensor, cut: int) -> Tensor:
    """The mean over the first axis of `leaf` [C, ...] without `cut` values at either end."""
    # Sort in the leaf's own type; convert only the values that are averaged.
    middle = leaf.sort(dim=0).values[cut : len(leaf) - cut]
    return middle.double().mean(0).to(leaf.dtype)
