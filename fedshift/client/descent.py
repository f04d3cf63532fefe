"""How gradients become steps: SGD with momentum, and Adam. Their state is reset in every phase."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fedshift.tree import Params, Parts, map_, zeros


class Descent(Protocol):
    """An update rule: parameters and gradient in, parameters out; its state has fixed shapes."""

    def start(self, params: Params) -> Parts:
        """The state before the first step."""

    def __call__(
        self, params: Params, grad: Params, state: Parts, lr: Tensor, *, in_place: bool = False
    ) -> tuple[Params, Parts]:
        """(parameters, state) after one step along `grad` with learning rate lr [].

        in_place: `params` may be overwritten, because nothing else refers to them.
        """


@dataclass(frozen=True)
class HeavyBall:
    """v <- momentum v + g; theta <- theta - lr v, with v = 0 at first."""

    momentum: float = 0.0

    def start(self, params: Params) -> Parts:
        return {"velocity": zeros(params)} if self.momentum else {}

    def __call__(
        self, params: Params, grad: Params, state: Parts, lr: Tensor, *, in_place: bool = False
    ) -> tuple[Params, Parts]:
        v = grad
        if self.momentum:
            v = map_(lambda old, g: self.momentum * old + g, state["velocity"], grad)
        # lr stays a tensor: within vmap it differs between clients and cannot become a number.
        # In place, a model's memory stays in the processor's cache from step to step.
        step = Tensor.addcmul_ if in_place else Tensor.addcmul
        moved = map_(lambda p, u: step(p, u, lr.to(p.dtype), value=-1.0), params, v)
        return moved, {"velocity": v} if self.momentum else {}


@dataclass(frozen=True)
class Adam:
    """theta <- theta - lr m' / (sqrt(v') + eps), elementwise, with m = v = 0 at first.

    m <- beta1 m + (1 - beta1) g, v <- beta2 v + (1 - beta2) g^2, m' = m / (1 - beta1^k) and
    v' = v / (1 - beta2^k) at the k-th step. Kingma and Ba 2015, arXiv 1412.6980, Algorithm 1; the
    same numbers as torch.optim.Adam, whose order of operations this is.
    """

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    def start(self, params: Params) -> Parts:
        # The count is a tensor, because within vmap clients may have taken different numbers of
        # steps.
        steps = torch.zeros((), dtype=torch.float64)
        return {"first": zeros(params), "second": zeros(params), "count": {"steps": steps}}

    def __call__(
        self, params: Params, grad: Params, state: Parts, lr: Tensor, *, in_place: bool = False
    ) -> tuple[Params, Parts]:
        k = state["count"]["steps"] + 1.0
        first = map_(lambda m, g: torch.lerp(m, g, 1.0 - self.beta1), state["first"], grad)
        second = map_(
            lambda v, g: (v * self.beta2).addcmul(g, g, value=1.0 - self.beta2),
            state["second"], grad,
        )  # fmt: skip
        rate = -lr / (1.0 - self.beta1**k)  # float64: bias correction divides by small numbers
        root = (1.0 - self.beta2**k).sqrt()

        def moved(p: Tensor, m: Tensor, v: Tensor) -> Tensor:
            spread = v.sqrt() / root.to(p.dtype) + self.eps
            return p + rate.to(p.dtype) * m / spread

        after = {"first": first, "second": second, "count": {"steps": k}}
        return map_(moved, params, first, second), after
