"""Server optimisers: how the combined update moves the global model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Protocol

import torch
from torch import Tensor

from fedshift.arguments import Positive, check_fields
from fedshift.errors import InputError
from fedshift.real import described, number
from fedshift.tree import Params, add, map_, zeros


def check_decay(name: str, given: float) -> None:
    """Raise InputError unless it is in [0, 1)."""
    if not 0.0 <= number(given) < 1.0:
        raise InputError(f"{name} must be in [0, 1), got {described(given)}")


Decay = Annotated[float, check_decay]


class ServerOptimizer(Protocol):
    """(params, delta, state) -> (params, state), `delta` being the clients' combined change."""

    def init(self, params: Params) -> Params:
        """The state before round 1."""

    def __call__(self, params: Params, delta: Params, state: Params) -> tuple[Params, Params]: ...


@dataclass(frozen=True)
class Sgd:
    """m <- momentum m + delta; theta <- theta + lr m.

    lr = 1, momentum = 0 is FedAvg; momentum > 0 is FedAvgM (Hsu et al. 2019, arXiv 1909.06335).
    """

    lr: Positive = 1.0
    momentum: Decay = 0.0

    def __post_init__(self) -> None:
        check_fields(self)

    def init(self, params: Params) -> Params:
        return zeros(params) if self.momentum else {}

    def __call__(self, params: Params, delta: Params, state: Params) -> tuple[Params, Params]:
        # Without momentum there is no state that a checkpoint would have to store.
        if not self.momentum:
            return add(params, delta, self.lr), {}
        moment = map_(lambda m, d: self.momentum * m + d, state, delta)
        return add(params, moment, self.lr), moment


@dataclass(frozen=True)
class Adam:
    """theta <- theta + lr m / (sqrt(v) + tau), entry by entry, with moments

        m <- beta1 m + (1 - beta1) delta,    v <- beta2 v + (1 - beta2) delta^2.

    Reddi et al. 2021, "Adaptive federated optimization", arXiv 2003.00295, Algorithm 2 (FedAdam):
    m starts at 0 and v at tau^2 (the paper asks for v >= tau^2), and there is no bias correction.
    Flower's strategy starts v at 0. Raises InputError for lr or tau not positive, and for beta1 or
    beta2 outside [0, 1).
    """

    lr: Positive = 0.01
    beta1: Decay = 0.9
    beta2: Decay = 0.99
    tau: Positive = 1e-3

    def __post_init__(self) -> None:
        check_fields(self)

    def init(self, params: Params) -> Params:
        # tau^2 is the least that the paper allows. With v = 0 first steps have size lr / tau.
        v = {f"v.{k}": torch.full_like(p, self.tau**2) for k, p in params.items()}
        return {f"m.{k}": p for k, p in zeros(params).items()} | v

    def __call__(self, params: Params, delta: Params, state: Params) -> tuple[Params, Params]:
        after: Params = {}
        moments: Params = {}
        for k, d in delta.items():
            m = self.beta1 * state[f"m.{k}"] + (1.0 - self.beta1) * d
            v = self.second(state[f"v.{k}"], d)
            after[k] = torch.add(params[k], self.lr * m / (v.sqrt() + self.tau))
            moments |= {f"m.{k}": m, f"v.{k}": v}
        order = {k: moments[k] for k in state}  # m of all parameters, then v
        return {k: after[k] for k in params}, order

    def second(self, v: Tensor, d: Tensor) -> Tensor:
        """The second moment after a change d."""
        return self.beta2 * v + (1.0 - self.beta2) * d * d


@dataclass(frozen=True)
class Yogi(Adam):
    """As `Adam`, with v <- v - (1 - beta2) delta^2 sign(v - delta^2).

    Reddi et al. 2021, arXiv 2003.00295, Algorithm 2 (FedYogi). v changes by at most
    (1 - beta2) delta^2 in a round, so it forgets large changes slowly; it never becomes negative.
    Flower's FedYogi starts v at 0. Raises InputError as `Adam` does.
    """

    def second(self, v: Tensor, d: Tensor) -> Tensor:
        return v - (1.0 - self.beta2) * d * d * torch.sign(v - d * d)
