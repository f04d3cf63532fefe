"""The first passes of a network reveal state that it keeps and the run would lose."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedshift import recipes
from fedshift.client.local import Local
from fedshift.data import client_data, register
from fedshift.engine.preflight.network import check_rows
from fedshift.engine.run import Federation, Round, run
from fedshift.errors import InputError
from fedshift.model import Model, build
from fedshift.models.dense import Mlp
from fedshift.recipes import Setting
from fedshift.seeds import Seeds, generator
from support.federations import CLASSES, FEATURES, TARGET, make_federation


class Drifting(nn.Linear):
    """Its outputs grow a little with each pass; the count is an attribute, or a buffer."""

    def __init__(self, *, buffer: bool) -> None:
        super().__init__(FEATURES, CLASSES)
        if buffer:
            self.register_buffer("passes", torch.zeros(()))
        else:
            self.passes = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.passes = self.passes + 1.0
        return super().forward(x) * (1.0 + 1e-6 * self.passes if self.training else 1.0)


class Centred(nn.Linear):
    """Subtracts the mean of the batch in training, and a running one in evaluation."""

    def __init__(self, *, buffer: bool) -> None:
        super().__init__(FEATURES, CLASSES)
        if buffer:
            self.register_buffer("mean", torch.zeros(FEATURES))
        else:
            self.mean = torch.zeros(FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        mean = self.mean
        if self.training:
            mean = x.mean(0)
            self.mean = 0.99 * self.mean + 0.01 * mean.detach()
        return super().forward(x - mean)


class Remembering(nn.Linear):
    """Keeps a value that is the same in each pass."""

    table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.linspace(0.0, 1.0, FEATURES)
        return super().forward(x + self.table)


def begun(net: nn.Module) -> tuple[Model, list[Round]]:
    model = Model(net)
    method = recipes.fedavg(Setting(model, TARGET, Local(epochs=1, batch=8)))
    return model, list(run(method, make_federation(model), 2))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Drifting, 'two passes of the network in training give other "logits"'),
        (Centred, 'in evaluation before and after training give other "logits".*register_buffer'),
    ],
)
def test_a_state_of_its_own_is_refused_however_little_it_does(kind: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        begun(kind(buffer=False))
    assert begun(kind(buffer=True))[1][-1].t == 2


def test_what_is_kept_and_the_same_in_each_pass_is_right() -> None:
    assert begun(Remembering(FEATURES, CLASSES))[1][-1].t == 2


@pytest.mark.parametrize("last", [nn.Softmax(1), nn.LogSoftmax(1), nn.Sigmoid(), nn.Identity()])
def test_probabilities_are_warned_of_once(last: nn.Module) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        begun(nn.Sequential(nn.Linear(FEATURES, CLASSES), last))
    texts = [str(w.message) for w in caught if "probabilities" in str(w.message)]
    assert len(texts) == isinstance(last, nn.Softmax)
    assert all("leave out the softmax" in text for text in texts)


def network() -> nn.Module:
    def made() -> nn.Module:
        wide = [nn.Linear(FEATURES, FEATURES) for _ in range(2)]
        return nn.Sequential(*wide, nn.Linear(FEATURES, CLASSES))

    return build(made, 0).net


def fix(net: Any) -> None:
    net[0].weight.requires_grad_(False)


def tie(net: Any) -> None:
    net[1].weight = net[0].weight


def untie(net: Any) -> None:
    net[1].bias = nn.Parameter(net[1].bias.detach().clone())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (fix, '"0.weight" has requires_grad=False now, and had True'),
        (tie, "its layers, or what they share"),
        (untie, "its layers, or what they share"),
    ],
)
def test_a_network_that_is_changed_within_a_run_is_refused(change: Any, message: str) -> None:
    net: Any = network()
    net[1].bias = net[0].bias
    model = Model(net)
    method = recipes.fedavg(Setting(model, TARGET, Local(epochs=1, batch=8)))
    rounds = run(method, make_federation(model), 4)
    assert [next(rounds).t, next(rounds).t] == [1, 2]  # as long as nothing changes
    change(net)
    with pytest.raises(InputError, match=f"changed after the run began .{message}"):
        next(rounds)


def test_another_run_may_go_on_from_there() -> None:
    model, rounds = Model(network()), []
    method = recipes.fedavg(Setting(model, TARGET, Local(epochs=1, batch=8)))
    federation = make_federation(model)
    rounds += run(method, federation, 1)
    fix(model.net)
    rounds += run(method, federation, 2, after=rounds[0])
    first, second = (played.server["params"] for played in rounds)
    moved = {k for k in first if not torch.equal(first[k], second[k])}
    assert moved == first.keys() - {"0.weight"}


def test_rows_that_are_not_contiguous_are_no_state() -> None:
    """Clients are every third row of one table: passes on such views differ in the last bits."""
    x = torch.randn(90, 5, generator=generator(0, "apart"))
    y = torch.arange(90) % 3
    model = build(lambda: Mlp((5,), (16,), 3), seed=0)
    method = recipes.fedavg(Setting(model, target=(1 / 3,) * 3, local=Local(lr=0.1, steps=2)))

    def trained(pack: Any) -> Round:
        clients = [client_data(pack(x[i::3]), y[i::3], i) for i in range(3)]
        federation = Federation(clients, *model.init(), register(clients, 3), Seeds.of(0))
        return list(run(method, federation, 1))[-1]

    apart, packed = trained(lambda rows: rows), trained(torch.Tensor.contiguous)
    assert x[0::3].stride() == (15, 1)
    for name, value in packed.server["params"].items():
        assert torch.equal(value, apart.server["params"][name])


def test_rows_that_the_network_cannot_take(mlp: Model) -> None:
    federation = make_federation(mlp)
    check_rows(mlp, federation, torch.zeros(0, 3), "the target's rows")
    check_rows(mlp, federation, federation.clients[0].x, "the target's rows")
    with pytest.raises(InputError, match="the target's rows: the model fails on inputs"):
        check_rows(mlp, federation, torch.zeros(5, FEATURES + 1), "the target's rows")
