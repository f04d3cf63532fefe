"""Server optimisers: how the combined update moves the global model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from fedshift.errors import InputError
from fedshift.tree import Params, add, map_, zeros


class ServerOptimizer(Protocol):
    """(params, delta, state) -> (params, state); `delta` is the combined change of the clients."""

    def init(self, params: Params) -> Params:
        """The state before round 1."""

    def __call__(self, params: Params, delta: Params, state: Params) -> tuple[Params, Params]: ...


@dataclass(frozen=True)
class Sgd:
    """m <- momentum m + delta; theta <- theta + lr m.

    lr = 1, momentum = 0 is FedAvg; momentum > 0 is FedAvgM (Hsu et al. 2019, arXiv 1909.06335).
    """

    lr: float = 1.0
    momentum: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 < self.lr < float("inf"):
            raise InputError(f"server lr must be a positive number, got {self.lr}")
        if not 0.0 <= self.momentum < 1.0:
            raise InputError(f"server momentum must be in [0, 1), got {self.momentum}")

    def init(self, params: Params) -> Params:
        return zeros(params) if self.momentum else {}

    def __call__(self, params: Params, delta: Params, state: Params) -> tuple[Params, Params]:
        if not self.momentum:
            return add(params, delta, self.lr), {}
        moment = map_(lambda m, d: self.momentum * m + d, state, delta)
        return add(params, moment, self.lr), moment
