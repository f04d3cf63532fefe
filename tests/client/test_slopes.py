"""The gradient of a loss, by torch's engine at once or through torch.autograd.grad."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fedshift.client.slopes import slope
from fedshift.kernels.torch_private import supported
from fedshift.seeds import generator
from fedshift.tree import Params

# Of a batch that is one client's.
ROWS = torch.zeros(0, dtype=torch.int64)


@pytest.fixture(params=[False, True], ids=["by the engine", "by autograd.grad"])
def switched(request: pytest.FixtureRequest, set_plain: Callable[[bool], None]) -> bool:
    set_plain(request.param)
    return bool(request.param)


@pytest.fixture
def at() -> Params:
    source = generator(0, "slopes")
    return {k: torch.randn(4, 3, generator=source) for k in ("w", "u", "unused")}


def value(at: Params) -> tuple[Tensor, Params]:
    z = at["w"] @ at["u"].T
    return (z.exp().sum() + at["w"].square().sum()).log(), {"z": z}


def test_the_gradient_is_the_closed_form(switched: bool, at: Params) -> None:
    """d log(f) = df / f, with f = sum_ij exp(w_i . u_j) + ||w||^2; zero for what is not reached."""
    result = slope(value, at, ROWS)
    e = (at["w"] @ at["u"].T).exp()
    f = e.sum() + at["w"].square().sum()
    torch.testing.assert_close(result.grad["w"], (e @ at["u"] + 2 * at["w"]) / f)
    torch.testing.assert_close(result.grad["u"], e.T @ at["w"] / f)
    assert torch.equal(result.grad["unused"], torch.zeros(4, 3))
    assert torch.equal(result.loss, f.log())
    assert not any(
        v.requires_grad for v in (result.loss, *result.grad.values(), *result.rest.values())
    )
    assert not any(v.requires_grad for v in at.values())


def test_torch_has_the_engine(switched: bool) -> None:
    """And the switch leaves it."""
    assert supported("run_backward") is not switched


def test_both_ways_give_the_same_bits(at: Params, set_plain: Callable[[bool], None]) -> None:
    set_plain(False)
    short = slope(value, at, ROWS)
    set_plain(True)
    long = slope(value, at, ROWS)
    assert all(torch.equal(short.grad[k], long.grad[k]) for k in at)


def test_a_loss_that_reaches_nothing_has_slope_zero(switched: bool, at: Params) -> None:
    result = slope(lambda at: (torch.tensor(2.0), {}), at, ROWS)
    assert not any(bool(v.any()) for v in result.grad.values())


@pytest.mark.parametrize("loss", [lambda w: w.sum(0), lambda w: w.sum().reshape(1)])
def test_a_loss_that_is_no_number_is_refused(
    switched: bool, at: Params, loss: Callable[[Tensor], Tensor]
) -> None:
    with pytest.raises(RuntimeError, match=r"(?i)shape|size"):
        slope(lambda at: (loss(at["w"]), {}), at, ROWS)


def test_a_loss_of_a_kind_of_its_own_goes_through_autograd(at: Params) -> None:
    """Its class may define another gradient."""
    calls: list[object] = []

    class Own(Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            calls.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    slope(lambda at: (value(at)[0].as_subclass(Own), {}), at, ROWS)
    assert torch.autograd.grad in calls


def test_a_mode_is_asked_before_the_way_back(at: Params) -> None:
    """And it is not active during it, as Winograd's must not be: its products would recurse."""
    calls: list[object] = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            calls.append(func)
            return func(*args, **(kwargs or {}))

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, w: Tensor) -> Tensor:
            return 2 * w

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return torch.negative(torch.negative(2 * grad))

    with Mode():
        result = slope(lambda at: (Doubled.apply(at["w"]).sum(), {}), at, ROWS)
    assert torch.equal(result.grad["w"], torch.full((4, 3), 2.0))
    assert torch.autograd.grad in calls
    assert torch.negative not in calls
