"""Matrix products in float32 by oneDNN, on processors where MKL uses half of the vector width.

torch multiplies with MKL, which runs its AVX-512 code on Intel's processors only, and AVX2 code on
others. oneDNN, with which torch convolves, asks what the processor can do. On an AMD EPYC (Zen 5)
one core multiplies 1,024 x 1,024 at 96 GFLOP/s with MKL and at 209 with oneDNN.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from fedshift.kernels.torch_private import onednn_linear, supported

# oneDNN needs a call for each product of a batch. With fewer multiplications than this in each,
# the calls cost more than oneDNN saves.
WORTH = 1 << 22
CPUINFO = Path("/proc/cpuinfo")
ZEN_5 = 26  # "cpu family" of Zen 5, decimal in that file


@cache
def faster() -> bool:
    """Whether oneDNN multiplies faster here; computed once in a process.

    True on Linux, on AMD's processors from Zen 5 on, if this torch has both libraries. Zen 4
    executes AVX-512 instructions in two halves and gains nothing.
    """
    if not CPUINFO.exists() or not both_libraries():
        return False
    about = CPUINFO.read_text()
    family = re.search(r"^cpu family\s*:\s*(\d+)", about, re.MULTILINE)
    wide = "AuthenticAMD" in about and family is not None and int(family[1]) >= ZEN_5
    return wide and torch.backends.cpu.get_cpu_capability() == "AVX512"


def both_libraries() -> bool:
    """Whether this torch has MKL and oneDNN."""
    has_mkl = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
    has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return has_mkl and has_onednn and supported("linear_pointwise")


def products(a: Tensor, b: Tensor, first: Tensor | None = None) -> Tensor:
    """a_i b_i [c, m, n] of a [c, m, k] and b [c, k, n], plus first [c, m, 1] if it is given."""
    if not (by_onednn(a, b.shape[2]) and b.dtype == a.dtype):
        return torch.bmm(a, b) if first is None else torch.baddbmm(first, a, b)
    each = list(_onednn_products(a, b))
    whole = torch.stack(each) if len(each) > 1 else each[0][None]
    return whole if first is None else whole.add_(first)


def add_products(into: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a_i b_i to into_i in place, into [c, m, n]."""
    if by_onednn(a, b.shape[2]) and b.dtype == a.dtype:
        for total, product in zip(into.unbind(), _onednn_products(a, b), strict=True):
            total.add_(product)
    else:
        into.baddbmm_(a, b)


def by_onednn(a: Tensor, columns: int) -> bool:
    """Whether oneDNN computes a_i b_i for a [c, m, k] and b_i [k, columns]."""
    large = a.shape[1] * a.shape[2] * columns >= WORTH
    return large and faster() and a.device.type == "cpu" and a.dtype == torch.float32


def _onednn_products(a: Tensor, b: Tensor) -> Iterator[Tensor]:
    """The products a_i b_i by oneDNN, one after the other."""
    # oneDNN multiplies x w^T, as in a linear layer. It copies x if x is transposed in memory; w may
    # have either layout. So if a is transposed, compute (b^T a^T)^T instead, unless that costs
    # more: it copies b, and its result is read against the memory order.
    less = b[0].numel() + a.shape[1] * b.shape[2] < a[0].numel()
    turned = a.stride(-1) != 1 and less
    x, w = (b.transpose(1, 2), a) if turned else (a, b.transpose(1, 2))
    for one, other in zip(x.unbind(), w.unbind(), strict=True):
        product = onednn_linear(one, other)
        yield product.t() if turned else product
