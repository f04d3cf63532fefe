"""The gradient of one client's loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fedshift.errors import InputError
from fedshift.kernels.torch_private import backward, within_vmap
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
    """A change of how gradients are obtained: GradFn -> GradFn (SAM, clipping, control shift)."""

    def __call__(self, gradient: GradFn) -> GradFn: ...


class Slope(NamedTuple):
    """The gradient, the loss [] at the same point, and what else the pass gave."""

    grad: Params
    loss: Tensor
    rest: Params


def slope(
    value: Callable[[Params], tuple[Tensor, Params]],
    at: Params,
    rows: Tensor,
    *,
    sees_padding: bool = False,
) -> Slope:
    """The gradient of `value`, which gives (loss [], what else the pass gives), at a point.

    rows          those of the batch. They show whether this is within `torch.func.vmap` over
                  clients, which parameters need not show
    sees_padding  whether padding of the batch would change the network's other outputs

    A parameter that the loss does not reach (an unused head) has gradient zero. Raises InputError
    within vmap for a network that would see padding.
    """
    if within_vmap(rows):
        if sees_padding:
            raise InputError(
                "BatchNorm would see the padding of clients with batches of different sizes; give "
                "`steps` and a batch size that divides every client's examples, or do not stack"
            )
        # autograd.grad does not work within vmap. This does, at twice the cost per call.
        grad, (loss, rest) = torch.func.grad_and_value(value, has_aux=True)(at)
        return Slope(grad, loss, rest)
    # New leaves: the gradient is at this point alone, not through how it was reached.
    leaves = {k: v.detach().requires_grad_() for k, v in at.items()}
    loss, rest = value(leaves)
    grads: Sequence[Tensor | None] = (None,) * len(leaves)
    # A loss that depends on none of them (two networks in one) has no graph to go through.
    if loss.requires_grad and leaves:
        grads = backward(loss, tuple(leaves.values()))
    named = zip(leaves.items(), grads, strict=True)
    grad = {k: torch.zeros_like(v) if g is None else g for (k, v), g in named}
    return Slope(grad, loss.detach(), {k: v.detach() for k, v in rest.items()})
