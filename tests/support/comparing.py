"""Distances between methods, and answers computed in a second way, for tests of laws."""

from __future__ import annotations

import torch
from torch import Tensor

from fedshift.algorithms.method import Method
from fedshift.data import Batch, ClientData
from fedshift.engine.run import Federation
from support.by_hand import final, max_difference


def same(a: Method, b: Method, federation: Federation, rounds: int = 2) -> float:
    """The distance between two methods' models after some rounds; 0 means equal bits."""
    one, two = final(a, federation, rounds), final(b, federation, rounds)
    return max_difference(one.server["params"], two.server["params"])


def whole(data: ClientData) -> Batch:
    """A batch of all examples of a client."""
    n = len(data.y)
    return Batch(data.x, data.y, data.w, torch.arange(n), torch.tensor(float(n)))


def by_bisection(v: Tensor, total: float = 1.0) -> Tensor:
    """max(v - tau, 0), tau by halving an interval: no sorting, no closed form."""
    low, high = float(v.min()) - total, float(v.max())
    for _ in range(200):
        tau = (low + high) / 2
        low, high = (tau, high) if float((v - tau).clamp(min=0).sum()) > total else (low, tau)
    return (v - low).clamp(min=0)
