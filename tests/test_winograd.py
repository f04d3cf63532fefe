"""Convolutions in the form of Winograd: the law of its matrices, gradients, and what it is for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv2d

from fedshift.client import winograd as form
from fedshift.client.winograd import Winograd, convolved, gradients, transforms
from fedshift.seeds import generator

Sizes = tuple[int, int, int, int, int]


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
        for found, one in zip(gradients(xs, kernels, deltas, border), right, strict=True):
            assert found is not None
            assert apart(found, one) < 1e-12
    for wanted in ((True, False), (False, True)):
        some = gradients(x, kernel, delta, border, wanted)
        assert tuple(v is not None for v in some) == wanted
        for found, one in zip(some, right, strict=True):
            assert found is None or apart(found, one) < 1e-12
    # Of a kernel that is turned around it would be another.
    assert apart(convolved(x, kernel.flip(2, 3), border), y.detach()) > 0.1


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
    [((4, 64, 64, 32, 32), 3, 1), ((16, 512, 512, 4, 4), 3, 1), ((32, 32, 64, 12, 12), 5, 0)],
)
def test_rounding_in_float32(sizes: Sizes, r: int, border: int) -> None:
    """As the module says: 2e-6 to 5e-6, where direct sums have 3e-7 to 2e-6."""
    x, kernel, delta = drawn(sizes, torch.float32, r, border)
    leaves = x.double().requires_grad_(), kernel.double().requires_grad_()
    right = conv2d(*leaves, padding=border)
    assert apart(conv2d(x, kernel, padding=border), right.detach()) < 1.5e-6
    assert 1e-6 < apart(convolved(x, kernel, border), right.detach()) < 5e-6
    wide = torch.autograd.grad(right, leaves, delta.double())
    for found, one in zip(gradients(x, kernel, delta, border), wide, strict=True):
        assert found is not None
        assert 1e-6 < apart(found, one) < 6e-6


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
    """As it is written for 3 x 3; for 5 x 5 with half the channels and a border wider by one."""
    if r == 5:
        n, c, k, *image = sizes
        sizes, padding = (n, c // 2, k // 2, *image), asked["padding"]
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
        conv2d(x, torch.ones(64, 128, 3, 5), padding=(1, 2))
        conv2d(x[0], kernel, padding=1)
    assert (mode.computed, mode.left) == (0, 4)


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
