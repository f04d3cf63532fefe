"""The mode `Winograd`: what it computes, and what it leaves to torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv2d

from fedshift.client import winograd as form
from fedshift.client.winograd import Winograd, gradients
from support.convolutions import Sizes, apart, drawn

pytestmark = pytest.mark.usefixtures("narrow")

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


@pytest.mark.few(1)
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
