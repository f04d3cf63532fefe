"""Parameters of the network that are not to be trained: `requires_grad=False`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedshift import recipes
from fedshift.client.local import Local, plan_all
from fedshift.data import take
from fedshift.engine.backends import Backend, Job, Reply, Stage, loop
from fedshift.engine.run import run
from fedshift.engine.stacking.stacked import Stacked
from fedshift.model import Model, build
from fedshift.models.dense import Mlp
from fedshift.recipes import Setting
from fedshift.tree import Params, Parts
from support.every_method import MAKE, ROUNDS, Make
from support.federations import CLASSES, FEATURES, TARGET, double, make_clients, make_federation
from support.rounds import last
from support.routing import routed_model

FIXED = {"body.0.0.weight", "head.bias"}
CHAIN = {"body.1.weight", "head.bias"}
each = pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)


def fixing(net: nn.Module, names: Iterable[str]) -> Model:
    for name in names:
        net.get_parameter(name).requires_grad_(False)
    return Model(net)


@pytest.fixture
def mlp() -> Model:
    """The network of the contract, partly fixed."""
    return fixing(routed_model().net, FIXED)


def chain(names: Iterable[str] = CHAIN) -> Model:
    return fixing(build(lambda: Mlp((FEATURES,), (10,), CLASSES), seed=1).net, names)


def noting(sent: list[Parts]) -> Backend:
    """The loop, with a check of all replies."""

    def noted(stage: Stage, jobs: Iterable[Job]) -> Iterator[Reply]:
        for reply in loop(stage, jobs):
            sent.append(reply.update)
            yield reply

    return noted


def moved(after: Params, before: Params) -> set[str]:
    return {k for k, v in after.items() if not torch.equal(v, before[k])}


@pytest.mark.few(1)
@each
def test_they_stay_and_are_not_sent(make: Make, setting: Setting, federated: Any) -> None:
    sent: list[Parts] = []
    algorithm, federation = make(setting), federated()
    played = last(run(algorithm, federation, ROUNDS, backend=noting(sent)))
    assert sent
    assert not {name for update in sent for tree in update.values() for name in tree} & FIXED
    models = [algorithm.at(ROUNDS).model_for(played.server, s)[0] for s in played.states.values()]
    for params in (played.server["params"], *models):
        for name in params.keys() & FIXED:
            rows = torch.isfinite(params[name])  # of labels that are not a client's own
            assert torch.equal(params[name][rows], federation.params[name][rows])


def optimised(model: Model, data: Any, plan: Any, params: Params) -> Params:
    """The same batches by torch's own optimiser, which is given what requires a gradient."""
    net = model.loaded(params, {}).double().train()
    trained = [p for p in net.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9, weight_decay=0.1)
    for s in range(plan.steps):
        batch = take(data, plan, s)
        optimizer.zero_grad()
        F.cross_entropy(net(batch.x), batch.y).backward()
        optimizer.step()
    return {k: v.detach() for k, v in net.named_parameters()}


def test_it_is_what_a_torch_optimiser_does() -> None:
    net = nn.Sequential(nn.Linear(FEATURES, 10), nn.ReLU(), nn.Linear(10, CLASSES))
    model = fixing(net, {"0.bias", "2.weight"})
    federation = double(make_federation(model, make_clients(sizes=(37,))))
    local = Local(lr=0.1, epochs=2, batch=8, momentum=0.9, decay=0.1)
    played = last(run(recipes.fedavg(Setting(model, TARGET, local)), federation, 1))
    data, first = federation.clients[0], federation.params
    plan = plan_all({"train0": local}, data, 1, 0, 0)["train0"]
    right, got = optimised(model, data, plan, first), played.server["params"]
    assert moved(got, first) == moved(right, first) == {"0.weight", "2.bias"}
    assert max(float((got[k] - right[k]).abs().max()) for k in got) < 1e-14


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["fedprox", "scaffold", "feddyn", "fedadam"])
@pytest.mark.parametrize("backend", [Stacked(), Stacked(dense=True)], ids=["stacked", "dense"])
def test_stacked_clients_do_as_the_loop(name: str, backend: Backend) -> None:
    setting = Setting(chain(), TARGET, Local(epochs=2, batch=8))
    federation = make_federation(setting.model)
    one = last(run(MAKE[name](setting), federation, 2)).server["params"]
    two = last(run(MAKE[name](setting), federation, 2, backend=backend)).server["params"]
    assert moved(one, federation.params) == one.keys() - CHAIN == moved(two, federation.params)
    assert max(float((one[k] - two[k]).abs().max()) for k in one) < 1e-5


def test_a_reply_that_carries_them_is_refused(setting: Setting, federated: Any) -> None:
    def forging(stage: Stage, jobs: Iterable[Job]) -> Iterator[Reply]:
        for reply in loop(stage, jobs):
            reply.update["delta"]["head.bias"] = torch.zeros(CLASSES)
            yield reply

    with pytest.raises(RuntimeError, match='client 0 sent an update with a different "delta"'):
        last(run(recipes.fedavg(setting), federated(), 1, backend=forging))
