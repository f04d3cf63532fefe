"""ReLU after max-pooling, and 2 x 2 pools as maxima: bit for bit torch's results."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedshift import recipes
from fedshift.client.local import Local
from fedshift.data import client_data, register
from fedshift.engine.backends import Backend, loop
from fedshift.engine.one_by_one import channels_last
from fedshift.engine.run import Federation, run
from fedshift.engine.stacking.stacked import Stacked
from fedshift.kernels import pools as pooling
from fedshift.kernels.pools import halved, pooled, with_pools
from fedshift.model import build
from fedshift.models.routed import Routed
from fedshift.recipes import Setting
from fedshift.seeds import Seeds
from support.federations import CLASSES, TARGET
from support.rounds import last


class OwnSequence(nn.Sequential):
    pass


class Net(nn.Module):
    """A Sequential within another one, overlapping windows with padding, and a pool of its own."""

    def __init__(self, kind: type[nn.Sequential]) -> None:
        super().__init__()
        self.body = kind(
            kind(nn.Conv2d(1, 4, 3), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
            nn.Conv2d(4, 5, 3), nn.ReLU(), nn.MaxPool2d(3, 2, 1), nn.Flatten(),
        )  # fmt: skip
        self.head = nn.Linear(5 * 2 * 2, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out


def trained(backend: Backend, kind: type[nn.Sequential]) -> Any:
    source = torch.Generator().manual_seed(0)
    clients = [
        client_data(
            torch.randn(n, 1, 12, 12, generator=source),
            torch.randint(CLASSES, (n,), generator=source),
            i,
        )
        for i, n in enumerate((9, 14, 6))
    ]
    model = build(lambda: Net(kind), 1)
    federation = Federation(clients, *model.init(), register(clients, CLASSES), Seeds.of(0))
    setting = Setting(model, TARGET, Local(lr=0.1, batch=5))
    return last(run(recipes.fedavg(setting), federation, 3, backend=backend)).server["params"]


def torch_pools(out: Tensor) -> int:
    """The number of torch's own max-pools in an output's graph."""
    nodes, seen = [out.grad_fn], set[Any]()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes += [before for before, _ in node.next_functions]
    return sum("MaxPool" in node.name() for node in seen)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", [lambda: loop, lambda: channels_last(loop), Stacked])
def test_training_ends_with_the_same_bits(
    kind: Callable[[], Backend], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a subclass of Sequential, whose pools are not replaced."""
    monkeypatch.setattr(pooling, "LARGE", 0)
    for form, expected in ((nn.Sequential, 1), (OwnSequence, 2)):
        net = Net(form)
        with pooled(with_pools(net)):
            assert torch_pools(net(torch.randn(2, 1, 12, 12))) == expected
    plain, turned = trained(kind(), OwnSequence), trained(kind(), nn.Sequential)
    assert all(torch.equal(v, turned[k]) for k, v in plain.items())


def tricky(shape: tuple[int, ...], kind: torch.dtype) -> Tensor:
    """Ties, zeros of both signs, windows below 0 and infinities."""
    z = torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(0)).to(kind)
    z[z == 2] = float("inf")
    z[:1] = -0.0
    z[:2, ..., ::3] *= -1.0
    return z


def passed(net: Callable[[Tensor], Tensor], z: Tensor, given: Tensor) -> tuple[Tensor, Tensor]:
    """(the output, the gradient of z)."""
    leaf = z.clone().requires_grad_()
    out = net(leaf)
    return out.detach(), torch.autograd.grad(out, leaf, given)[0]


@pytest.mark.parametrize(
    "shape", [(6, 3, 8, 8), (2, 1, 7, 9), (2, 2, 2, 3), (3, 2, 1, 5), (0, 2, 4, 4)]
)
@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16])
def test_maxima_are_torchs_pools(
    shape: tuple[int, ...], kind: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also their gradients, infinite ones as well, and many networks' at once."""
    monkeypatch.setattr(pooling, "LARGE", 0)
    z = tricky(shape, kind)
    given = torch.randn(*shape[:2], *(v // 2 for v in shape[2:]))
    given.view(-1)[::5] = -float("inf")
    pool = nn.MaxPool2d(2)
    if min(shape[-2:]) < 2:
        for one in (pool, halved):
            with pytest.raises(RuntimeError, match="too small"):
                one(z)
        return
    for one, two in zip(
        passed(pool, z, given.to(kind)), passed(halved, z, given.to(kind)), strict=True
    ):
        assert torch.equal(one, two)
    assert torch.equal(torch.signbit(one), torch.signbit(two))  # of gradients
    assert torch_pools(pool(z.clone().requires_grad_())) == 1
    assert torch_pools(halved(z.clone().requires_grad_())) == 0
    assert torch.equal(torch.func.vmap(halved)(z[:, None])[:, 0], pool(z))
    assert torch.equal(halved(z.nan_to_num().long()), pool(z.nan_to_num().long()))


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_a_rectifier_may_come_after(kind: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN, too; its gradient may go to another entry of its window."""
    monkeypatch.setattr(pooling, "LARGE", 0)
    z, given = tricky((6, 3, 8, 8), kind), torch.randn(6, 3, 4, 4).to(kind)
    net = nn.Sequential(nn.ReLU(), nn.MaxPool2d(2))
    plain = passed(net, z, given)
    with pooled(with_pools(net)):
        for one, two in zip(plain, passed(net, z, given), strict=True):
            assert torch.equal(one, two)
        assert torch_pools(net(z.clone().requires_grad_())) == 0
    z[2, 0, 0, 0] = z[2, 1, 1, 1] = z[2, 2, 2, 3] = float("nan")
    plain = passed(net, z, given)
    with pooled(with_pools(net)):
        out, grad = passed(net, z, given)
    assert torch.equal(plain[0].isnan(), out.isnan())
    assert int(out.isnan().sum()) == 3
    assert torch.equal(plain[0].nan_to_num(9.0), out.nan_to_num(9.0))
    whole = nn.AvgPool2d(2, divisor_override=1)  # each window's gradient goes to one entry of it
    assert torch.equal(whole(grad), whole(plain[1]))
    turned = passed(nn.Sequential(nn.AvgPool2d(2), nn.ReLU()), z, given)  # where order matters
    assert not torch.equal(
        turned[1], passed(nn.Sequential(nn.ReLU(), nn.AvgPool2d(2)), z, given)[1]
    )


@pytest.mark.slow
def test_derivatives_of_all_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pooling, "LARGE", 0)
    z = torch.randn(2, 1, 5, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(halved, z, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(halved, z)
    many = torch.randn(3, 2, 1, 2, 2, dtype=torch.float64)  # of one input, as Jacobians ask
    y = halved(z)
    assert torch_pools(y) == 0
    (together,) = torch.autograd.grad(y, z, many, is_grads_batched=True, retain_graph=True)
    each = [torch.autograd.grad(y, z, one, retain_graph=True)[0] for one in many]
    assert torch.equal(together, torch.stack(each))
    for way in (torch.func.jacrev, torch.func.jacfwd):
        assert torch.equal(way(halved)(z.detach()), way(nn.MaxPool2d(2))(z.detach()))

    def cubes(pool: Callable[[Tensor], Tensor]) -> Tensor:
        hessian: Tensor = torch.func.hessian(lambda v: (pool(v) ** 3).sum())(z.detach())
        return hessian

    assert torch.equal(cubes(halved), cubes(nn.MaxPool2d(2)))


def test_which_pools_are_maxima() -> None:
    """Of images that are large enough, and lie one channel after the other."""
    x = torch.randn(4, 16, 32, 32, requires_grad=True)
    assert x.numel() == pooling.LARGE

    def count(*layers: nn.Module, x: Tensor = x) -> int:
        net = nn.Sequential(*layers)
        plain = net(x)
        with pooled(with_pools(net)):
            fast = net(x)
        assert fast.stride() == plain.stride()
        assert torch.equal(fast, plain)
        return torch_pools(plain) - torch_pools(fast)

    assert count(nn.MaxPool2d(2)) == count(nn.MaxPool2d((2, 2), 2, (0, 0))) == 1
    assert count(nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 64, 1), nn.MaxPool2d(2)) == 2
    for odd in (
        nn.MaxPool2d(3), nn.MaxPool2d(2, 1), nn.MaxPool2d(2, 2, 1), nn.MaxPool2d((2, 3)),
        nn.MaxPool2d(2, dilation=2), nn.MaxPool2d(2, ceil_mode=True), nn.AvgPool2d(2),
    ):  # fmt: skip
        assert count(odd) == 0
    assert count(nn.MaxPool2d(2), x=x[1:]) == count(nn.MaxPool2d(2), x=x.flatten(0, 1)) == 0
    assert count(nn.MaxPool2d(2), x=x.contiguous(memory_format=torch.channels_last)) == 0
    there = halved(x.detach().to("meta").requires_grad_())
    assert there.shape == (4, 16, 16, 16)
    assert torch_pools(there) == 1
    net = nn.Sequential(nn.ReLU(), nn.MaxPool2d(2, return_indices=True))
    plain = net(x)
    with pooled(with_pools(net)):
        assert all(map(torch.equal, net(x), plain))


class OwnRelu(nn.ReLU):
    pass


class OwnConv(nn.Conv2d):
    pass


def turned(*layers: nn.Module, kind: type[nn.Sequential] = nn.Sequential) -> int:
    """The number of rectifiers that are moved behind their pool."""
    net, shapes = kind(*layers), list[torch.Size]()
    x = torch.randn(1, 2, 16, 16)

    def noting(z: Tensor, inplace: bool = False) -> Tensor:
        shapes.append(z.shape)
        return torch.relu_(z) if inplace else torch.relu(z)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.functional, "relu", noting)
        plain = net(x.clone())
        with pooled(with_pools(net)):
            result = net(x.clone())
    assert torch.equal(plain, result)
    half = len(shapes) // 2
    return sum(a != b for a, b in zip(shapes[:half], shapes[half:], strict=True))


def test_only_what_is_known_is_turned() -> None:
    relu, pool = nn.ReLU(), nn.MaxPool2d(2)
    assert turned(relu, pool) == 1
    assert turned(relu, nn.MaxPool3d((1, 2, 2)), relu, nn.Flatten(2), nn.MaxPool1d(2)) == 1
    assert turned(relu, pool, relu, pool, pool) == 2
    assert turned(relu, nn.AvgPool2d(2)) == turned(nn.Tanh(), pool) == 0
    assert turned(relu, nn.Identity(), pool) == turned(pool, relu) == 0
    assert turned(OwnRelu(), pool) == turned(relu, pool, kind=OwnSequence) == 0


def test_what_a_rectifier_writes_to_is_written_to() -> None:
    """Where other code may have a reference to it."""
    pool, into, conv = nn.MaxPool2d(2), nn.ReLU(inplace=True), nn.Conv2d(2, 2, 1)
    assert turned(conv, into, pool) == turned(nn.GroupNorm(1, 2), into, pool) == 1
    assert turned(nn.Identity(), into, pool) == turned(OwnConv(2, 2, 1), into, pool) == 0
    watched = nn.Conv2d(2, 2, 1)
    watched.register_forward_hook(lambda layer, given, out: None)
    assert turned(watched, into, pool) == 0
    net, x = nn.Sequential(into, pool), torch.tensor([[[[-1.0, 2.0], [3.0, -4.0]]]])
    with pooled(with_pools(net)):
        net(x)
    assert x.flatten().tolist() == [0.0, 2.0, 3.0, 0.0]


def test_layers_taken_one_by_one_are_as_they_stand() -> None:
    """Slices, loops and single layers of a sequence, as `Routed` takes them at its cut."""
    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    x, layers = torch.randn(2, 2, 8, 8), list(net)
    stages = [partial(lambda layer: layer, v) for v in (*net, nn.Linear(27, 8))]
    routed = Routed(stages, 8, 3, shared=2)
    with pooled((*with_pools(net), *with_pools(routed))):
        assert [layer is one for layer, one in zip(net, layers, strict=True)] == [True] * 4
        assert torch.equal(net[:2](x), torch.relu(layers[0](x)))
        inside = routed(x)
    assert len(with_pools(routed)) == 1
    for name, v in routed(x).items():
        assert torch.equal(v, inside[name])


def test_what_became_of_a_pool_since_counts() -> None:
    net, x = nn.Sequential(nn.ReLU(), nn.MaxPool2d(2)), torch.randn(1, 2, 12, 12)
    sequences = with_pools(net)
    for change in (
        lambda: setattr(net[1], "kernel_size", 3),
        lambda: setattr(net[1], "forward", nn.AvgPool2d(4).forward),
        lambda: setattr(net[0], "forward", nn.Tanh().forward),
        lambda: net.append(nn.Sigmoid()),
        lambda: setattr(net, "forward", lambda x: x + 1),
    ):
        change()
        plain = net(x)
        with pooled(sequences):
            assert torch.equal(net(x), plain)
    assert torch.equal(net(x), x + 1)


@pytest.mark.parametrize("which", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
@pytest.mark.parametrize("at", [0, 1])
def test_a_layer_that_is_inspected_stays_as_written(which: str, at: int) -> None:
    """Also by a hook on all layers."""
    net, x = nn.Sequential(nn.ReLU(), nn.MaxPool2d(2)), torch.randn(1, 2, 8, 8, requires_grad=True)
    seen: list[Tensor] = []

    def look(layer: nn.Module, *given: Any) -> None:
        many = (v if isinstance(v, tuple) else (v,) for v in given)
        seen.extend(v.detach().clone() for vs in many for v in vs if v is not None)

    def watched(sequences: tuple[nn.Sequential, ...]) -> list[Tensor]:
        seen.clear()
        with pooled(sequences):
            net(x).sum().backward()
        return [*seen]

    for begin in (
        getattr(net[at], f"register_{which}_hook"),
        getattr(nn.modules.module, f"register_module_{which}_hook"),
    ):
        handle = begin(look)
        plain, ours = watched(()), watched(with_pools(net))
        handle.remove()
        assert plain
        assert len(plain) == len(ours)
        assert all(map(torch.equal, plain, ours))


def test_the_network_is_as_it_was_after_each_pass() -> None:
    net = nn.Sequential(nn.ReLU(), nn.MaxPool2d(2))
    sequences, before = with_pools(net), dict(vars(net))
    with pytest.raises(RuntimeError), pooled(sequences):
        net(torch.ones(2))
    assert vars(net) == before
    outer, inner = pooled(sequences), pooled(sequences)  # as two threads do
    outer.__enter__()
    inner.__enter__()
    outer.__exit__(None, None, None)
    x = torch.randn(1, 1, 4, 4)
    assert torch.equal(net(x), torch.relu(nn.functional.max_pool2d(x, 2)))
    inner.__exit__(None, None, None)
    assert vars(net) == before
