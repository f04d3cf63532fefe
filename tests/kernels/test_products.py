"""Products by oneDNN: those of MKL up to rounding, and where they are chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedshift.engine.stacking.stacked import Stacked
from fedshift.kernels import products as module
from fedshift.kernels.products import add_products, by_onednn, products
from fedshift.recipes import Setting
from support.chains import gap
from support.every_method import MAKE
from support.federations import make_federation

needed = pytest.mark.skipif(
    not module.both_libraries(), reason="this torch comes without MKL or oneDNN"
)


def rounded(product: Tensor, a: Tensor, b: Tensor, first: Tensor | float = 0.0) -> float:
    """The largest distance from the product in float64, over the largest of its size."""
    right = first + a.double() @ b.double()
    return float((product - right).abs().max() / (a.double().abs() @ b.double().abs()).max())


@pytest.mark.slow
@needed
@pytest.mark.parametrize(
    ("c", "m", "k", "n"), [(3, 200, 784, 32), (2, 8, 16, 64), (1, 7, 5, 1), (4, 1, 1, 9)]
)
@pytest.mark.usefixtures("onednn")
def test_products_but_for_rounding(c: int, m: int, k: int, n: int) -> None:
    """Also of transposed matrices, and of rows of larger ones."""
    source = torch.Generator().manual_seed(0)

    def drawn(rows: int, columns: int) -> Iterator[Tensor]:
        v = torch.randn(c, rows, columns, generator=source)
        yield v
        yield v.transpose(1, 2).contiguous().transpose(1, 2)
        yield torch.cat((v, v), 2)[..., :columns]

    for a in drawn(m, k):
        for b in drawn(k, n):
            assert by_onednn(a, n)
            assert rounded(products(a, b), a, b) < 1e-6
            first, bias = (torch.randn(c, m, w, generator=source) for w in (n, 1))
            assert rounded(products(a, b, bias), a, b, bias.double()) < 1e-6
            into = first.clone()
            add_products(into, a, b)
            assert rounded(into, a, b, first.double()) < 1e-6
            assert rounded(into, a, b) > 1e-3  # without what was there


@pytest.mark.few(1)
@needed
@pytest.mark.parametrize("name", ["fedavg", "fedprox", "scaffold I"])
@pytest.mark.usefixtures("onednn")
def test_training_with_them(name: str, setting: Setting) -> None:
    federation = make_federation(setting.model)
    assert gap(MAKE[name], setting, federation, Stacked(dense=True)) < 1e-6


@needed
@pytest.mark.usefixtures("onednn")
def test_all_else_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other types and devices, small ones, and all on other processors."""
    a, b, bias = torch.randn(2, 3, 4), torch.randn(2, 4, 5), torch.randn(2, 3, 1)

    def check(a: Tensor, b: Tensor, bias: Tensor) -> None:
        assert not by_onednn(a, 5)
        assert torch.equal(products(a, b), torch.bmm(a, b))
        assert torch.equal(products(a, b, bias), torch.baddbmm(bias, a, b))
        into = a.new_ones(2, 3, 5)
        add_products(into, a, b)
        assert torch.equal(into, torch.baddbmm(a.new_ones(2, 3, 5), a, b))

    check(a.double(), b.double(), bias.double())
    assert products(a.to("meta"), b.to("meta")).shape == (2, 3, 5)
    monkeypatch.setattr(module, "WORTH", 3 * 4 * 5 + 1)
    check(a, b, bias)
    monkeypatch.setattr(module, "WORTH", 3 * 4 * 5)
    monkeypatch.setattr(module, "faster", lambda: False)
    check(a, b, bias)
    monkeypatch.setattr(module, "faster", lambda: True)
    assert by_onednn(a, 5)


@needed
def test_where_they_are_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, set_plain: Callable[[bool], None]
) -> None:
    def chosen(vendor: str, family: int, capability: str, off: bool = False) -> bool:
        about = tmp_path / "cpuinfo"
        about.write_text(f"vendor_id\t: {vendor}\ncpu family\t: {family}\nmodel\t\t: 99\n")
        monkeypatch.setattr(module, "CPUINFO", about)
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
        set_plain(off)
        return uses_onednn()

    def uses_onednn() -> bool:
        whole: Any = module.faster
        return bool(whole.__wrapped__())

    assert chosen("AuthenticAMD", 26, "AVX512")
    assert not chosen("AuthenticAMD", 26, "AVX512", off=True)
    assert not chosen("AuthenticAMD", 26, "AVX2")
    assert not chosen("AuthenticAMD", 25, "AVX512")
    assert not chosen("GenuineIntel", 26, "AVX512")
    assert chosen("AuthenticAMD", 26, "AVX512")
    for library in (torch.backends.mkl, torch.backends.mkldnn):
        with monkeypatch.context() as patch:
            patch.setattr(library, "is_available", lambda: False)
            assert not uses_onednn()
    assert uses_onednn()
    module.faster.cache_clear()
    assert module.faster()
    module.CPUINFO.write_text("")
    assert not uses_onednn()
    module.CPUINFO.unlink()
    assert not uses_onednn()
    assert module.faster()  # as it said when it was first asked
    module.faster.cache_clear()
