"""Gradient oracles: a wrapper takes the gradient function and gives another."""

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

    Names that `by` has beyond the gradient's are ignored: in a phase where only a part of the
    model moves, only that part is corrected.
    """

    by: Params

    def __call__(self, gradient: GradFn) -> GradFn:
        def shifted(params: Params) -> Gradient:
            result = gradient(params)
            # Added to the gradient, not to the parameters: momentum acts on it as well.
            return result._replace(grad=add(result.grad, {k: self.by[k] for k in result.grad}))

        return shifted


@dataclass(frozen=True)
class Sam:
    """g(theta) -> g(theta + rho g(theta) / ||g(theta)||), both on the same batch.

    Foret et al. 2021, "Sharpness-aware minimization", arXiv 2010.01412, Equations 2 and 3; in
    federated learning Qu et al. 2022 (FedSAM), arXiv 2206.02618, Algorithm 1. The norm is over all
    parameters that move, with 1e-12 added. Weight decay belongs to the step, not to the objective,
    so it takes no part in the ascent; terms such as FedProx's do. rho is not scaled by the
    learning rate. Running statistics and the reported loss are those of the first pass, at theta:
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
            reach = self.rho / (_norm(here.grad) + 1e-12)  # the gradient may be 0
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
            # Clamped to 1, so that a gradient within the bound keeps its bits.
            factor = (self.norm / _norm(result.grad)).clamp(max=1.0)
            return result._replace(grad=map_(lambda g: torch.mul(g, factor), result.grad))

        return clipped


def _norm(grad: Params) -> Tensor:
    return sq_norm(grad).sqrt()
