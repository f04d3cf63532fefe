"""Products of float32 matrices by oneDNN, where MKL leaves half of the processor's width unused.

MKL, by which torch multiplies, has AVX-512 code for Intel's processors alone and takes AVX2 code on
others. oneDNN, by which torch convolves, goes by what the processor can do: on an AMD EPYC of the
generation Zen 5 one core multiplies 1,024 x 1,024 at 96 GFLOP/s by MKL and at 209 by oneDNN.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from fedshift.kernels.torch_private import onednn_linear, supported

# Multiplications in a product below which one call per product costs more than oneDNN saves.
WORTH = 1 << 22
CPUINFO = Path("/proc/cpuinfo")
ZEN_5 = 26  # its family's number, in decimal there


@cache
def faster() -> bool:
    """Whether oneDNN multiplies faster here; the same answer as long as the process lives.

    It does on Linux, on AMD's processors from Zen 5 on (Zen 4 does half of an AVX-512 operation at
    a time), in a torch that has both libraries.
    """
    if not CPUINFO.exists() or not both_libraries():
        return False
    about = CPUINFO.read_text()
    family = re.search(r"^cpu family\s*:\s*(\d+)", about, re.MULTILINE)
    wide = "AuthenticAMD" in about and family is not None and int(family[1]) >= ZEN_5
    return wide and torch.backends.cpu.get_cpu_capability() == "AVX512"


def both_libraries() -> bool:
    """Whether this torch has both libraries."""
    has_mkl = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
    has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return has_mkl and has_onednn and supported("linear_pointwise")


def products(a: Tensor, b: Tensor, first: Tensor | None = None) -> Tensor:
    """a_i b_i [c, m, n] of a [c, m, k] and b [c, k, n], added to first [c, m, 1] if it is given."""
    if not (by_onednn(a, b.shape[2]) and b.dtype == a.dtype):
        return torch.bmm(a, b) if first is None else torch.baddbmm(first, a, b)
    each = list(_each(a, b))
    whole = torch.stack(each) if len(each) > 1 else each[0][None]
    return whole if first is None else whole.add_(first)


def add_products(into: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a_i b_i to into_i in place, into [c, m, n]."""
    if by_onednn(a, b.shape[2]) and b.dtype == a.dtype:
        for total, product in zip(into.unbind(), _each(a, b), strict=True):
            total.add_(product)
    else:
        into.baddbmm_(a, b)


def by_onednn(a: Tensor, columns: int) -> bool:
    """Whether oneDNN computes a_i b_i for a [c, m, k] and b_i [k, columns]."""
    large = a.shape[1] * a.shape[2] * columns >= WORTH
    return large and faster() and a.device.type == "cpu" and a.dtype == torch.float32


def _each(a: Tensor, b: Tensor) -> Iterator[Tensor]:
    """The products by oneDNN, one after the other."""
    # oneDNN multiplies x w^T, as a linear layer. It copies x if that is transposed in memory; w may
    # have either layout. So where a is transposed, compute (b^T a^T)^T instead, unless that costs
    # more: a copy of b, and a result that is read against its memory order.
    less = b[0].numel() + a.shape[1] * b.shape[2] < a[0].numel()
    turned = a.stride(-1) != 1 and less
    x, w = (b.transpose(1, 2), a) if turned else (a, b.transpose(1, 2))
    for one, other in zip(x.unbind(), w.unbind(), strict=True):
        product = onednn_linear(one, other)
        yield product.t() if turned else product
