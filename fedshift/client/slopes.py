"""The gradient of one client's loss, with autograd or, within vmap, with torch.func."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fedshift.kernels.torch_private import within_vmap
from fedshift.sketch import sketched
from fedshift.tree import Params


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


class Slope(NamedTuple):
    """The gradient, the loss [] at the same point, and the other outputs of the pass."""

    grad: Params
    loss: Tensor
    rest: Params


def slope(value: Callable[[Params], tuple[Tensor, Params]], at: Params, rows: Tensor) -> Slope:
    """The gradient at a point of `value`, which returns (loss [], other outputs of the pass).

    rows: those of the batch. They show whether this runs within `torch.func.vmap` over clients;
    parameters may be common to all clients, and then do not show it.

    A parameter that the loss does not reach (an unused head) has gradient zero.
    """
    if within_vmap(rows):
        # autograd.grad does not work within vmap; torch.func does, at twice the cost per call.
        grad, (loss, rest) = torch.func.grad_and_value(value, has_aux=True)(at)
        return Slope(grad, loss, rest)
    # Detach, so that no gradient flows back through the steps that led to this point.
    leaves = {k: v.detach().requires_grad_() for k, v in at.items()}
    loss, rest = value(leaves)
    grads: Sequence[Tensor | None] = (None,) * len(leaves)
    # A loss that depends on no leaf (say, on one of two networks) has no graph to go through.
    if loss.requires_grad and leaves:
        grads = torch.autograd.grad(loss, tuple(leaves.values()), allow_unused=True)
    named = zip(leaves.items(), grads, strict=True)
    grad = {k: torch.zeros_like(v) if g is None else g for (k, v), g in named}
    return Slope(grad, loss.detach(), {k: v.detach() for k, v in rest.items()})
