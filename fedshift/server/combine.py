"""Combination rules: from the cohort's stacked changes to one change of the global model."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fedshift.arguments import called, check_fields
from fedshift.errors import InputError
from fedshift.server.weights import BySize, Uniform, Weights
from fedshift.tree import Params, Parts, weighted_sum

# Key in the updates: the weights by which each part was summed on arrival, part -> [C].
SUMMED = "summed"
# Columns that clients can register.
COLUMNS = ("n", "labels")
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)


class Combine(Protocol):
    """From weights [C] and leaves [C, ...] to [...]; weights are fixed before any client trains."""

    @property
    def needs(self) -> tuple[str, ...]:
        """Columns of the client table that `weigh` reads."""

    def weigh(self, table: Params) -> Tensor:
        """Weights [C] of the cohort; a client of weight exactly 0 need not train."""

    def __call__(self, weights: Tensor, stacked: Params, seed: int) -> Params: ...


class Weighed(ABC):
    """A combination rule whose weights a are those of the rule `weights`, by default 1/C."""

    weights: Weights = Uniform()

    @property
    def needs(self) -> tuple[str, ...]:
        return self.weights.needs

    def weigh(self, table: Params) -> Tensor:
        try:
            return self.weights(table)
        except KeyError as e:
            column = e.args[0] if e.args else ""
            if column in table or column not in COLUMNS:
                raise
            raise InputError(
                f'the weight rule {called(self.weights)} reads "{column}", and its needs are '
                f"{tuple(self.needs)}; give it needs = {COLUMNS}"
            ) from e

    @abstractmethod
    def __call__(self, weights: Tensor, stacked: Params, seed: int) -> Params: ...


@dataclass(frozen=True)
class Mean(Weighed):
    """sum_i a_i v_i with a from a weight rule."""

    weights: Weights = BySize()

    def __post_init__(self) -> None:
        check_fields(self)
        if hasattr(self.weights, "weigh"):
            raise InputError(
                f"Mean weights must be a rule for weights, got {called(self.weights)}, which "
                "combines already; give BySize()"
            )
        _check_needs(self.weights)

    def __call__(self, weights: Tensor, stacked: Params, seed: int) -> Params:
        return weighted_sum(weights, stacked)


def _check_needs(rule: Weights) -> None:
    """Raise InputError for columns that clients do not register, or a string for the tuple."""
    needs = rule.needs
    if isinstance(needs, str) or not set(needs) <= {*COLUMNS}:
        raise InputError(
            f"the weight rule is {called(rule)} with needs = {needs!r}; give a tuple of columns "
            'that clients register: ("n",) or ("n", "labels")'
        )


def total(updates: Parts, part: str, weights: Tensor) -> Params:
    """sum_i w_i v_i of a part of the updates, leaves [...]; weights [C].

    If the engine has already summed the part (`algorithms.method.Method.sums`), its leaves are
    that sum; otherwise they are stacked, [C, ...]. Raises ValueError if it was summed by other
    weights.
    """
    summed_by = updates.get(SUMMED, {}).get(part)
    if summed_by is None and part not in updates:
        raise InputError(
            f'no client sent "{part}", which the server sums; let client_update return it'
        )
    if summed_by is None:
        return weighted_sum(weights, updates[part])
    if not torch.equal(summed_by, weights):
        # A bug of the method, not of the user: it declared other weights in its `sums`.
        raise ValueError(f'"{part}" was summed by other weights than the server asks for')
    return updates[part]


def combined(combine: Combine, updates: Parts, seed: int) -> Params:
    """Combine the cohort's changes by a rule; for a `Mean` they may be summed already (`total`)."""
    weights = updates["cohort"]["weight"]
    if isinstance(combine, Mean):
        return total(updates, "delta", weights)
    return combine(weights, updates["delta"], seed)


def combine_counters(weights: Tensor, stacked: Params) -> Params:
    """The largest value among clients of positive weight; counters [C, ...] are never averaged."""
    # A client of weight 0 may not have trained, and then its counters mean nothing.
    active = weights > 0

    def largest(v: Tensor) -> Tensor:
        # torch has no `amax` for unsigned integers wider than a byte.
        return (v.long() if v.dtype in UNSIGNED else v)[active].amax(0).to(v.dtype)

    return {k: largest(v) for k, v in stacked.items()}


def check_weights(weights: Tensor, count: int) -> None:
    """Raise InputError unless weights are float64, finite, 0 or more, and sum to 1 within 1e-9."""
    if not isinstance(weights, Tensor) or weights.dtype != torch.float64:
        given = str(weights.dtype) if isinstance(weights, Tensor) else called(weights)
        raise InputError(
            f"a weight rule gave {given}; it returns a tensor of torch.float64, as the columns of "
            "its table are: torch.as_tensor(weights, dtype=torch.float64)"
        )
    if weights.requires_grad:
        raise InputError("a weight rule gave weights with a history of gradients; detach() them")
    if weights.shape != (count,):
        raise InputError(
            f"a cohort of {count} clients was given weights of shape {tuple(weights.shape)}; a "
            f"weight rule returns one number for each, of shape ({count},)"
        )
    total = float(weights.sum())  # one test for all: NaN or infinity in a weight is in the sum, too
    if not math.isfinite(total):
        raise InputError(_not_finite(weights))
    if abs(total - 1.0) > 1e-9 or float(weights.min()) < 0:
        raise InputError(
            f"weights must be 0 or more and sum to 1; these sum to {total!r}, and the smallest is "
            f"{float(weights.min())!r}; divide a rule's numbers by their sum"
        )


def _not_finite(weights: Tensor) -> str:
    """The message for weights without a finite sum: names the first bad one, or an overflow."""
    bad = (~torch.isfinite(weights)).nonzero().flatten().tolist()
    if bad:
        return f"weights must be finite; that of client {bad[0]} of the cohort is {weights[bad[0]]}"
    return (
        f"weights are finite, up to {float(weights.abs().max()):.4g}, and their sum is not: it is "
        "more than a number can hold; divide a rule's numbers before they are summed"
    )
