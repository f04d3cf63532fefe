"""Server optimisers: how the combined update moves the global model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from fedshift.arguments import check_fields
from fedshift.errors import InputError
from fedshift.real import described, number
from fedshift.tree import Params, add, map_, zeros


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

    lr: float = 1.0
    momentum: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0.0 < number(self.lr) < float("inf"):
            raise InputError(f"server lr must be a positive number, got {described(self.lr)}")
        if not 0.0 <= number(self.momentum) < 1.0:
            raise InputError(f"server momentum must be in [0, 1), got {described(self.momentum)}")

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

    lr: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3

    def __post_init__(self) -> None:
        check_fields(self)
        _check_moments(self.lr, self.beta1, self.beta2, self.tau)

    def init(self, params: Params) -> Params:
        return _first_moments(params, self.tau)

    def __call__(self, params: Params, delta: Params, state: Params) -> tuple[Params, Params]:
        m, v = _blend(_moment("m", state), delta, self.beta1), _moment("v", state)
        v = map_(lambda v, d: self.beta2 * v + (1.0 - self.beta2) * d * d, v, delta)
        return _step(params, m, v, self.lr, self.tau), _prefixed("m", m) | _prefixed("v", v)


@dataclass(frozen=True)
class Yogi:
    """As `Adam`, with v <- v - (1 - beta2) delta^2 sign(v - delta^2).

    Reddi et al. 2021, arXiv 2003.00295, Algorithm 2 (FedYogi). v changes by at most
    (1 - beta2) delta^2 in a round, so it forgets large changes slowly; it never becomes negative.
    Flower's FedYogi starts v at 0. Raises InputError as `Adam` does.
    """

    lr: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3

    def __post_init__(self) -> None:
        check_fields(self)
        _check_moments(self.lr, self.beta1, self.beta2, self.tau)

    def init(self, params: Params) -> Params:
        return _first_moments(params, self.tau)

    def __call__(self, params: Params, delta: Params, state: Params) -> tuple[Params, Params]:
        m, v = _blend(_moment("m", state), delta, self.beta1), _moment("v", state)
        # Additive, where Adam's is multiplicative: v falls by at most (1 - beta2) delta^2.
        v = map_(lambda v, d: v - (1.0 - self.beta2) * d * d * torch.sign(v - d * d), v, delta)
        return _step(params, m, v, self.lr, self.tau), _prefixed("m", m) | _prefixed("v", v)


def _check_moments(lr: float, beta1: float, beta2: float, tau: float) -> None:
    for name, v in (("lr", lr), ("tau", tau)):
        if not 0.0 < number(v) < float("inf"):
            raise InputError(f"server {name} must be a positive number, got {described(v)}")
    for name, v in (("beta1", beta1), ("beta2", beta2)):
        if not 0.0 <= number(v) < 1.0:
            raise InputError(f"server {name} must be in [0, 1), got {described(v)}")


def _first_moments(params: Params, tau: float) -> Params:
    # tau^2 is the least that the paper allows. With v = 0 the first steps would have size lr / tau.
    v = map_(lambda p: torch.full_like(p, tau**2), params)
    return _prefixed("m", zeros(params)) | _prefixed("v", v)


def _blend(m: Params, delta: Params, beta: float) -> Params:
    return map_(lambda m, d: beta * m + (1.0 - beta) * d, m, delta)


def _step(params: Params, m: Params, v: Params, lr: float, tau: float) -> Params:
    return map_(lambda p, m, v: torch.add(p, lr * m / (v.sqrt() + tau)), params, m, v)


def _prefixed(moment: str, tree: Params) -> Params:
    """Two moments in one flat state: "m.<parameter>" and "v.<parameter>"."""
    return {f"{moment}.{name}": x for name, x in tree.items()}


def _moment(moment: str, state: Params) -> Params:
    """The reverse of `_prefixed`: one moment of the flat state, by parameter."""
    prefix = f"{moment}."
    return {k.removeprefix(prefix): x for k, x in state.items() if k.startswith(prefix)}
