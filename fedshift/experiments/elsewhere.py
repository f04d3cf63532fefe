"""Examples on other machines: here are only their labels' counts, and how to score them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedshift.data import ClientData, Examples
from fedshift.evaluation.scores import Score
from fedshift.tree import Params


@dataclass(frozen=True)
class Elsewhere(Examples):
    """Examples of which x is zeros and y only has the right counts.

    score: (parameters, buffers) -> what that model gets right on the true examples
    """

    score: Callable[[tuple[Params, Params]], Score]


def stand_in(counts: Sequence[int], shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """x [n, *shape] of zeros, which take no memory, and y [n] of which counts [K] are true."""
    y = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    return torch.zeros(1, *shape).expand(len(y), *shape), y


def client_elsewhere(counts: Sequence[int], shape: Sequence[int], client: int) -> ClientData:
    """A client of which only its counts are here."""
    x, y = stand_in(counts, shape)
    return ClientData(x, y, torch.ones(len(y)), torch.tensor(client))
