"""Convolutions in the form of Winograd: the law of its matrices, gradients, and what it is for."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import conv2d

from fedshift.client import products
from fedshift.client import winograd as form
from fedshift.client.winograd import convolved, entries, gradients, transforms
from support.convolutions import Sizes, apart, drawn

pytestmark = pytest.mark.usefixtures("narrow")


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
    x, kernel = torch.empty(99, 64, 16, 8), torch.empty(36, 64, 64)
    assert form._Cut.of(x, kernel, 1) == (1, 6, 4, 2, 16)
    assert form._Cut.of(x[:, :16], kernel[:, :16, :16], 1).each == 57  # 455 tiles
    assert form._Cut.of(x[:, :16], kernel[..., :16], 1).each == 16
    half = form._Cut.of(x[:, :8].double(), kernel[:, :8, :8].double(), 1)
    assert half.each == form._Cut.of(x[:, :16], kernel[:, :16, :16], 1).each
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
        transformed = entries(kernels)
        result = convolved(xs, transformed, border)
        assert apart(result, y.detach()) < 1e-12
        assert result.is_contiguous(memory_format=torch.channels_last)
        both = gradients(xs, transformed, deltas, border, (True, True))
        for found, one in zip(both, right, strict=True):
            assert found is not None
            assert apart(found, one) < 1e-12
    # Of a kernel that is turned around it would be another.
    assert apart(convolved(x, entries(kernel.flip(2, 3)), border), y.detach()) > 0.1


@pytest.mark.skipif(not products._both(), reason="this torch comes without MKL or oneDNN")
@pytest.mark.parametrize(("sizes", "r", "border"), SHAPES)
def test_products_by_onednn(sizes: Sizes, r: int, border: int, counted: list[torch.Size]) -> None:
    """In float32, where it multiplies faster."""
    x, kernel, delta = drawn(sizes, torch.float32, r=r, border=border)
    leaves = x.double().requires_grad_(), kernel.double().requires_grad_()
    y = conv2d(*leaves, padding=border)
    right = torch.autograd.grad(y, leaves, delta.double())
    transformed = entries(kernel)
    assert apart(convolved(x, transformed, border), y.detach()) < 1e-4
    both = gradients(x, transformed, delta, border, (True, True))
    for found, one in zip(both, right, strict=True):
        assert found is not None
        assert apart(found, one) < 1e-4
    # Forward, and back to the images and to the kernel.
    assert len(counted) >= 3 * (r + 3) ** 2


@pytest.mark.few(1)
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


@pytest.mark.few(1)
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
    transformed = entries(kernel)
    assert 1e-6 < apart(convolved(x, transformed, border), right.detach()) < 1e-5
    wide = torch.autograd.grad(right, leaves, delta.double())
    both = gradients(x, transformed, delta, border, (True, True))
    for found, one in zip(both, wide, strict=True):
        assert found is not None
        assert 1e-6 < apart(found, one) < 1e-5
