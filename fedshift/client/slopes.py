"""The gradient of one client's loss, by whichever of torch's ways can be taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fedshift.tree import Params


class Slope(NamedTuple):
    """The gradient, the loss [] at the same point, and what else the pass gave."""

    grad: Params
    loss: Tensor
    rest: Params


def slope(value: Callable[[Params], tuple[Tensor, Params]], at: Params, stacked: bool) -> Slope:
    """The gradient of `value`, which gives (loss [], what else the pass gives), at a point.

    stacked: within `torch.func.vmap` over clients. A parameter that the loss does not reach (an
    unused head) has gradient zero.
    """
    if stacked:
        # autograd.grad knows nothing of vmap. This does, and costs twice as much per call.
        grad, (loss, rest) = torch.func.grad_and_value(value, has_aux=True)(at)
        return Slope(grad, loss, rest)
    leaves = {k: v.detach().requires_grad_() for k, v in at.items()}
    loss, rest = value(leaves)
    grads: tuple[Tensor | None, ...] = (None,) * len(leaves)
    # Where the loss reaches none at all (two networks in one), there is no graph to go through.
    if loss.requires_grad:
        # With its own 1 the call is a few per cent of a small model's step faster.
        one = loss.new_ones(())  # and a loss that is no number is refused
        grads = torch.autograd.grad(loss, list(leaves.values()), one, allow_unused=True)
    named = zip(leaves.items(), grads, strict=True)
    grad = {k: torch.zeros_like(v) if g is None else g for (k, v), g in named}
    return Slope(grad, loss.detach(), {k: v.detach() for k, v in rest.items()})
