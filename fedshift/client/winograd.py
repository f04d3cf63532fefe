"""Convolutions 3 x 3 in the form of Winograd, with a quarter of the multiplications.

Outputs in tiles of 4 x 4, from tiles of 6 x 6 inputs d and the kernel g:

    y = A^T [ (G g G^T) * (B^T d B) ] A

Six evaluation points p, 0, 1, -1, 2, -2 and infinity, make the matrices: A^T [4, 6] has p^k, G
[6, 3] p^j / prod_(q != p) (p - q), and B^T [6, 6] the coefficients of prod_(q != p) (x - q). One
product for each of the 36 entries replaces 144 of them; summed over channels it is 36 products of
matrices. Lavin and Gray 2016, "Fast algorithms for convolutional neural networks", CVPR, equation 8
and section 4.2.

In float32 rounding is a few times that of the direct sums: about 3e-6 of the result's norm in
layers of 64 to 512 channels, where theirs is 4e-7 to 1e-6.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear, pad
from torch.overrides import TorchFunctionMode

# Points of evaluation beside infinity; sides of kernels, of tiles of outputs and of inputs.
POINTS = (0.0, 1.0, -1.0, 2.0, -2.0)
R, M = 3, 4
SIDE = M + R - 1
# Fewer channels on either side do not pay for the transforms.
LEAST = 64
# Bytes of transformed tiles that are held at a time, and their least number: few stay in the
# processor's cache, and too few make small products.
CACHE, ROWS = 1 << 20, 128


class Transforms(NamedTuple):
    """inputs: B^T [6, 6], kernels: G [6, 3], outputs: A^T [4, 6]."""

    inputs: Tensor
    kernels: Tensor
    outputs: Tensor


@lru_cache(maxsize=4)
def transforms(dtype: torch.dtype) -> Transforms:
    """The matrices in a type of numbers."""
    b, g, a = np.zeros((SIDE, SIDE)), np.zeros((SIDE, R)), np.zeros((M, SIDE))
    for i, p in enumerate(POINTS):
        others = [q for q in POINTS if q != p]
        b[i, : SIDE - 1] = np.poly(others)[::-1]
        g[i] = p ** np.arange(R) / np.prod([p - q for q in others])
        a[:, i] = p ** np.arange(M)
    b[-1], g[-1, -1], a[-1, -1] = np.poly(POINTS)[::-1], 1.0, 1.0
    return Transforms(*(torch.from_numpy(v).to(dtype) for v in (b, g, a)))


def _both(m: Tensor, tiles: Tensor) -> Tensor:
    """m t m^T of each of n tiles t; m [a, s], tiles [s s, n] -> [a a, n]."""
    a, s = m.shape
    rows = (m @ tiles.reshape(s, -1)).view(a, s, -1)
    return torch.matmul(m, rows).view(a * a, -1)


class _Cut(NamedTuple):
    """How images are cut: tiles in a column and in a row of one, and images at a time."""

    high: int
    wide: int
    each: int

    @staticmethod
    def of(x: Tensor, channels: int) -> _Cut:
        """For x [n, c, h, w]; channels: the most of inputs and outputs."""
        high, wide = x.shape[2] // M, x.shape[3] // M
        tiles = max(ROWS, CACHE // (SIDE * SIDE * channels * x.element_size()))
        return _Cut(high, wide, min(len(x), -(-tiles // (high * wide))))

    def parts(self, count: int) -> Iterator[slice]:
        """`each` of so many images, one after the other."""
        return (slice(i, i + self.each) for i in range(0, count, self.each))

    def inputs(self, images: Tensor) -> Tensor:
        """Input tiles [36, tiles c] of images [n, h, w, c], with zeros around."""
        whole = pad(images, (0, 0, 1, 1, 1, 1))
        s, (n, *_, c) = whole.stride(), images.shape
        shape = SIDE, SIDE, n, self.high, self.wide, c
        tiles = whole.as_strided(shape, (s[1], s[2], s[0], M * s[1], M * s[2], 1))
        return tiles.reshape(SIDE * SIDE, -1)

    def outputs(self, images: Tensor) -> Tensor:
        """Output tiles [16, tiles k] of images [n, h, w, k]."""
        tiles = images.view(-1, self.high, M, self.wide, M, images.shape[-1])
        return tiles.permute(2, 4, 0, 1, 3, 5).reshape(M * M, -1)

    def join(self, tiles: Tensor, into: Tensor) -> None:
        """The inverse of `outputs`."""
        n, k = len(into), into.shape[-1]
        laid = tiles.view(M, M, n, self.high, self.wide, k).permute(2, 3, 0, 4, 1, 5)
        into.view(n, self.high, M, self.wide, M, k).copy_(laid)


def convolved(x: Tensor, kernel: Tensor) -> Tensor:
    """The convolution of x [n, c, h, w], zeros around, with a kernel [k, c, 3, 3]: [n, k, h, w].

    h and w are multiples of 4. The result lies in memory with channels last.
    """
    images, (k, c) = _last(x), kernel.shape[:2]
    cut, to = _Cut.of(x, max(c, k)), transforms(x.dtype)
    transformed = _both(to.kernels, kernel.permute(2, 3, 1, 0).reshape(R * R, -1)).view(-1, c, k)
    # No view is returned: of a view that a Function gives, nothing may be changed in place.
    shape = len(x), k, *x.shape[2:]
    out = torch.empty(shape, dtype=x.dtype, memory_format=torch.channels_last)
    laid = out.permute(0, 2, 3, 1)
    for part in cut.parts(len(x)):
        before = _both(to.inputs, cut.inputs(images[part])).view(SIDE * SIDE, -1, c)
        products = torch.bmm(before, transformed)
        cut.join(_both(to.outputs, products), laid[part])
    return out


def kernel_gradient(x: Tensor, delta: Tensor) -> Tensor:
    """The gradient [k, c, 3, 3] of sum(delta y) in the kernel; x [n, c, h, w], delta [n, k, h, w].

    The same steps backwards: G^T [sum over tiles of (B^T d B) * (A delta A^T)] G.
    """
    images, deltas = _last(x), _last(delta)
    c, k = images.shape[-1], deltas.shape[-1]
    cut, to = _Cut.of(x, max(c, k)), transforms(x.dtype)
    total = x.new_zeros(SIDE * SIDE, c, k)
    for part in cut.parts(len(x)):
        before = _both(to.inputs, cut.inputs(images[part])).view(SIDE * SIDE, -1, c)
        after = _both(to.outputs.t(), cut.outputs(deltas[part])).view(SIDE * SIDE, -1, k)
        total.baddbmm_(before.transpose(1, 2), after)
    found = _both(to.kernels.t(), total)
    return found.view(R, R, c, k).permute(3, 2, 0, 1)


def _last(x: Tensor) -> Tensor:
    """[n, c, h, w] as [n, h, w, c]."""
    return x.permute(0, 2, 3, 1).contiguous()


class _Convolution(torch.autograd.Function):
    """`convolved`, with its gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kernel: Tensor) -> Tensor:
        ctx.save_for_backward(x, kernel)
        return convolved(x, kernel)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, delta: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, kernel = ctx.saved_tensors
        dx = dkernel = None
        if ctx.needs_input_grad[0]:
            # The gradient in x is such a convolution itself, with the kernel turned around.
            dx = convolved(delta, kernel.flip(2, 3).transpose(0, 1))
        if ctx.needs_input_grad[1]:
            dkernel = kernel_gradient(x, delta)
        return dx, dkernel


class Winograd(TorchFunctionMode):
    """Within `with Winograd() as mode:`, convolutions that this form is for are computed in it.

    Those of step 1 with kernels 3 x 3 and a border of one, 64 channels or more on both sides,
    images whose sides are multiples of 4, float32 or float64, in the processor's memory. All
    others, those under autocast, and all else are as ever; `computed` counts what is, `left` the
    other convolutions and linear layers.
    Gradients are given, but no gradients of gradients, and none to `torch.func`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.computed = self.left = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        named = kwargs or {}
        found = _asked(*args, **named) if func is torch.conv2d else None
        if found is None:
            self.left += func in (torch.conv2d, linear)
            return func(*args, **named)
        self.computed += 1
        x, kernel, bias = found
        y = _Convolution.apply(x, kernel)  # type: ignore[no-untyped-call]
        return y if bias is None else y + bias[:, None, None]


def _asked(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
    dilation: Any = 1, groups: int = 1,
) -> tuple[Tensor, Tensor, Tensor | None] | None:  # fmt: skip
    """Input, kernel and bias of what `torch.conv2d` was asked for; None where it is not for that.

    Names and what they are by default are those of `torch.conv2d`.
    """
    border = 1 if padding == "same" else padding
    if {_two(stride), _two(dilation), _two(border), (1, groups)} != {(1, 1)}:
        return None
    if not input.dim() == weight.dim() == 4 or torch.is_autocast_enabled("cpu"):
        return None
    (_, c, *image), (k, _, *kernel) = input.shape, weight.shape
    if kernel != [R, R] or min(c, k) < LEAST or input.numel() == 0 or any(n % M for n in image):
        return None
    real, near = {torch.float32, torch.float64}, input.device.type == "cpu"
    # Odd ones out are torch's to refuse, in its words.
    alike = input.dtype == weight.dtype and weight.device.type == "cpu" and weight.shape[1] == c
    if bias is not None:
        alike = alike and bias.shape == (k,) and bias.dtype == input.dtype
    return (input, weight, bias) if near and alike and input.dtype in real else None


def _two(v: Any) -> tuple[int, ...]:
    """A size by height and width; () for what is neither a number nor a sequence of them."""
    return (v, v) if isinstance(v, int) else tuple(v) if isinstance(v, (list, tuple)) else ()
