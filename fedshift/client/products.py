"""Products of float32 matrices by oneDNN, where MKL leaves half of the processor's width unused.

MKL, by which torch multiplies, has AVX-512 code for Intel's processors alone and takes AVX2 code on
others. oneDNN, by which torch convolves, goes by what the processor can do: on an AMD EPYC of the
generation Zen 5 one core multiplies 1,024 x 1,024 at 96 GFLOP/s by MKL and at 209 by oneDNN.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

SWITCH = "FEDSHIFT_ONEDNN"
# Multiplications of a product that takes longer than what a call of its own costs.
WORTH = 1 << 20
CPUINFO = Path("/proc/cpuinfo")
ZEN_5 = 26  # its family's number, in decimal there


@lru_cache(maxsize=1)
def faster() -> bool:
    """Whether oneDNN multiplies faster here; the same answer as long as the process lives.

    It does on Linux, on AMD's processors from Zen 5 on (those before do half of an AVX-512
    operation at a time), in a torch that has both libraries. The environment variable
    FEDSHIFT_ONEDNN=0 says no.
    """
    if os.environ.get(SWITCH) == "0" or not CPUINFO.exists():
        return False
    both = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not both or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    about = CPUINFO.read_text()
    family = re.search(r"^cpu family\s*:\s*(\d+)", about, re.MULTILINE)
    wide = "AuthenticAMD" in about and family is not None and int(family[1]) >= ZEN_5
    return wide and torch.backends.cpu.get_cpu_capability() == "AVX512"


def by_onednn(a: Tensor, b: Tensor) -> bool:
    """Whether a [c, m, k] b [c, k, n] are such products."""
    if a[0].numel() * b.shape[-1] < WORTH or not faster():
        return False
    return all(v.device.type == "cpu" and v.dtype == torch.float32 for v in (a, b))


def products(a: Tensor, b: Tensor) -> Tensor:
    """a_i b_i [c, m, n] of a [c, m, k] and b [c, k, n]."""
    return torch.stack(list(_each(a, b))) if by_onednn(a, b) else torch.bmm(a, b)


def add_products(into: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a_i b_i to into_i in place; into [c, m, n]."""
    if by_onednn(a, b):
        for total, product in zip(into.unbind(), _each(a, b), strict=True):
            total.add_(product)
    else:
        into.baddbmm_(a, b)


def _each(a: Tensor, b: Tensor) -> Iterator[Tensor]:
    """The products by oneDNN, one after the other."""
    # What a linear layer is compiled to, a b^T; of a product of matrices torch asks MKL alone.
    multiply = torch.ops.mkldnn._linear_pointwise.default
    for one, other in zip(a.unbind(), b.transpose(1, 2).unbind(), strict=True):
        yield multiply(one, other, None, "none", [], "")
