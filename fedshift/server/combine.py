"""Combination rules: from the cohort's stacked changes to one change of the global model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fedshift.server.weights import BySize, Weights
from fedshift.tree import Params, Parts, weighted_sum

# Of the updates: by which weights a part was summed while replies came in, part -> [C].
SUMMED = "summed"


class Combine(Protocol):
    """weights [C] and leaves [C, ...] -> [...]; the weights are known before anybody trains."""

    @property
    def needs(self) -> tuple[str, ...]:
        """Columns of the client table that `weigh` reads."""

    def weigh(self, table: Params) -> Tensor:
        """Weights [C] of the cohort; a client of weight exactly 0 need not train."""

    def __call__(self, weights: Tensor, stacked: Params, seed: int) -> Params: ...


@dataclass(frozen=True)
class Mean:
    """sum_i a_i v_i with a from a weight rule."""

    weights: Weights = BySize()

    @property
    def needs(self) -> tuple[str, ...]:
        return self.weights.needs

    def weigh(self, table: Params) -> Tensor:
        return self.weights(table)

    def __call__(self, weights: Tensor, stacked: Params, seed: int) -> Params:
        return weighted_sum(weights, stacked)


def total(updates: Parts, part: str, weights: Tensor) -> Params:
    """sum_i w_i v_i of a part of the updates, leaves [...]; weights [C].

    Where the engine has summed the part already (`algorithms.base.Capabilities.sums`), its leaves
    are that sum; else they are stacked, [C, ...]. Raises ValueError for a sum by other weights.
    """
    by = updates.get(SUMMED, {}).get(part)
    if by is None:
        return weighted_sum(weights, updates[part])
    if not torch.equal(by, weights):
        raise ValueError(f'"{part}" was summed by other weights than the server asks for')
    return updates[part]


def combined(combine: Combine, updates: Parts, seed: int) -> Params:
    """The cohort's changes by a rule; for a `Mean`, their sum as in `total`."""
    weights = updates["cohort"]["weight"]
    if isinstance(combine, Mean):
        return total(updates, "delta", weights)
    return combine(weights, updates["delta"], seed)


def combine_counters(weights: Tensor, stacked: Params) -> Params:
    """The largest value among clients of positive weight; counters [C, ...] are never averaged."""
    held = weights > 0
    return {k: v[held].amax(0) for k, v in stacked.items()}


def check_weights(weights: Tensor, count: int) -> None:
    """Weights used in aggregation are finite, non-negative and sum to 1 within 1e-9."""
    total = float(weights.sum())  # not finite where one of them is not
    if weights.shape != (count,) or not math.isfinite(total):
        raise ValueError(f"weights of shape {tuple(weights.shape)} for {count} clients")
    if abs(total - 1.0) > 1e-9 or float(weights.min()) < 0:
        raise ValueError(f"weights must lie on the simplex, they sum to {total!r}")
