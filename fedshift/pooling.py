"""Max-pools with the same numbers for less work.

Rectifiers after a pool instead of before it: relu(max_j z_j) = max_j relu(z_j), as relu is
monotone. Both send a gradient to the first largest z_j if it is above 0, and to none if it is not.
A pool of 2 x 2 leaves a quarter of the entries.

Pools of 2 x 2 as maxima of every second column and row. Torch's own takes one entry after the other
where channels come first, and guesses before each which is larger.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import max_pool2d

# Entries of a batch of images below which torch's own pool is as fast.
LARGE = 1 << 16


class Change(NamedTuple):
    """Modules of an `nn.Sequential`, what stands there under some names, and what may instead."""

    modules: dict[str, Any]
    old: Mapping[str, nn.Module]
    new: Mapping[str, nn.Module]


def pool_changes(net: nn.Module) -> tuple[Change, ...]:
    """For every max-pool in an `nn.Sequential` that can be had for less.

    That is after an `nn.ReLU`, or of 2 x 2. Subclasses, whose forward may be another, are left out,
    and pools that tell where the largest were: with the rectifier before them, the first of several
    0 is.
    """
    found: list[Change] = []
    for module in net.modules():
        if type(module) is not nn.Sequential:
            continue
        before: tuple[str, nn.Module] | None = None
        for name, pool in module._modules.items():
            if pool is not None and _is_pool(pool):
                twin = Halved() if _halves(pool) else pool
                if before is not None and type(before[1]) is nn.ReLU:
                    old = {before[0]: before[1], name: pool}
                    found.append(Change(module._modules, old, {before[0]: twin, name: before[1]}))
                elif twin is not pool:
                    found.append(Change(module._modules, {name: pool}, {name: twin}))
            before = None if pool is None else (name, pool)
    return tuple(found)


def _is_pool(module: nn.Module) -> bool:
    kinds = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
    return type(module) in kinds and not getattr(module, "return_indices", False)


def _halves(pool: nn.Module) -> bool:
    """Whether windows are 2 x 2, side by side."""
    if not isinstance(pool, nn.MaxPool2d) or pool.ceil_mode:
        return False
    sizes = pool.kernel_size, pool.stride, pool.padding, pool.dilation
    wide = (v if isinstance(v, tuple) else (v, v) for v in sizes)
    return tuple(wide) == ((2, 2), (2, 2), (0, 0), (1, 1))


@contextlib.contextmanager
def pooled(changes: tuple[Change, ...]) -> Iterator[None]:
    """The new in place of the old while the block runs; what somebody looks into stays."""
    made = [change for change in changes if _free(change)]
    for change in made:
        change.modules.update(change.new)
    try:
        yield
    finally:
        for change in made:
            change.modules.update(change.old)


def _free(change: Change) -> bool:
    """Whether all is as it was found, and nobody looks into it."""
    return all(
        change.modules.get(name) is module and not _watched(module)
        for name, module in change.old.items()
    )


def _watched(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


class Halved(nn.Module):
    """`nn.MaxPool2d(2)`, by maxima of columns and rows where these are faster."""

    def forward(self, x: Tensor) -> Tensor:
        large = x.dim() == 4 and x.numel() >= LARGE and min(x.shape[2:]) > 1
        plain = x.device.type == "cpu" and x.is_floating_point() and x.is_contiguous()
        if not large or not plain:
            return max_pool2d(x, 2)
        y: Tensor = _Maxima.apply(x)  # type: ignore[no-untyped-call]
        return y


class _Maxima(torch.autograd.Function):
    """The largest of each window of x [n, c, h, w]: [n, c, h // 2, w // 2].

    Its gradient goes to the first of equals row by row, as torch's does. Where a window has NaN, or
    the gradient is not finite, other entries than torch's may have it, or NaN.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        h, w = _even(x)
        wide = torch.maximum(x[..., :h, :w:2], x[..., :h, 1:w:2])
        return torch.maximum(wide[..., ::2, :], wide[..., 1::2, :])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        # Not the output: the rectifier after it may write there.
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        y, (h, w) = _Maxima.forward(x), _even(x)
        left = given  # for the entries of a window that have not been looked at
        taken: dict[tuple[int, int], Tensor] = {}
        for i, j in ((0, 0), (0, 1), (1, 0)):
            taken[i, j] = left * (x[..., i:h:2, j:w:2] == y)
            left = left - taken[i, j]
        # Made of what is written to it: under vmap either x or the gradient may be of many.
        whole = x.shape[-2:] == (h, w)
        found = left.new_empty(x.shape) if whole else left.new_zeros(x.shape)
        for (i, j), part in {**taken, (1, 1): left}.items():
            found[..., i:h:2, j:w:2] = part
        return found


def _even(x: Tensor) -> tuple[int, int]:
    """Rows and columns that windows cover."""
    return x.shape[-2] // 2 * 2, x.shape[-1] // 2 * 2
