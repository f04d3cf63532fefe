"""Convolutions in the form of Winograd: the law of its matrices, gradients, and what it is for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from conftest import CLASSES, TARGET, Setting, make_federation, one_job
from test_levers import images
from test_stacked import last
from torch import Tensor, nn
from torch.nn.functional import conv2d

from fedshift import recipes
from fedshift.client import winograd as form
from fedshift.client.local import Local
from fedshift.client.winograd import Winograd, convolved, kernel_gradient, transforms
from fedshift.data import client_data, register
from fedshift.engine.backends import Forgiving, failure, loop
from fedshift.engine.levers import channels_last, winograd
from fedshift.engine.rounds import Federation, run
from fedshift.engine.stacked import Stacked
from fedshift.engine.workers import workers
from fedshift.errors import InputError, UnfitError
from fedshift.experiments.side_by_side import Way, backend_of
from fedshift.model import build
from fedshift.seeds import Seeds, generator
from fedshift.tree import Parts, sub

Sizes = tuple[int, int, int, int, int]


def drawn(sizes: Sizes, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """x [n, c, h, w], a kernel [k, c, 3, 3], delta [n, k, h, w]."""
    n, c, k, h, w = sizes
    source = generator(0, "winograd")

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=source, dtype=torch.float64).to(dtype)

    return normal(n, c, h, w), normal(k, c, 3, 3), normal(n, k, h, w)


def apart(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).norm() / other.double().norm())


def test_the_matrices_are_those_of_the_source() -> None:
    """Lavin and Gray, section 4.2: F(4 x 4, 3 x 3)."""
    b = torch.tensor(
        [[4, 0, -5, 0, 1, 0], [0, -4, -4, 1, 1, 0], [0, 4, -4, -1, 1, 0], [0, -2, -1, 2, 1, 0],
         [0, 2, -1, -2, 1, 0], [0, 4, 0, -5, 0, 1]]
    ).double()  # fmt: skip
    g = torch.tensor(
        [[6, 0, 0], [-4, -4, -4], [-4, 4, -4], [1, 2, 4], [1, -2, 4], [0, 0, 24]]
    ).double() / 24  # fmt: skip
    a = torch.tensor(
        [[1, 1, 1, 1, 1, 0], [0, 1, -1, 2, -2, 0], [0, 1, 1, 4, 4, 0], [0, 1, -1, 8, -8, 1]]
    ).double()  # fmt: skip
    for found, one in zip(transforms(torch.float64), (b, g, a), strict=True):
        assert torch.allclose(found, one, rtol=0, atol=1e-15)


def test_one_tile_by_hand() -> None:
    """y = A^T [(G g G^T) * (B^T d B)] A, of an image whose border is 0."""
    x, kernel, _ = drawn((1, 1, 1, 4, 4))
    b, g, a = transforms(torch.float64)
    d = nn.functional.pad(x, (1, 1, 1, 1))[0, 0]
    y = a @ ((g @ kernel[0, 0] @ g.T) * (b @ d @ b.T)) @ a.T
    assert torch.allclose(y, conv2d(x, kernel, padding=1)[0, 0], atol=1e-13)


SHAPES: list[Sizes] = [(1, 1, 1, 4, 4), (3, 2, 5, 8, 12), (5, 3, 2, 16, 4), (7, 4, 4, 4, 8)]


@pytest.mark.parametrize("sizes", SHAPES)
@pytest.mark.parametrize("held", [(1 << 20, 128), (1, 1), (1, 7)])
def test_sums_and_gradients_are_those_of_torch(
    sizes: Sizes, held: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many images are taken at a time, and however they lie in memory."""
    monkeypatch.setattr(form, "CACHE", held[0])
    monkeypatch.setattr(form, "ROWS", held[1])
    x, kernel, delta = drawn(sizes)
    leaves = x.clone().requires_grad_(), kernel.clone().requires_grad_()
    y = conv2d(*leaves, padding=1)
    dx, dkernel = torch.autograd.grad(y, leaves, delta)
    for lie in (torch.contiguous_format, torch.channels_last):
        xs, deltas = x.to(memory_format=lie), delta.to(memory_format=lie)
        assert apart(convolved(xs, kernel), y.detach()) < 1e-13
        assert apart(kernel_gradient(xs, deltas), dkernel) < 1e-13
        turned = kernel.flip(2, 3).transpose(0, 1)
        assert apart(convolved(deltas, turned), dx) < 1e-13
    # Of a kernel that is not turned it would be another.
    assert apart(convolved(delta, kernel.transpose(0, 1)), dx) > 0.1


def test_gradients_by_differences() -> None:
    x, kernel, _ = drawn((2, 2, 3, 4, 8))
    leaves = x.requires_grad_(), kernel.requires_grad_()
    assert torch.autograd.gradcheck(form._Convolution.apply, leaves)
    (dx,) = torch.autograd.grad(form._Convolution.apply(*leaves).sum(), leaves[:1])
    assert dx.shape == x.shape


def test_gradients_of_gradients_are_refused() -> None:
    """They are not written; a wrong number would be worse."""
    x, kernel, _ = drawn((1, 2, 2, 4, 4))
    y = form._Convolution.apply(x.requires_grad_(), kernel.requires_grad_()).square().sum()
    (once,) = torch.autograd.grad(y, [x], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        once.sum().backward()


@pytest.mark.parametrize("sizes", [(4, 64, 64, 32, 32), (16, 512, 512, 4, 4)])
def test_rounding_in_float32(sizes: Sizes) -> None:
    """As the module says: about 3e-6, where direct sums have 4e-7 to 1e-6."""
    x, kernel, delta = drawn(sizes, torch.float32)
    right = conv2d(x.double(), kernel.double(), padding=1)
    assert apart(conv2d(x, kernel, padding=1), right) < 1.5e-6
    assert 1e-6 < apart(convolved(x, kernel), right) < 5e-6
    wide = torch.autograd.functional.vjp(
        lambda g: conv2d(x.double(), g, padding=1), kernel.double(), delta.double()
    )[1]
    assert apart(kernel_gradient(x, delta), wide) < 5e-6


WIDE: Sizes = (2, 64, 64, 8, 8)


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
def test_what_it_is_not_for_is_left_to_torch(
    sizes: Sizes, dtype: torch.dtype, asked: dict[str, Any]
) -> None:
    x, kernel, _ = drawn(sizes, dtype)
    plain = conv2d(x, kernel, **asked)
    with Winograd() as mode:
        other = conv2d(x, kernel, **asked)
    assert torch.equal(other, plain)
    assert (mode.computed, mode.left) == (0, 1)


def test_groups_and_larger_kernels_are_left_to_torch() -> None:
    x, kernel, _ = drawn((2, 128, 64, 8, 8), torch.float32)
    with Winograd() as mode:
        conv2d(x, kernel[:, :64], padding=1, groups=2)
        conv2d(x, torch.ones(64, 128, 5, 5), padding=1)
        conv2d(x[0], kernel, padding=1)
    assert (mode.computed, mode.left) == (0, 3)


@pytest.mark.parametrize(
    "asked", [{"padding": 1}, {"padding": (1, 1)}, {"padding": "same"}, {"padding": [1, 1]}]
)
def test_what_it_is_for(asked: dict[str, Any]) -> None:
    """By each way to say it; torch's own has other bits."""
    x, kernel, _ = drawn(WIDE, torch.float32)
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


class Deep(nn.Module):
    """A convolution of each kind: the first is torch's, the others are not."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv2d(1, 64, 3, padding=1)
        self.two = nn.Conv2d(64, 64, 3, padding=1, bias=False)
        self.three = nn.Conv2d(64, 64, 3, padding=1)
        self.head = nn.Linear(64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.two(self.one(x).relu()).relu()
        return self.head(self.three(x).mean((2, 3)))


def deep(dtype: torch.dtype) -> tuple[Federation, Setting]:
    source = generator(0, "deep")
    clients = [
        client_data(
            torch.randn(n, 1, 8, 8, generator=source).to(dtype),
            torch.randint(CLASSES, (n,), generator=source), i,
        )
        for i, n in enumerate((9, 6))
    ]  # fmt: skip
    model = build(Deep, 1)
    params = {k: v.to(dtype) for k, v in model.init()[0].items()}
    federation = Federation(clients, params, {}, register(clients, CLASSES), Seeds.of(0))
    return federation, Setting(model, TARGET, Local(lr=0.1, batch=5))


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-4), (torch.float64, 1e-12)])
def test_a_round_is_the_loops_but_for_rounding(dtype: torch.dtype, most: float) -> None:
    """And on workers that of one process bit for bit."""
    federation, setting = deep(dtype)
    algorithm = recipes.fedavg(setting)
    plain = last(run(algorithm, federation, 2)).server["params"]
    other = last(run(algorithm, federation, 2, backend=winograd(loop))).server["params"]
    gaps, moved = sub(other, plain), sub(plain, federation.params)
    apart = max(float(gaps[k].norm() / moved[k].norm()) for k in gaps)
    assert 0 < apart < most
    with workers(federation.clients, 2) as team:
        spread = last(run(algorithm, federation, 2, backend=winograd(team))).server["params"]
    assert all(torch.equal(spread[k], other[k]) for k in other)


def test_a_network_without_such_convolutions_is_refused() -> None:
    """By the lever and by the name that users give; a network without any goes on."""
    federation, setting = images(3, torch.float32)
    algorithm = recipes.fedavg(setting)
    with pytest.raises(UnfitError, match="winograd is for convolutions 3 x 3 of step 1"):
        last(run(algorithm, federation, 1, backend=winograd(loop)))
    with pytest.raises(InputError, match="winograd"):
        backend_of("winogard")


def test_networks_without_convolutions_are_refused(setting: Setting) -> None:
    algorithm, federation = recipes.fedavg(setting), make_federation(setting.model)
    with pytest.raises(UnfitError, match="this training has none"):
        last(run(algorithm, federation, 1, backend=winograd(loop)))


class InPlace(Deep):
    """What a convolution gives is changed where it lies."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x).relu_()
        y = self.two(x)
        y += x
        return self.head(y.relu_().mean((2, 3)))


def test_what_a_convolution_gives_may_be_changed_in_place() -> None:
    federation, setting = deep(torch.float32)
    algorithm = recipes.fedavg(replace(setting, model=build(InPlace, 1)))
    plain = last(run(algorithm, federation, 1)).server["params"]
    other = last(run(algorithm, federation, 1, backend=winograd(loop))).server["params"]
    assert 0 < max(apart(other[k], plain[k]) for k in plain) < 1e-4


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


@dataclass(frozen=True)
class Fails:
    """A client's work that ends after its first convolution."""

    def __call__(self, message: Parts, state: Parts, data: Any, plans: Any) -> Any:
        conv2d(data.x, torch.ones(2, 1, 3, 3))
        raise ValueError("these data cannot be used")


def test_a_client_that_fails_is_not_a_network_that_does_not_fit() -> None:
    federation, setting = deep(torch.float32)
    (reply,) = winograd(loop)(Forgiving(Fails()), [one_job(recipes.fedavg(setting), federation)])
    assert failure(reply.update) == "these data cannot be used"


@pytest.mark.parametrize("named", [loop, None], ids=["by the lever", "by the name"])
def test_the_name_is_both_levers(named: Any) -> None:
    """Bit for bit: channels lie last, and convolutions are in this form."""
    federation, setting = deep(torch.float32)
    algorithm = recipes.fedavg(setting)
    own = winograd(channels_last(loop)) if named else Way("winograd").alone()
    right = last(run(algorithm, federation, 1, backend=winograd(channels_last(loop))))
    found = last(run(algorithm, federation, 1, backend=own)).server["params"]
    assert all(torch.equal(found[k], v) for k, v in right.server["params"].items())
    for other in (winograd(loop), channels_last(loop)):
        params = last(run(algorithm, federation, 1, backend=other)).server["params"]
        assert not all(torch.equal(found[k], v) for k, v in params.items())


def test_stacked_clients_are_refused() -> None:
    federation, setting = deep(torch.float32)
    with pytest.raises(InputError, match="clients cannot be stacked"):
        last(run(recipes.fedavg(setting), federation, 1, backend=winograd(Stacked())))
