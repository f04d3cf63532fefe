"""Two ways to make max-pools cheaper, with the same numbers, in any `nn.Sequential`.

1. Run a ReLU after the pool instead of before it, on a quarter of the entries if the pool is 2 x 2.
   relu(max_j z_j) = max_j relu(z_j), as relu is monotone. Both orders send the gradient to the
   first of the largest z_j if it is above 0, and to none if it is not.
2. Compute 2 x 2 pools as maxima of pairs of rows, then of pairs of columns, which is vectorised.
   For images with channels first, torch's own kernel compares one entry after the other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import max_pool2d

from fedshift.kernels.torch_private import (
    has_global_hooks,
    has_hooks,
    max_pool_backward,
    supported,
)

# For batches with fewer entries than this, torch's own pool is as fast.
LARGE = 1 << 16
POOLS = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
# Layers whose output is a new tensor that nothing else refers to, so that it may be overwritten.
FRESH = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear, nn.GroupNorm,
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d,
)  # fmt: skip


def with_pools(net: nn.Module) -> tuple[nn.Sequential, ...]:
    """The `nn.Sequential`s with max-pools that can be made cheaper.

    Subclasses are left out, because they may define another forward. So is everything if this torch
    does not show hooks.
    """
    if not supported("global_hooks", "hooks", "max_pool_backward"):
        return ()
    sequences = (m for m in net.modules() if type(m) is nn.Sequential)
    return tuple(s for s in sequences if any(type(layer) in POOLS for layer in s))


@contextlib.contextmanager
def pooled(sequences: Sequence[nn.Sequential]) -> Iterator[None]:
    """In this block, calls of these sequences run faster.

    Only their `forward` is replaced: code that calls single layers or slices gets the originals. If
    another thread with the same network leaves the block first, this one merely runs slower.
    """
    try:
        for sequence in sequences:
            # setdefault: a user may have given the sequence a forward of its own.
            vars(sequence).setdefault("forward", partial(_run, sequence))
        yield
    finally:
        for sequence in sequences:
            given = vars(sequence).get("forward")
            if isinstance(given, partial) and given.func is _run:
                vars(sequence).pop("forward", None)


def _run(sequence: nn.Sequential, x: Any) -> Any:
    """Run the sequence on x. Users may change layers or hooks, so each call checks what to swap."""
    if has_global_hooks():  # hooks must see every layer, in its place
        return nn.Sequential.forward(sequence, x)  # type: ignore[no-untyped-call]
    layers, i = tuple(sequence), 0
    while i < len(layers):
        if _can_swap(layers, i):
            x, i = layers[i](_pool(layers[i + 1], x)), i + 2
        else:
            x, i = _pool(layers[i], x), i + 1
    return x


def _can_swap(layers: Sequence[nn.Module], i: int) -> bool:
    """Whether layer i is a rectifier that can be swapped with the pool after it."""
    if type(layers[i]) is not nn.ReLU or i + 1 == len(layers):
        return False
    relu, pool, before = layers[i], layers[i + 1], layers[i - 1] if i else None
    # A pool that returns indices must stay behind the ReLU: in a window without positive entries
    # all are 0 after the ReLU, and the index is the first one, not that of the largest.
    if type(pool) not in POOLS or getattr(pool, "return_indices", False):
        return False
    # An in-place ReLU also changes the tensor for others that refer to it. So it may move only if
    # there are none, that is, after a layer that made the tensor.
    safe = not relu.inplace or (before is not None and type(before) in FRESH and _plain(before))
    return safe and _plain(relu) and _plain(pool)


def _pool(layer: nn.Module, x: Any) -> Any:
    return halved(x) if _is_halving(layer) and _plain(layer) else layer(x)


def _is_halving(layer: nn.Module) -> bool:
    """Whether the layer is a max-pool of 2 x 2 windows that do not overlap."""
    if type(layer) is not nn.MaxPool2d or layer.ceil_mode or layer.return_indices:
        return False
    sizes = layer.kernel_size, layer.stride, layer.padding, layer.dilation
    wide = (v if isinstance(v, tuple) else (v, v) for v in sizes)
    return tuple(wide) == ((2, 2), (2, 2), (0, 0), (1, 1))


def _plain(layer: nn.Module) -> bool:
    """Whether the layer has torch's forward and no hooks."""
    return "forward" not in vars(layer) and not has_hooks(layer)


def halved(x: Tensor) -> Tensor:
    """`max_pool2d(x, 2)`, by maxima of rows and columns if they are faster."""
    large = x.dim() == 4 and x.numel() >= LARGE and min(x.shape[2:]) > 1
    if not large or x.device.type != "cpu" or not x.is_contiguous():
        return max_pool2d(x, 2)
    y: Tensor = _Maxima.apply(x)[0]  # type: ignore[no-untyped-call]
    return y


class _Maxima(torch.autograd.Function):
    """(maximum, its index) of each window of x [n, c, h, w]; both [n, c, h // 2, w // 2].

    The index counts the h w entries of the image; ties go to the first in row-major order, as in
    torch. In a window with NaN it may differ from torch's. Of +0 and -0, either may be taken.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        h, w = (v // 2 * 2 for v in x.shape[-2:])
        top, bottom = x[..., :h:2, :w], x[..., 1:h:2, :w]
        # `low`: the larger of the two rows is the lower one. Then the same for pairs of columns.
        low, tall = bottom > top, torch.maximum(top, bottom)
        left, right = tall[..., ::2], tall[..., 1::2]
        low_left, low_right = low[..., ::2], low[..., 1::2]
        # The right column wins if it is larger, and a tie if its entry is in the upper row and the
        # left one is in the lower row: the upper right entry comes first in row-major order.
        other = (right > left) | ((right == left) & (low_left > low_right))
        across, wide = torch.arange(0, w, 2, device=x.device), x.shape[-1]
        corner = torch.arange(0, h * wide, 2 * wide, device=x.device)[:, None] + across
        place = torch.add(corner, other) + wide * torch.where(other, low_right, low_left)
        return torch.maximum(left, right), place

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        # Save the indices, not the maxima: the ReLU after the pool may write into those.
        ctx.save_for_backward(*inputs, output[1])
        ctx.save_for_forward(output[1])

    @staticmethod
    def backward(ctx: Any, given: Tensor, _: Any) -> Tensor:
        x, place = ctx.saved_tensors
        return max_pool_backward(given, x, place)

    @staticmethod
    def jvp(ctx: Any, given: Tensor) -> tuple[Tensor, None]:
        (place,) = ctx.saved_tensors
        return given.flatten(-2).gather(-1, place.flatten(-2)).view(place.shape), None
