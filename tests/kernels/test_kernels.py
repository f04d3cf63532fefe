"""Networks called with other tensors in place of their own, and what is asked of torch itself."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap

from fedshift.kernels.torch_private import versions, within_vmap
from fedshift.model import Model


class Tied(nn.Module):
    """One matrix in two layers, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.there, self.back = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.back.weight = self.there.weight
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.back(torch.relu(self.there(x)))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase] = nn.LSTM) -> None:
        super().__init__()
        self.body, self.head = kind(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)[0][:, -1])


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


NETS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "tied": (Tied, (7, 4)),
    "with BatchNorm": (normed, (7, 4)),
    "LSTM": (Recurrent, (7, 2, 4)),
    "GRU": (lambda: Recurrent(nn.GRU), (7, 2, 4)),
}


def moved(net: nn.Module) -> nn.Module:
    """The same network with other numbers."""
    other = copy.deepcopy(net)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(3)))
    return other


def tensors(net: nn.Module) -> dict[str, Tensor]:
    named = dict((*net.named_parameters(), *net.named_buffers()))
    return {k: v.detach().clone() for k, v in named.items()}


@pytest.mark.parametrize(("make", "shape"), NETS.values(), ids=NETS)
def test_as_the_network_that_owns_the_tensors(make: Any, shape: tuple[int, ...]) -> None:
    """Outputs, gradients and running statistics bit for bit, and nothing stays behind."""
    torch.manual_seed(0)
    net, x = make(), torch.randn(shape)
    other, before, given = moved(net), tensors(net), tensors(moved(net))
    leaves = {k: given[k].requires_grad_() for k, _ in net.named_parameters()}
    buffers = {k: given[k] for k, _ in net.named_buffers()}
    out, after = Model(net).train(leaves, buffers, x)
    expected = other(x)
    out["logits"].square().sum().backward()
    expected.square().sum().backward()
    assert torch.equal(out["logits"], expected)
    assert all(torch.equal(leaves[k].grad, p.grad) for k, p in other.named_parameters())
    assert all(float(leaf.grad.abs().max()) > 0 for leaf in leaves.values())
    assert all(torch.equal(after[k], b) for k, b in other.named_buffers())
    assert all(torch.equal(v, before[k]) for k, v in tensors(net).items())
    assert not torch.allclose(out["logits"], copy.deepcopy(net)(x))


def test_a_failure_puts_all_back() -> None:
    net = Tied()
    before = tensors(net)
    zeros = {k: torch.zeros_like(v) for k, v in before.items()}
    with pytest.raises(RuntimeError):
        Model(net).train(zeros, {}, torch.randn(2, 5))
    assert all(torch.equal(v, before[k]) for k, v in tensors(net).items())
    assert net.back.weight is net.there.weight


def test_tensors_of_stacked_clients_and_their_versions() -> None:
    inside = list[bool]()
    x = torch.ones(2, 3)
    vmap(lambda v: (inside.append(within_vmap(v)), v)[1])(x)
    assert [*inside, within_vmap(x), within_vmap(x.to_sparse())] == [True, False, False]
    (before,) = versions([x])
    assert versions([x.add_(1.0)]) == [(before or 0) + 1]
    with torch.inference_mode():
        assert versions([torch.ones(2)]) == [None]
