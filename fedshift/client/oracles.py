"""Gradient oracles: each takes a gradient function and returns a changed one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedshift.arguments import check_fields, check_positive
from fedshift.client.slopes import GradFn, Gradient
from fedshift.sketch import sketched
from fedshift.tree import Params, add, map_, sq_norm


@sketched
@dataclass(frozen=True, eq=False)
class Shift:
    """g(theta) + by: a constant correction, such as SCAFFOLD's c - c_i.

    `by` may have more names than the gradient: a phase that trains a part of the model is corrected
    in that part.
    """

    by: Params

    def __call__(self, gradient: GradFn) -> GradFn:
        def shifted(params: Params) -> Gradient:
            result = gradient(params)
            # Correct the gradient, not the parameters, so that momentum accumulates the correction.
            return result._replace(grad=add(result.grad, {k: self.by[k] for k in result.grad}))

        return shifted


@dataclass(frozen=True)
class Sam:
    """g(theta) -> g(theta + rho g(theta) / ||g(theta)||), both on the same batch.

    Foret et al. 2021, "Sharpness-aware minimization", arXiv 2010.01412, Equations 2 and 3; in
    federated learning Qu et al. 2022 (FedSAM), arXiv 2206.02618, Algorithm 1. The norm is over all
    parameters that move, with 1e-12 added. Weight decay belongs to the step, not to the objective,
    and is left out of the ascent; terms such as FedProx's are part of it. rho is not scaled by the
    learning rate. Running statistics and the reported loss come from the first pass, at theta;
    public codes update BatchNorm twice a step. Dropout draws anew in the second pass.
    Raises InputError unless rho > 0: leave the oracle out for rho = 0.
    """

    rho: float = 0.05

    def __post_init__(self) -> None:
        check_fields(self)
        check_positive("Sam rho", self.rho)

    def __call__(self, gradient: GradFn) -> GradFn:
        def ascended(params: Params) -> Gradient:
            here = gradient(params)
            reach = self.rho / (_norm(here.grad) + 1e-12)  # + 1e-12: the gradient may be 0
            # Only the gradient is taken from the second pass; loss and buffers are those at theta.
            return here._replace(grad=gradient(add(params, here.grad, reach)).grad)

        return ascended


@dataclass(frozen=True)
class Clip:
    """g -> g min(1, norm / ||g||), the norm over all parameters that move.

    Pascanu, Mikolov and Bengio 2013, arXiv 1211.5063, Algorithm 1. Gradients within the bound are
    unchanged bit for bit; `torch.nn.utils.clip_grad_norm_` adds 1e-6 to ||g|| and we do not.
    With `Sam`, which needs only the direction of its first gradient, either order gives the same.
    Raises InputError unless norm > 0.
    """

    norm: float

    def __post_init__(self) -> None:
        check_fields(self)
        check_positive("Clip norm", self.norm)

    def __call__(self, gradient: GradFn) -> GradFn:
        def clipped(params: Params) -> Gradient:
            result = gradient(params)
            # A factor of exactly 1 keeps the bits of a gradient within the bound. A zero gradient
            # gives norm / 0 = inf, which is clamped to 1 as well.
            factor = (self.norm / _norm(result.grad)).clamp(max=1.0)
            return result._replace(grad=map_(lambda g: torch.mul(g, factor), result.grad))

        return clipped


def _norm(grad: Params) -> Tensor:
    return sq_norm(grad).sqrt()
