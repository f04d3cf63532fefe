"""Gradients of one batch, and oracles: each takes a gradient function and returns a changed one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from fedshift.arguments import Positive, check_fields
from fedshift.client.objectives import Term, View, check_value
from fedshift.data import Batch
from fedshift.kernels.torch_private import within_vmap
from fedshift.model import Model
from fedshift.sketch import sketched
from fedshift.tree import Params, Parts, add, map_, sq_norm

Precision = Literal["float32", "bfloat16"]


@sketched
class Gradient(NamedTuple):
    """The gradient at a point, the buffers after the pass that gave it, and the loss there []."""

    grad: Params
    buffers: Params
    loss: Tensor


GradFn = Callable[[Params], Gradient]


class Oracle(Protocol):
    """Wraps a gradient function: GradFn -> GradFn (SAM, clipping, control shift)."""

    def __call__(self, gradient: GradFn) -> GradFn: ...


def slope(value: Callable[[Params], tuple[Tensor, Params]], at: Params, rows: Tensor) -> Gradient:
    """The gradient at a point of `value`, which returns (loss [], buffers after the pass).

    rows: those of the batch. They show whether this runs within `torch.func.vmap` over clients;
    parameters may be common to all clients, and then do not show it.

    A parameter that the loss does not reach (an unused head) has gradient zero.
    """
    if within_vmap(rows):
        # autograd.grad does not work within vmap; torch.func does, at twice the cost per call.
        grad, (loss, after) = torch.func.grad_and_value(value, has_aux=True)(at)
        return Gradient(grad, after, loss)
    # Detach, so that no gradient flows back through the steps that led to this point.
    leaves = {k: v.detach().requires_grad_() for k, v in at.items()}
    loss, after = value(leaves)
    grads: Sequence[Tensor | None] = (None,) * len(leaves)
    # A loss that depends on no leaf (say, on one of two networks) has no graph to go through.
    if loss.requires_grad and leaves:
        grads = torch.autograd.grad(loss, tuple(leaves.values()), allow_unused=True)
    named = zip(leaves.items(), grads, strict=True)
    grad = {k: torch.zeros_like(v) if g is None else g for (k, v), g in named}
    return Gradient(grad, {k: v.detach() for k, v in after.items()}, loss.detach())


def gradient_of(
    model: Model, objective: Term, frozen: Params, buffers: Params, batch: Batch, context: Parts,
    precision: Precision = "float32",
) -> GradFn:  # fmt: skip
    """The gradient of the objective on one batch, as a function of the parameters that move.

    `precision` is that of the trained model's pass; terms run other models in float32.
    """
    # Prepared once, out here: all terms, and both passes of SAM, must see the same inputs.
    batch = batch._replace(x=model.prepare(batch.x, batch.seed))

    def value(moving: Params) -> tuple[Tensor, Params]:
        params = moving | frozen
        if precision == "float32":
            out, after = model.train(params, buffers, batch.x, batch.seed)
        else:
            # Autograd records the casts, so the backward pass multiplies in bfloat16, too.
            with torch.autocast(batch.x.device.type, dtype=torch.bfloat16):
                out, after = model.train(params, buffers, batch.x, batch.seed)
            # Cast back before the loss: a softmax in bfloat16 has two or three digits.
            out = {k: v.float() if v.is_floating_point() else v for k, v in out.items()}
        loss = objective(View(model, params, out, batch, context))
        check_value(loss, objective)
        return loss, after

    return lambda moving: slope(value, moving, batch.rows)


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

    rho: Positive = 0.05

    def __post_init__(self) -> None:
        check_fields(self)

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

    norm: Positive

    def __post_init__(self) -> None:
        check_fields(self)

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
