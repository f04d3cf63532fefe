"""Convolutions in the form of Winograd: the law of its matrices, gradients, and what it is for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv2d

from fedshift.client import products
from fedshift.client import winograd as form
from fedshift.client.winograd import Winograd, convolved, gradients, transforms
from fedshift.seeds import generator

Sizes = tuple[int, int, int, int, int]


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few channels, on every processor."""
    monkeypatch.setattr(form, "faster", lambda: False)


def drawn(
    sizes: Sizes, dtype: torch.dtype = torch.float64, r: int = 3, border: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """x [n, c, h, w], a kernel [k, c, r, r], delta [n, k, h', w']."""
    n, c, k, h, w = sizes
    source, less = generator(0, "winograd"), r - 1 - 2 * border

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=source, dtype=torch.float64).to(dtype)

    return normal(n, c, h, w), normal(k, c, r, r), normal(n, k, h - less, w - less)


def apart(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).norm() / other.double().norm())


# B^T, G and A^T of F(4 x 4, 3 x 3) in Lavin and Gray, section 4.2.
SOURCE = (
    torch.tensor(
        [[4, 0, -5, 0, 1, 0], [0, -4, -4, 1, 1, 0], [0, 4, -4, -1, 1, 0], [0, -2, -1, 2, 1, 0],
         [0, 2, -1, -2, 1, 0], [0, 4, 0, -5, 0, 1]]
    ).double(),
    torch.tensor(
        [[6, 0, 0], [-4, -4, -4], [-4, 4, -4], [1, 2, 4], [1, -2, 4], [0, 0, 24]]
    ).double() / 24,
    torch.tensor(
        [[1, 1, 1, 1, 1, 0], [0, 1, -1, 2, -2, 0], [0, 1, 1, 4, 4, 0], [0, 1, -1, 8, -8, 1]]
    ).double(),
)  # fmt: skip


def test_the_matrices_are_those_of_the_source() -> None:
    """And (m x m) vec(t) = vec(m t m^T)."""
    for found, one in zip(transforms(torch.float64, 3), SOURCE, strict=True):
        assert torch.allclose(found, torch.kron(one, one), rtol=0, atol=1e-15)
        t = drawn((1, 1, 1, one.shape[1], one.shape[1]))[0][0, 0]
        assert torch.allclose(found @ t.flatten(), (one @ t @ one.T).flatten(), atol=1e-13)


@pytest.mark.parametrize("r", [3, 5])
def test_one_tile_by_hand(r: int) -> None:
    """y = A^T [(G g G^T) * (B^T d B)] A, of one tile."""
    d, kernel, _ = drawn((1, 1, 1, r + 3, r + 3), r=r, border=0)
    inputs, kernels, outputs = transforms(torch.float64, r)
    y = outputs @ ((kernels @ kernel.flatten()) * (inputs @ d.flatten()))
    assert torch.allclose(y, conv2d(d, kernel).flatten(), atol=1e-12)


@pytest.mark.parametrize("r", [3, 5])
def test_gradients_by_hand(r: int) -> None:
    """dg = G^T [sum (B^T d B) * (A dy A^T)] G; dd = B [(G g G^T) * (A dy A^T)] B^T, added.

    Of two tiles, one above the other, 4 apart; of one alone they are others.
    """
    x, kernel, delta = drawn((1, 1, 1, r + 7, r + 3), r=r, border=0)
    inputs, kernels, outputs = transforms(torch.float64, r)
    image, dy = x[0, 0], delta[0, 0]
    dx, sums = torch.zeros_like(image), []
    for rows, top in ((dy[:4], 0), (dy[4:], 4)):
        after, d = outputs.T @ rows.flatten(), image[top : top + r + 3]
        sums.append((inputs @ d.flatten()) * after)
        dx[top : top + r + 3] += (inputs.T @ ((kernels @ kernel.flatten()) * after)).view_as(d)
    leaves = x.clone().requires_grad_(), kernel.clone().requires_grad_()
    right = torch.autograd.grad(conv2d(*leaves), leaves, delta)
    assert apart(dx, right[0][0, 0]) < 1e-12
    assert apart(kernels.T @ (sums[0] + sums[1]), right[1].flatten()) < 1e-12
    assert apart(kernels.T @ sums[0], right[1].flatten()) > 0.1


def test_how_many_images_at_a_time() -> None:
    """1 MiB of tiles 6 x 6 of 64 channels in float32 are 113 of them, so 128; in 8 each, 16 images.

    A quarter as many channels leave room for more, the wider side and float64 for fewer; one
    image is taken in any case.
    """
    x, kernel = torch.empty(99, 64, 16, 8), torch.empty(64, 64, 3, 3)
    assert form._Cut.of(x, kernel, 1) == (1, 6, 4, 2, 16)
    assert form._Cut.of(x[:, :16], kernel[:16, :16], 1).each == 57  # 455 tiles
    assert form._Cut.of(x[:, :16], kernel[:, :16], 1).each == 16
    half = form._Cut.of(x[:, :8].double(), kernel[:8, :8].double(), 1)
    assert half.each == form._Cut.of(x[:, :16], kernel[:16, :16], 1).each
    assert form._Cut.of(x[:3], kernel, 1).each == 3
    assert form._Cut.of(torch.empty(2, 64, 128, 128), kernel, 1).each == 1


SHAPES: list[tuple[Sizes, int, int]] = [
    ((1, 1, 1, 4, 4), 3, 1), ((3, 2, 5, 8, 12), 3, 1), ((5, 3, 2, 16, 4), 3, 1),
    ((7, 4, 4, 4, 8), 3, 1), ((3, 2, 4, 6, 10), 3, 0), ((2, 3, 2, 8, 4), 3, 3),
    ((1, 1, 1, 8, 8), 5, 0), ((3, 2, 5, 12, 8), 5, 0), ((3, 4, 2, 8, 16), 5, 2),
    ((2, 1, 2, 2, 6), 5, 3),
]  # fmt: skip


@pytest.mark.parametrize(("sizes", "r", "border"), SHAPES)
@pytest.mark.parametrize("held", [(1 << 20, 128), (1, 1), (1, 7)])
def test_sums_and_gradients_are_those_of_torch(
    sizes: Sizes, r: int, border: int, held: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many images are taken at a time, and however they lie in memory."""
    monkeypatch.setattr(form, "CACHE", held[0])
    monkeypatch.setattr(form, "ROWS", held[1])
    x, kernel, delta = drawn(sizes, r=r, border=border)
    leaves = x.clone().requires_grad_(), kernel.clone().requires_grad_()
    y = conv2d(*leaves, padding=border)
    right = torch.autograd.grad(y, leaves, delta)
    for lie in (torch.contiguous_format, torch.channels_last):
        xs, kernels, deltas = (v.to(memory_format=lie) for v in (x, kernel, delta))
        assert apart(convolved(xs, kernels, border), y.detach()) < 1e-12
        assert convolved(xs, kernels, border).is_contiguous(memory_format=torch.channels_last)
        both = gradients(xs, kernels, deltas, border, (True, True))
        for found, one in zip(both, right, strict=True):
            assert found is not None
            assert apart(found, one) < 1e-12
    # Of a kernel that is turned around it would be another.
    assert apart(convolved(x, kernel.flip(2, 3), border), y.detach()) > 0.1


@pytest.mark.skipif(not products._both(), reason="this torch comes without MKL or oneDNN")
@pytest.mark.parametrize(("sizes", "r", "border"), SHAPES)
def test_products_by_onednn(
    sizes: Sizes, r: int, border: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, where it multiplies faster."""
    multiplied: list[torch.Size] = []
    each = products._each

    def noted(a: Tensor, b: Tensor) -> Iterator[Tensor]:
        for product in each(a, b):
            multiplied.append(product.shape)
            yield product

    monkeypatch.setattr(products, "faster", lambda: True)
    monkeypatch.setattr(products, "WORTH", 0)
    monkeypatch.setattr(products, "_each", noted)
    x, kernel, delta = drawn(sizes, torch.float32, r=r, border=border)
    leaves = x.double().requires_grad_(), kernel.double().requires_grad_()
    y = conv2d(*leaves, padding=border)
    right = torch.autograd.grad(y, leaves, delta.double())
    assert apart(convolved(x, kernel, border), y.detach()) < 1e-4
    for found, one in zip(gradients(x, kernel, delta, border, (True, True)), right, strict=True):
        assert found is not None
        assert apart(found, one) < 1e-4
    assert len(multiplied) >= 2 * (r + 3) ** 2  # forward, and back to the images


@pytest.mark.parametrize("fast", [False, True])
def test_how_many_channels_pay(fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """More where oneDNN, which convolves for torch, is faster than MKL."""
    monkeypatch.setattr(form, "faster", lambda: fast)
    computed = []
    for channels in (64, 128, 256):
        x, kernel, _ = drawn((1, channels, channels, 4, 4), torch.float32)
        with Winograd() as mode:
            conv2d(x, kernel, padding=1)
        computed.append(mode.computed)
    assert computed == ([0, 0, 1] if fast else [1, 1, 1])


@pytest.mark.parametrize(("r", "border"), [(3, 1), (5, 2)])
def test_gradients_by_differences(r: int, border: int) -> None:
    x, kernel, _ = drawn((2, 2, 3, 4, 8), r=r, border=border)
    leaves = x.requires_grad_(), kernel.requires_grad_()
    assert torch.autograd.gradcheck(form._Convolution.apply, (*leaves, border))
    (dx,) = torch.autograd.grad(form._Convolution.apply(*leaves, border).sum(), leaves[:1])
    assert dx.shape == x.shape


def test_gradients_of_gradients_are_refused() -> None:
    """They are not written; a wrong number would be worse."""
    x, kernel, _ = drawn((1, 2, 2, 4, 4))
    y = form._Convolution.apply(x.requires_grad_(), kernel.requires_grad_(), 1).square().sum()
    (once,) = torch.autograd.grad(y, [x], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        once.sum().backward()


@pytest.mark.parametrize(
    ("sizes", "r", "border"),
    [
        ((4, 64, 64, 32, 32), 3, 1),
        ((16, 512, 512, 4, 4), 3, 1),
        ((32, 32, 64, 12, 12), 5, 0),
        ((4, 512, 512, 8, 8), 5, 2),
    ],
)
def test_rounding_in_float32(sizes: Sizes, r: int, border: int) -> None:
    """As the module says: 1e-6 to 1e-5, where direct sums have 2e-7 to 1e-6."""
    x, kernel, delta = drawn(sizes, torch.float32, r, border)
    leaves = x.double().requires_grad_(), kernel.double().requires_grad_()
    right = conv2d(*leaves, padding=border)
    assert apart(conv2d(x, kernel, padding=border), right.detach()) < 1.2e-6
    assert 1e-6 < apart(convolved(x, kernel, border), right.detach()) < 1e-5
    wide = torch.autograd.grad(right, leaves, delta.double())
    for found, one in zip(gradients(x, kernel, delta, border, (True, True)), wide, strict=True):
        assert found is not None
        assert 1e-6 < apart(found, one) < 1e-5


WIDE: Sizes = (2, 64, 64, 8, 8)
WIDER = {0: 1, 1: 2, 2: 4, (1, 2): (2, 3), "valid": 1}


@pytest.mark.parametrize(
    ("sizes", "dtype", "asked"),
    [
        (WIDE, torch.float32, {"padding": 1, "stride": 2}),
        (WIDE, torch.float32, {"padding": 1, "stride": (1, 2)}),
        (WIDE, torch.float32, {"padding": 0}),
        (WIDE, torch.float32, {"padding": (1, 2)}),
        (WIDE, torch.float32, {"padding": "valid"}),
        (WIDE, torch.float32, {"padding": 2, "dilation": 2}),
        (WIDE, torch.float32, {"padding": "same", "dilation": 2}),
        ((2, 63, 64, 8, 8), torch.float32, {"padding": 1}),
        ((2, 64, 63, 8, 8), torch.float32, {"padding": 1}),
        ((2, 64, 64, 8, 6), torch.float32, {"padding": 1}),
        ((2, 64, 64, 10, 8), torch.float32, {"padding": 1}),
        ((0, 64, 64, 8, 8), torch.float32, {"padding": 1}),
        (WIDE, torch.bfloat16, {"padding": 1}),
    ],
)
@pytest.mark.parametrize("r", [3, 5])
def test_what_it_is_not_for_is_left_to_torch(
    sizes: Sizes, dtype: torch.dtype, asked: dict[str, Any], r: int
) -> None:
    """As it is written for 3 x 3; for 5 x 5 with half the channels in, and another border."""
    if r == 5:
        n, c, k, *image = sizes
        sizes, padding = (n, c // 2, k, *image), asked["padding"]
        asked = asked | {"padding": WIDER.get(padding, padding)}
    x, kernel, _ = drawn(sizes, dtype, r)
    plain = conv2d(x, kernel, **asked)
    with Winograd() as mode:
        other = conv2d(x, kernel, **asked)
    assert torch.equal(other, plain)
    assert (mode.computed, mode.left) == (0, 1)


def test_groups_and_larger_kernels_are_left_to_torch() -> None:
    x, kernel, _ = drawn((2, 128, 64, 8, 8), torch.float32)
    with Winograd() as mode:
        conv2d(x, kernel[:, :64], padding=1, groups=2)
        conv2d(x, torch.ones(64, 128, 7, 7), padding=3)
        conv2d(x, torch.ones(64, 128, 3, 5), padding=1)
        conv2d(x, torch.ones(64, 128, 5, 3), padding=2)
        conv2d(x[..., :2, :2], kernel, padding=1)
        conv2d(x[..., :2], kernel, padding=(1, 1))
        conv2d(x[0], kernel, padding=1)
    assert (mode.computed, mode.left) == (0, 7)


SMALL: Sizes = (2, 32, 64, 8, 12)


@pytest.mark.parametrize(
    ("sizes", "r", "asked"),
    [
        (WIDE, 3, {"padding": 1}), (WIDE, 3, {"padding": (1, 1)}), (WIDE, 3, {"padding": "same"}),
        (WIDE, 3, {"padding": [1, 1]}), (WIDE, 3, {"padding": (1,)}), (WIDE, 3, {"padding": 3}),
        ((2, 64, 64, 6, 10), 3, {}), ((2, 64, 64, 6, 10), 3, {"padding": "valid"}),
        (SMALL, 5, {}), (SMALL, 5, {"padding": 2}), (SMALL, 5, {"padding": "same"}),
    ],
)  # fmt: skip
def test_what_it_is_for(sizes: Sizes, r: int, asked: dict[str, Any]) -> None:
    """By each way to say it; torch's own has other bits."""
    x, kernel, _ = drawn(sizes, torch.float32, r)
    bias = torch.arange(64.0)
    plain = conv2d(x, kernel, bias, **asked)
    with Winograd() as mode:
        other = conv2d(x, kernel, bias, **asked)
        named = conv2d(input=x, weight=kernel, bias=bias, **asked)
    assert (mode.computed, mode.left) == (2, 0)
    assert torch.equal(other, named)
    assert apart(other, plain) < 5e-6
    assert not torch.equal(other, plain)


def test_what_torch_refuses_has_its_words() -> None:
    x, kernel, _ = drawn(WIDE, torch.float32)
    for odd, bias in (
        (kernel[:, :32], None), (kernel.double(), None), (kernel[0, 0, 0], None),
        (kernel, torch.ones(1)), (kernel, torch.ones(64).double()), (kernel, torch.ones(())),
    ):  # fmt: skip
        with pytest.raises(RuntimeError) as plain:
            conv2d(x, odd, bias, padding=1)
        with Winograd(), pytest.raises(RuntimeError) as other:
            conv2d(x, odd, bias, padding=1)
        assert str(other.value) == str(plain.value)


@pytest.mark.parametrize("padding", [(1, 1, 1), -1, (-1, -1), (1.0, 1.0), [True, 1.5], (), "odd"])
def test_borders_that_torch_refuses(padding: Any) -> None:
    x, kernel, _ = drawn(WIDE, torch.float32)
    with pytest.raises((RuntimeError, TypeError)) as plain:
        conv2d(x, kernel, padding=padding)
    with Winograd(), pytest.raises((RuntimeError, TypeError)) as other:
        conv2d(x, kernel, padding=padding)
    assert str(other.value) == str(plain.value)


@pytest.mark.parametrize("lie", [torch.sparse_coo, torch.strided])
def test_images_that_torch_refuses(lie: torch.layout) -> None:
    """Sparse ones, and smaller ones than the kernel."""
    x, kernel, _ = drawn(WIDE, torch.float32)
    odd = x.to_sparse() if lie == torch.sparse_coo else x[..., :2, :2]
    with pytest.raises((RuntimeError, NotImplementedError)) as plain:
        conv2d(odd, kernel, padding=int(lie == torch.sparse_coo))
    with Winograd() as mode, pytest.raises((RuntimeError, NotImplementedError)) as other:
        conv2d(odd, kernel, padding=int(lie == torch.sparse_coo))
    assert mode.computed == 0
    assert str(other.value).partition("\n")[0] == str(plain.value).partition("\n")[0]


@pytest.mark.parametrize("moves", [(True, False), (False, True), (True, True), (False, False)])
def test_only_gradients_that_are_wanted(
    moves: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By autograd, of a first layer or a frozen kernel; work for another would be in vain."""
    x, kernel, delta = drawn(WIDE)
    asked: list[tuple[bool, ...]] = []

    def noted(*given: Any) -> tuple[Tensor | None, Tensor | None]:
        found = gradients(*given)
        asked.append(tuple(given[-1]))
        assert tuple(v is not None for v in found) == asked[-1]
        return found

    monkeypatch.setattr(form, "gradients", noted)
    leaves = [v.clone().requires_grad_(m) for v, m in zip((x, kernel), moves, strict=True)]
    with Winograd() as mode:
        y = conv2d(*leaves, padding=1)
    assert mode.computed == 1
    assert y.requires_grad == any(moves)
    if any(moves):
        y.backward(delta)
        assert asked == [moves]
    right = [v.detach().requires_grad_() for v in leaves]
    conv2d(*right, padding=1).backward(delta)
    for leaf, one, moving in zip(leaves, right, moves, strict=True):
        assert (leaf.grad is not None) == moving
        if leaf.grad is not None and one.grad is not None:
            assert apart(leaf.grad, one.grad) < 1e-12


def test_results_are_where_the_inputs_are() -> None:
    """Whatever device is the default."""
    x, kernel, _ = drawn(WIDE)
    x.requires_grad_()
    with torch.device("meta"), Winograd():
        y = conv2d(x, kernel, padding=1)
    assert y.device.type == "cpu"
    assert apart(y.detach(), conv2d(x.detach(), kernel, padding=1)) < 1e-12
    with torch.device("meta"):
        y.sum().backward()
    assert x.grad is not None
    assert x.grad.device.type == "cpu"


def test_under_autocast_it_is_left_to_torch() -> None:
    x, kernel, _ = drawn(WIDE, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        plain = conv2d(x, kernel, padding=1)
        with Winograd() as mode:
            assert torch.equal(conv2d(x, kernel, padding=1), plain)
    assert (mode.computed, mode.left) == (0, 1)
    with Winograd() as mode:
        conv2d(x, kernel)  # without padding
    assert (mode.computed, mode.left) == (0, 1)
