"""Convolutions 3 x 3 and 5 x 5 in the form of Winograd, with a fraction of the multiplications.

Outputs in tiles of 4 x 4, from tiles d of s x s inputs and the kernel g [r, r], s = r + 3:

    y = A^T [ (G g G^T) * (B^T d B) ] A

The points of evaluation p, s - 1 of them and infinity, make the matrices: A^T [4, s] has p^k, G
[s, r] p^j / prod_(q != p) (p - q), and B^T [s, s] the coefficients of prod_(q != p) (x - q). One
product for each of the s^2 entries (36 or 64) replaces 16 r^2 of them (144 or 400); summed over
channels it is s^2 products of matrices. Lavin and Gray 2016, "Fast algorithms for convolutional
neural networks", CVPR, equation 8 and section 4.2. Gradients are the same steps backwards:

    dg = G^T [ sum over tiles of (B^T d B) * (A dy A^T) ] G
    dd = B [ (G g G^T) * (A dy A^T) ] B^T, added where tiles overlap

In float32 rounding is a few times that of the direct sums: in layers of 32 to 512 channels 1e-6 to
1e-5 of the norm of a result or a gradient, where theirs is mostly 2e-7 to 1e-6.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear, pad
from torch.overrides import TorchFunctionMode

from fedshift.kernels.products import add_products, faster, products

# Side of a tile of outputs.
M = 4


class Kind(NamedTuple):
    """Points of evaluation beside infinity; fewer channels in or out do not pay for transforms."""

    points: tuple[float, ...]
    inputs: int
    outputs: int


# By the kernel's side.
KINDS: dict[int, Kind] = {
    3: Kind((0.0, 1.0, -1.0, 2.0, -2.0), 64, 64),
    5: Kind((0.0, 1.0, -1.0, 2.0, -2.0, 0.5, -0.5), 32, 64),
}
# Channels in and out that pay where oneDNN multiplies twice as fast as MKL, for all kinds: its own
# convolutions are as much faster there, and transforms are not.
WIDE = 256
# Bytes of transformed tiles that are held at a time, and their least number: few stay in the
# processor's cache, and too few make small products. One image is held in any case.
CACHE, ROWS = 1 << 20, 128


def least(r: int) -> tuple[int, int]:
    """The fewest channels in and out that pay on this processor, for kernels of side r."""
    return (WIDE, WIDE) if faster() else KINDS[r][1:]


class Transforms(NamedTuple):
    """What m t m^T does to a tile t, on its entries row by row: the Kronecker products m x m.

    inputs: of B^T [s s, s s], kernels: of G [s s, r r], outputs: of A^T [16, s s].
    """

    inputs: Tensor
    kernels: Tensor
    outputs: Tensor


@lru_cache(maxsize=4)
def transforms(dtype: torch.dtype, r: int) -> Transforms:
    """The matrices in a type of numbers, for kernels of side r."""
    points = KINDS[r].points
    s = len(points) + 1
    b, g, a = np.zeros((s, s)), np.zeros((s, r)), np.zeros((M, s))
    for i, p in enumerate(points):
        others = [q for q in points if q != p]
        b[i, : s - 1] = np.poly(others)[::-1]
        g[i] = p ** np.arange(r) / np.prod([p - q for q in others])
        a[:, i] = p ** np.arange(M)
    b[-1], g[-1, -1], a[-1, -1] = np.poly(points)[::-1], 1.0, 1.0
    return Transforms(*(torch.from_numpy(np.kron(v, v)).to(dtype) for v in (b, g, a)))


class _Cut(NamedTuple):
    """How images are cut: their border, tiles' sides, tiles by column and row, images at a time."""

    border: int
    side: int
    high: int
    wide: int
    each: int

    @staticmethod
    def of(x: Tensor, transformed: Tensor, border: int) -> _Cut:
        """For x [n, c, h, w] and a kernel's `entries` [s s, k, c]."""
        squared, k, c = transformed.shape
        side = math.isqrt(squared)
        high, wide = ((v + 2 * border - side + M) // M for v in x.shape[2:])
        tiles = max(ROWS, CACHE // (side * side * max(c, k) * x.element_size()))
        return _Cut(border, side, high, wide, min(len(x), -(-tiles // (high * wide))))

    def parts(self, count: int) -> Iterator[slice]:
        """`each` of so many images, one after the other."""
        return (slice(i, i + self.each) for i in range(0, count, self.each))

    def inputs(self, images: Tensor) -> Tensor:
        """Input tiles [s s, tiles c] of images [n, h, w, c], with zeros around."""
        whole = pad(images, (0, 0, *(self.border,) * 4)) if self.border else images
        return self._tiles(whole, 0, 0, self.side, self.side).reshape(self.side**2, -1)

    def add_into(self, tiles: Tensor, into: Tensor) -> None:
        """The transpose of `inputs`: tiles [s s, tiles c] into images [n, h, w, c]."""
        (n, h, w, c), o = into.shape, self.border
        whole = into.new_zeros(n, h + 2 * o, w + 2 * o, c) if o else into.zero_()
        laid = tiles.view(self.side, self.side, n, self.high, self.wide, c)
        # Tiles lie M apart: blocks of M x M of all of them do not overlap.
        for i in range(0, self.side, M):
            for j in range(0, self.side, M):
                block = laid[i : i + M, j : j + M]
                self._tiles(whole, i, j, *block.shape[:2]).add_(block)
        if o:
            into.copy_(whole[:, o : o + h, o : o + w])

    def _tiles(self, whole: Tensor, i: int, j: int, a: int, b: int) -> Tensor:
        """Rows i to i + a, columns j to j + b of every tile: a view [a, b, n, high, wide, c]."""
        (n, *_, c), s = whole.shape, whole.stride()
        strides = s[1], s[2], s[0], M * s[1], M * s[2], s[3]
        shape = a, b, n, self.high, self.wide, c
        return whole.as_strided(shape, strides, whole.storage_offset() + i * s[1] + j * s[2])

    def outputs(self, images: Tensor) -> Tensor:
        """Output tiles [16, tiles k] of images [n, h, w, k]."""
        tiles = images.view(-1, self.high, M, self.wide, M, images.shape[-1])
        return tiles.permute(2, 4, 0, 1, 3, 5).reshape(M * M, -1)

    def join(self, tiles: Tensor, into: Tensor) -> None:
        """The inverse of `outputs`."""
        n, k = len(into), into.shape[-1]
        laid = tiles.view(M, M, n, self.high, self.wide, k).permute(2, 3, 0, 4, 1, 5)
        into.view(n, self.high, M, self.wide, M, k).copy_(laid)


def entries(kernel: Tensor) -> Tensor:
    """G g G^T of a kernel [k, c, r, r], by entry: [s s, k, c]."""
    k, c, r, _ = kernel.shape
    to = transforms(kernel.dtype, r)
    return (to.kernels @ kernel.reshape(-1, r * r).t()).view(-1, k, c)


def convolved(x: Tensor, transformed: Tensor, border: int) -> Tensor:
    """The convolution of x [n, c, h, w], zeros around, with a kernel: [n, k, h', w'].

    transformed: the kernel's `entries` [s s, k, c]. h' = h + 2 border - r + 1 and w' are multiples
    of 4. The result lies in memory with channels last.
    """
    images, (_, k, c) = _last(x), transformed.shape
    cut, kernel = _Cut.of(x, transformed, border), transformed.transpose(1, 2)
    to = transforms(x.dtype, cut.side - M + 1)
    out = _blank((len(x), k, M * cut.high, M * cut.wide), x)
    laid = out.permute(0, 2, 3, 1)
    for part in cut.parts(len(x)):
        before = (to.inputs @ cut.inputs(images[part])).view(cut.side**2, -1, c)
        after = products(before, kernel).view(cut.side**2, -1)
        cut.join(to.outputs @ after, laid[part])
    return out


def gradients(
    x: Tensor, transformed: Tensor, delta: Tensor, border: int, wanted: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of sum(delta y) in x and in the kernel [k, c, r, r].

    transformed: the kernel's `entries`; y and delta [n, k, h', w']. None for a gradient that is not
    wanted; the first lies in memory with channels last.
    """
    deltas, (_, k, c), cut = _last(delta), transformed.shape, _Cut.of(x, transformed, border)
    r = cut.side - M + 1
    to = transforms(x.dtype, r)
    dx = _blank(x.shape, x) if wanted[0] else None
    images, total = _last(x) if wanted[1] else None, None
    for part in cut.parts(len(x)):
        after = (to.outputs.t() @ cut.outputs(deltas[part])).view(cut.side**2, -1, k)
        if images is not None:
            before = (to.inputs @ cut.inputs(images[part])).view(cut.side**2, -1, c)
            total = _summed(total, after.transpose(1, 2), before)
        if dx is not None:
            tiles = products(after, transformed).view(cut.side**2, -1)
            cut.add_into(to.inputs.t() @ tiles, dx.permute(0, 2, 3, 1)[part])
    if total is None:
        return dx, None
    # Entries as rows, as they lie: the other way round takes four to eight times as long.
    return dx, (to.kernels.t() @ total.flatten(1)).t().reshape(k, c, r, r)


def _summed(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """total_i + a_i b_i, in place where there is a total."""
    if total is None:
        return products(a, b)
    add_products(total, a, b)
    return total


def _blank(shape: Sequence[int], like: Tensor) -> Tensor:
    """Room for [n, c, h, w] with channels last in memory, where and of what type `like` is.

    No view: of a view that a Function gives, nothing may be changed in place.
    """
    last = torch.channels_last
    return torch.empty(tuple(shape), dtype=like.dtype, device=like.device, memory_format=last)


def _last(x: Tensor) -> Tensor:
    """[n, c, h, w] as [n, h, w, c]."""
    return x.permute(0, 2, 3, 1).contiguous()


class _Convolution(torch.autograd.Function):
    """`convolved`, with its gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kernel: Tensor, border: int) -> Tensor:
        transformed = entries(kernel)
        ctx.save_for_backward(x, transformed)
        ctx.border = border
        return convolved(x, transformed, border)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, delta: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, kernel = ctx.saved_tensors
        return *gradients(x, kernel, delta, ctx.border, ctx.needs_input_grad[:2]), None


class Winograd(TorchFunctionMode):
    """Within `with Winograd() as mode:`, convolutions that this form is for are computed in it.

    Those with kernels 3 x 3 or 5 x 5, with as many channels in and out as `least` says, whose
    results' height and width are multiples of 4; of step 1, with the same border all around,
    neither dilated nor in groups; float32 or float64, in the processor's memory. All others, those
    under autocast, and all else are as ever; `computed` counts what is, `left` the other
    convolutions and linear layers. Results lie in memory with channels last.
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
        x, kernel, bias, border = found
        y = _Convolution.apply(x, kernel, border)  # type: ignore[no-untyped-call]
        return y if bias is None else y + bias[:, None, None]


def _asked(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
    dilation: Any = 1, groups: int = 1,
) -> tuple[Tensor, Tensor, Tensor | None, int] | None:  # fmt: skip
    """Input, kernel, bias and border of what `torch.conv2d` was asked for; None where it is not.

    Names and what they are by default are those of `torch.conv2d`.
    """
    if {_two(stride), _two(dilation), (1, groups)} != {(1, 1)}:
        return None
    if not input.dim() == weight.dim() == 4 or torch.is_autocast_enabled("cpu"):
        return None
    (_, c, *image), (k, _, r, width) = input.shape, weight.shape
    if r != width or r not in KINDS or input.numel() == 0:
        return None
    inputs, outputs = least(r)
    if c < inputs or k < outputs:
        return None
    border = _border(padding, r)
    sides = [] if border is None else [v + 2 * border - r + 1 for v in image]
    if border is None or any(v <= 0 or v % M for v in sides):
        return None
    # Odd ones out are torch's to refuse, in its words.
    alike = input.dtype == weight.dtype and weight.shape[1] == c
    if bias is not None:
        alike = alike and bias.shape == (k,) and bias.dtype == input.dtype
    tensors = (input, weight) if bias is None else (input, weight, bias)
    near = all(v.device.type == "cpu" and v.layout == torch.strided for v in tensors)
    real = input.dtype in {torch.float32, torch.float64}
    return (input, weight, bias, border) if alike and near and real else None


def _border(padding: Any, r: int) -> int | None:
    """Zeros on every side of an image; None where sides differ, or it is no such number."""
    if isinstance(padding, str):
        padding = {"same": r // 2, "valid": 0}.get(padding, -1)
    match _two(padding):
        case (high, wide) if high == wide >= 0:
            return high
    return None


def _two(v: Any) -> tuple[int, ...]:
    """A size by height and width, from one number or two, which torch has looked at."""
    sizes = tuple(v) if isinstance(v, (list, tuple)) else (v,)
    return sizes * 2 if len(sizes) == 1 else sizes
