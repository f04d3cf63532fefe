"""ReLU after max-pooling, and pools by halves: bit for bit what torch gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from conftest import Setting
from test_levers import CLASSES, TARGET, last
from torch import Tensor, nn

from fedshift import model as module
from fedshift import pooling, recipes
from fedshift.client.local import Local
from fedshift.data import client_data, register
from fedshift.engine.backends import Backend, loop
from fedshift.engine.levers import channels_last
from fedshift.engine.rounds import Federation, run
from fedshift.engine.stacked import Stacked
from fedshift.model import build
from fedshift.pooling import Halved, pool_changes, pooled
from fedshift.seeds import Seeds


class Net(nn.Module):
    """A Sequential within another one, overlapping windows with padding, and a pool of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
            nn.Conv2d(4, 5, 3), nn.ReLU(), nn.MaxPool2d(3, 2, 1), nn.Flatten(),
        )  # fmt: skip
        self.head = nn.Linear(5 * 2 * 2, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out


def trained(backend: Backend = loop) -> Any:
    source = torch.Generator().manual_seed(0)
    clients = [
        client_data(
            torch.randn(n, 1, 12, 12, generator=source),
            torch.randint(CLASSES, (n,), generator=source),
            i,
        )
        for i, n in enumerate((9, 14, 6))
    ]
    model = build(Net, 1)
    federation = Federation(clients, *model.init(), register(clients, CLASSES), Seeds.of(0))
    setting = Setting(model, TARGET, Local(lr=0.1, batch=5))
    return last(run(recipes.fedavg(setting), federation, 3, backend=backend)).server["params"]


@pytest.mark.parametrize("kind", [lambda: loop, lambda: channels_last(loop), Stacked])
def test_training_ends_with_the_same_bits(
    kind: Callable[[], Backend], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pooling, "LARGE", 0)
    halved: list[bool] = []
    even = pooling._even
    monkeypatch.setattr(pooling, "_even", lambda x: (halved.append(True), even(x))[1])
    backend = kind()
    turned = trained(backend)
    assert halved
    asked: list[int] = []

    @contextmanager
    def as_it_is(changes: Any) -> Iterator[None]:
        asked.append(len(changes))
        yield

    monkeypatch.setattr(module, "pooled", as_it_is)
    plain = trained(kind())
    assert set(asked) == {2}
    assert all(torch.equal(v, turned[k]) for k, v in plain.items())


def test_values_and_gradients_are_the_same() -> None:
    """Ties, zeros of both signs, windows below 0, infinities and NaN."""
    z = torch.randint(-2, 3, (6, 3, 8, 8), generator=torch.Generator().manual_seed(0)).double()
    z[0, 0, 0, 0], z[0, 0, 2, 2], z[0, 1, 3, 3] = float("nan"), float("inf"), -float("inf")
    z[1] = -0.0
    given = torch.arange(6 * 3 * 4 * 4).double().reshape(6, 3, 4, 4)

    def both(*layers: nn.Module) -> tuple[Tensor, Tensor]:
        leaf = z.clone().requires_grad_()
        out = nn.Sequential(*layers)(leaf)
        return out.detach(), torch.autograd.grad(out, leaf, given)[0]

    before, after = both(nn.ReLU(), nn.MaxPool2d(2)), both(nn.MaxPool2d(2), nn.ReLU())
    for one, two in zip(before, after, strict=True):
        assert torch.equal(one.nan_to_num(9e9), two.nan_to_num(9e9))
        assert torch.equal(one.isnan(), two.isnan())
    average = both(nn.AvgPool2d(2), nn.ReLU())  # where order matters
    assert not torch.equal(average[0].nan_to_num(9e9), both(nn.ReLU(), nn.AvgPool2d(2))[0])


@pytest.mark.parametrize(
    "shape", [(6, 3, 8, 8), (2, 1, 7, 9), (1, 2, 2, 3), (3, 2, 1, 5), (0, 2, 4, 4)]
)
@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16])
def test_halves_are_torchs_pools(
    shape: tuple[int, ...], kind: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ties, infinities, odd sides; also many networks' at once, and gradients of gradients."""
    monkeypatch.setattr(pooling, "LARGE", 0)
    source = torch.Generator().manual_seed(0)
    z = torch.randint(-2, 3, shape, generator=source).to(kind)
    z[z == 2] = float("inf")
    fits = min(shape[-2:]) > 1
    out = (*shape[:2], *(v // 2 for v in shape[2:]))
    given = torch.randn(out, generator=source).to(kind)

    def both(pool: nn.Module) -> tuple[Tensor, Tensor]:
        leaf = z.clone().requires_grad_()
        pooled = pool(leaf)
        return pooled.detach(), torch.autograd.grad(pooled, leaf, given)[0]

    if not fits:
        for pool in (nn.MaxPool2d(2), Halved()):
            with pytest.raises(RuntimeError, match="too small"):
                both(pool)
        return
    for one, two in zip(both(nn.MaxPool2d(2)), both(Halved()), strict=True):
        assert torch.equal(one, two)
    assert torch.equal(torch.func.vmap(Halved())(z[:, None])[:, 0], Halved()(z))


def test_their_gradients_have_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pooling, "LARGE", 0)
    z = torch.randn(2, 1, 5, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(Halved(), z)
    assert torch.autograd.gradgradcheck(Halved(), z)
    many = torch.randn(3, 2, 1, 2, 2, dtype=torch.float64)  # of one input, as Jacobians ask
    y = Halved()(z)
    (together,) = torch.autograd.grad(y, z, many, is_grads_batched=True, retain_graph=True)
    each = [torch.autograd.grad(y, z, one, retain_graph=True)[0] for one in many]
    assert torch.equal(together, torch.stack(each))
    jacobian = torch.func.jacrev(nn.MaxPool2d(2))(z.detach())
    assert torch.equal(torch.func.jacrev(Halved())(z.detach()), jacobian)


def test_which_pools_are_halved() -> None:
    def halved(*layers: nn.Module) -> int:
        changes = pool_changes(nn.Sequential(*layers))
        return sum(isinstance(v, Halved) for change in changes for v in change.new.values())

    assert halved(nn.MaxPool2d(2)) == halved(nn.MaxPool2d((2, 2), 2, (0, 0))) == 1
    assert halved(nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(1, 1, 1), nn.MaxPool2d(2)) == 2
    for odd in (
        nn.MaxPool2d(3), nn.MaxPool2d(2, 1), nn.MaxPool2d(2, 2, 1), nn.MaxPool2d((2, 3)),
        nn.MaxPool2d(2, dilation=2), nn.MaxPool2d(2, ceil_mode=True), nn.MaxPool1d(2),
        nn.MaxPool2d(2, return_indices=True), nn.AvgPool2d(2),
    ):  # fmt: skip
        assert halved(odd) == 0


class OwnRelu(nn.ReLU):
    pass


class OwnSequence(nn.Sequential):
    pass


def test_only_what_is_known_is_turned() -> None:
    def count(*layers: nn.Module, kind: type[nn.Sequential] = nn.Sequential) -> int:
        return sum(len(change.new) == 2 for change in pool_changes(kind(*layers)))

    assert count(nn.ReLU(), nn.MaxPool2d(2)) == 1
    assert count(nn.ReLU(), nn.MaxPool1d(2), nn.ReLU(), nn.MaxPool3d(2)) == 2
    assert count(nn.ReLU(), nn.AvgPool2d(2)) == 0
    assert count(nn.ReLU(), nn.Identity(), nn.MaxPool2d(2)) == 0
    assert count(nn.MaxPool2d(2), nn.ReLU()) == 0
    assert count(nn.ReLU(), nn.MaxPool2d(2, return_indices=True)) == 0
    assert count(nn.Tanh(), nn.MaxPool2d(2)) == 0
    assert count(OwnRelu(), nn.MaxPool2d(2)) == 0
    assert count(nn.ReLU(), nn.MaxPool2d(2), kind=OwnSequence) == 0


def test_the_network_is_as_it_was_after_each_pass() -> None:
    net = nn.Sequential(nn.ReLU(), nn.MaxPool2d(3), nn.MaxPool2d(2))
    changes, before = pool_changes(net), list(net)
    with pooled(changes):
        assert list(net)[:2] == before[1::-1]
        assert isinstance(net[2], Halved)
    assert list(net) == before
    with pytest.raises(RuntimeError), pooled(changes):
        net(torch.ones(2))
    assert list(net) == before
    net[1] = mine = nn.MaxPool2d(5)  # put there since: it stays
    with pooled(changes):
        assert list(net)[:2] == [before[0], mine]
    assert list(net)[:2] == [before[0], mine]


def test_who_looks_into_a_layer_sees_it_as_it_stands() -> None:
    net = nn.Sequential(nn.ReLU(), nn.MaxPool2d(2))
    seen: list[torch.Size] = []
    handle = net[0].register_forward_hook(lambda layer, given, out: seen.append(out.shape))
    with pooled(pool_changes(net)):
        net(torch.ones(1, 1, 4, 4))
    assert seen == [torch.Size((1, 1, 4, 4))]
    handle.remove()
    with pooled(pool_changes(net)):
        assert isinstance(next(iter(net)), Halved)
