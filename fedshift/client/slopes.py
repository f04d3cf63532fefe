"""The gradient of one client's loss, by whichever of torch's ways can be taken."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.overrides import has_torch_function

from fedshift.sketch import sketched
from fedshift.tree import Params

SWITCH = "FEDSHIFT_SHORT_BACKWARD"


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
    grads: Sequence[Tensor | None] = (None,) * len(leaves)
    # Where the loss reaches none at all (two networks in one), there is no graph to go through.
    if loss.requires_grad and leaves:
        grads = _backward(loss, tuple(leaves.values()))
    named = zip(leaves.items(), grads, strict=True)
    grad = {k: torch.zeros_like(v) if g is None else g for (k, v), g in named}
    return Slope(grad, loss.detach(), {k: v.detach() for k, v in rest.items()})


def _backward(loss: Tensor, at: tuple[Tensor, ...]) -> Sequence[Tensor | None]:
    """`torch.autograd.grad` of a loss [], None for what it does not reach.

    Raises RuntimeError for a loss that is no single number.
    """
    one = loss.new_ones(())
    # Classes of tensors and modes (Winograd's) say themselves what becomes of such a call.
    run = None if has_torch_function((loss, *at)) else _engine()
    if run is None:
        return torch.autograd.grad(loss, at, one, allow_unused=True)
    found: Sequence[Tensor | None] = run(
        (loss,), (one,), False, False, at, allow_unreachable=True, accumulate_grad=False
    )
    return found


@cache
def _engine() -> Any:
    """What torch.autograd.grad calls in the end; None where torch has it no longer.

    What that does before, for outputs and gradients of any kind, takes a tenth of a small model's
    step. The environment variable FEDSHIFT_SHORT_BACKWARD=0 goes through it.
    """
    if os.environ.get(SWITCH) == "0":
        return None
    engine = getattr(torch.autograd.Variable, "_execution_engine", None)
    return getattr(engine, "run_backward", None)
