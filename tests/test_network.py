"""Networks: their layers, their constants, and what they do to their inputs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, weight_norm
from torch.utils.checkpoint import checkpoint

from fedshift import recipes
from fedshift.algorithms.fedavg import FedAvg
from fedshift.client.local import Local, plan_all
from fedshift.client.objectives import CrossEntropy
from fedshift.data import Examples, client_data
from fedshift.engine.backends import Backend, loop
from fedshift.engine.processes.pool import workers
from fedshift.engine.run import Round, run
from fedshift.engine.stacking.stacked import Stacked
from fedshift.errors import InputError, UnfitError
from fedshift.evaluation.scores import score
from fedshift.model import Model, build
from fedshift.models.dense import Mlp
from fedshift.models.lenet import LeNet
from fedshift.outputs import dry_logits
from fedshift.recipes import Setting
from fedshift.router.route import Router
from fedshift.tree import Parts, flatten
from support.federations import CLASSES, FEATURES, TARGET, Normed, make_clients, make_federation
from support.rounds import last
from support.routing import routed_federation, routed_model, routed_setting

LOCAL = Local(epochs=1, batch=8)


def equal(a: Parts, b: Parts) -> bool:
    x, y = flatten(a), flatten(b)
    return x.keys() == y.keys() and all(torch.equal(x[k], y[k]) for k in x)


class Centring(nn.Module):
    """Normalises its inputs first, in place or not; features are seen by a term of MOON."""

    def __init__(self, in_place: bool, hidden: str = "") -> None:
        super().__init__()
        self.in_place, self.hidden = in_place, hidden
        self.body, self.head = nn.Linear(FEATURES, 10), nn.Linear(10, CLASSES)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        if self.hidden == "data":
            x.data.sub_(1.0)
        elif self.hidden == "numpy":
            x.numpy()[:] -= 1.0
        else:
            x = x.sub_(1.0) if self.in_place else x - 1.0
        z = torch.relu(self.body(x))
        return {"features": z, "logits": self.head(z)}


def centring(in_place: bool, hidden: str = "") -> Model:
    return build(lambda: Centring(in_place, hidden), seed=3)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("backend", "hidden"),  # torch itself refuses `x.data` of stacked clients
    [(loop, ""), (loop, "data"), (loop, "numpy"), (Stacked(), "")],
    ids=["loop", "loop, by data", "loop, by numpy", "stacked"],
)
@pytest.mark.parametrize("name", ["moon", "fedsam", "scaffold", "fedas", "afl"])
def test_passes_that_write_into_their_inputs(name: str, backend: Backend, hidden: str) -> None:
    """Each pass gets the original batch, also the passes of loss terms and SAM's second one."""
    results = []
    for in_place in (True, False):
        model = centring(in_place, hidden if in_place else "")
        clients = make_clients()
        before = [c.x.clone() for c in clients]
        algorithm = recipes.recipe(name).make(Setting(model, TARGET, LOCAL))
        played = last(run(algorithm, make_federation(model, clients), 2, backend=backend))
        assert all(torch.equal(c.x, x) for c, x in zip(clients, before, strict=True))
        results.append(played.server)
    assert equal(*results)
    plain = Model(nn.Sequential(nn.Linear(FEATURES, CLASSES)))
    other = Setting(plain, TARGET, LOCAL)
    assert not equal(results[0], last(run(recipes.fedavg(other), make_federation(plain), 1)).server)


@pytest.mark.parametrize("hidden", ["", "data", "numpy"])
def test_what_is_scored_and_routed_stays(hidden: str) -> None:
    model, x = centring(True, hidden), make_clients()[0].x.clone()
    examples = Examples(x.clone(), make_clients()[0].y)
    first = score(model, *model.init(), examples, CLASSES).loss
    assert score(model, *model.init(), examples, CLASSES).loss == first
    assert torch.equal(examples.x, x)
    routed = routed_model()
    routed.net.body[0][0].register_forward_pre_hook(lambda module, given: given[0].mul_(2.0))
    algorithm = recipes.feddrm(routed_setting(routed))
    played = last(run(algorithm, routed_federation(routed), 1))
    router, queries = Router.of(algorithm, played.server, played.states), x.clone()
    before = router.route(queries).probabilities
    assert torch.equal(queries, x)
    assert torch.equal(router.route(queries).probabilities, before)


@contextlib.contextmanager
def ungraded() -> Any:
    torch.set_grad_enabled(False)
    try:
        yield
    finally:
        torch.set_grad_enabled(True)


@pytest.mark.few(2)
@pytest.mark.parametrize("where", [torch.no_grad, torch.inference_mode, ungraded])
@pytest.mark.parametrize("kind", ["loop", "stacked", "dense", "workers"])
def test_it_trains_wherever_it_is_called(where: Callable[[], Any], kind: str) -> None:
    """Also under inference mode; the resulting tensors can be trained further by any caller."""

    def played() -> Round:
        model = build(lambda: Mlp((FEATURES,), (10,), CLASSES), seed=1)
        federation = make_federation(model, tuple(c._replace(w=c.w * 1.0) for c in make_clients()))
        algorithm = recipes.fedavgft(Setting(model, TARGET, LOCAL, rounds=2), tune_rounds=1)
        with contextlib.ExitStack() as stack:
            backend: Backend = loop
            if kind == "workers":
                backend = stack.enter_context(workers(federation.clients, 2))
            elif kind != "loop":
                backend = Stacked(dense=kind == "dense")
            return last(run(algorithm, federation, 2, backend=backend))

    plain = played()
    with where():
        there = played()
    assert equal(plain.server, there.server)
    assert all(equal(plain.states[i], there.states[i]) for i in plain.states)
    made = [*flatten(there.server).values()]
    made += [v for state in there.states.values() for v in flatten(state).values()]
    assert not any(v.is_inference() or v.requires_grad for v in made)


def test_a_generator_leaves_the_modes_of_its_reader() -> None:
    model = build(lambda: Mlp((FEATURES,), (10,), CLASSES), seed=1)
    with torch.no_grad():
        for _ in run(recipes.fedavg(Setting(model, TARGET, LOCAL)), make_federation(model), 2):
            assert not torch.is_grad_enabled()


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(4)
        return nn.Sequential(nn.Linear(FEATURES, 10), nn.ReLU(), nn.Linear(10, CLASSES))


def other_layer(net: Any) -> None:
    net[2] = nn.Linear(10, CLASSES)


def new_parameter(net: Any) -> None:
    net[0].scale = nn.Parameter(torch.ones(10))
    net[0].register_forward_hook(lambda module, given, out: out * module.scale)


def new_buffer(net: Any) -> None:
    net[0].register_buffer("scale", torch.ones(10))


def fix(net: Any) -> None:
    net[0].requires_grad_(False)


CHANGES: list[tuple[Callable[[Any], Any], str]] = [
    (other_layer, ""),
    (new_parameter, '"0.scale" is missing'),
    (new_buffer, '"0.scale" is missing'),
    (lambda net: weight_norm(net[0]), '"0.weight"'),
    (lambda net: parametrizations.weight_norm(net[0]), '"0.weight"'),
]


@pytest.mark.few(2)
@pytest.mark.filterwarnings("ignore:.*weight_norm")
@pytest.mark.parametrize(("change", "at_fault"), CHANGES)
def test_a_network_that_is_changed_after_its_model(
    change: Callable[[Any], Any], at_fault: str
) -> None:
    """As if it had been changed before; tensors that do not fit the new network are refused."""
    model, late = Model(network()), network()
    old = model.init()
    for net in (model.net, late):
        torch.manual_seed(5)
        change(net)
    one, two = (
        last(run(recipes.fedavg(Setting(m, TARGET, LOCAL)), make_federation(m), 2)).server
        for m in (model, Model(late))
    )
    assert equal(one, two)
    x, model = torch.randn(3, FEATURES), Model(network())
    right = model(*old, x)["logits"]
    change(model.net)
    if not at_fault:
        assert torch.equal(model(*old, x)["logits"], right)  # the given ones count, whatever it has
        return
    for call in (model, partial(dry_logits, model)):
        with pytest.raises(InputError, match=at_fault):
            call(*old, x)


def test_what_is_fixed_is_what_is_fixed_when_a_run_begins() -> None:
    model = Model(network())
    federation = make_federation(model)
    fix(model.net)
    after = last(run(recipes.fedavg(Setting(model, TARGET, LOCAL)), federation, 1)).server["params"]
    moved = {k for k in after if not torch.equal(after[k], federation.params[k])}
    assert moved == {"2.weight", "2.bias"}


def test_names_that_are_not_the_networks() -> None:
    model, x = Model(Normed()), torch.randn(3, FEATURES)
    params, buffers = model.init()
    for call in (model.train, model):
        with pytest.raises(InputError, match='"haed.bias"; .*"head.bias"'):
            call({**params, "haed.bias": params["head.bias"]}, buffers, x)
        with pytest.raises(InputError, match='"body.1.running_mean" is missing'):
            call(params, {}, x)
    less = {k: v for k, v in params.items() if k != "head.bias"}
    federation = replace(make_federation(model), params=less)
    with pytest.raises(InputError, match='"head.bias"'):
        next(run(FedAvg(model, local=Local(batch=7)), federation, 1))


@pytest.mark.parametrize(
    "cut",
    [
        lambda z: z.detach(),
        lambda z: torch.tensor(z.tolist()),
        lambda z: nn.functional.one_hot(z.argmax(1), CLASSES).float(),
    ],
    ids=["detached", "by numbers", "argmax"],
)
def test_a_network_that_no_gradient_reaches_is_refused(cut: Any) -> None:
    class Cut(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return cut(super().forward(x))  # type: ignore[no-any-return]

    model = build(lambda: Cut(FEATURES, CLASSES), 0)
    with pytest.raises(InputError, match="cut off from its parameters"):
        run(FedAvg(model), make_federation(model), 1)


class Again(Mlp):
    """A network whose body is checkpointed: computed again in the backward pass."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h: Any = checkpoint(self.body, x, use_reentrant=False)
        return {"logits": self.head(h)}


class Listed(Mlp):
    """A network that reads a weight from a Python list."""

    def __init__(self, *shape: Any) -> None:
        super().__init__(*shape)
        self.weights = [self.head.weight]

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.body(x) @ self.weights[0].T + self.head.bias}


@pytest.mark.parametrize(
    ("kind", "message"),
    [(Again, "again in the backward pass"), (Listed, '"head.weight" by another')],
)
def test_networks_that_use_their_own_weights_are_refused(kind: Any, message: str) -> None:
    model = build(lambda: kind((FEATURES,), (6,), CLASSES), 0)
    with pytest.raises(InputError, match=message):
        run(FedAvg(model), make_federation(model), 1)


def test_models_are_what_they_say() -> None:
    params, _ = (lenet := build(lambda: LeNet(1, 28, 10), 0)).init()
    assert sum(v.numel() for v in params.values()) == 44_426
    out = lenet(params, {}, torch.zeros(2, 1, 28, 28))
    assert (out["features"].shape, out["logits"].shape) == ((2, 84), (2, 10))
    again, other = (build(lambda: LeNet(1, 28, 10), seed).init()[0] for seed in (0, 1))
    assert all(torch.equal(params[k], again[k]) for k in params)
    assert not torch.equal(params["head.weight"], other["head.weight"])
    for make in (lambda: LeNet(1, 12, 10), lambda: Mlp((3,), (0,), 2)):
        with pytest.raises(InputError):
            make()


def test_images_laid_out_by_channels_train_alike_but_for_rounding() -> None:
    model = build(lambda: LeNet(1, 28, CLASSES), 0)
    x = torch.randn(12, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    data, buffers = client_data(x, torch.arange(12) % CLASSES, 0), dict[str, Tensor]()
    params = {k: v.double() for k, v in model.init()[0].items()}
    data = data._replace(x=x.double(), w=data.w.double())
    local = Local(lr=0.05, batch=6)
    plan = plan_all({"t": local}, data, 1, 0, 0)["t"]
    one, two = (
        local(m, CrossEntropy(), params, buffers, {}, data, plan).params
        for m in (model, replace(model, channels_last=True))
    )
    gaps = [float((one[k] - two[k]).abs().max()) for k in params]
    assert 0 < max(gaps) < 1e-10
    flat = Model(nn.Linear(4, 2), channels_last=True)
    with pytest.raises(UnfitError, match="channels-last is for images"):
        flat.prepare(torch.zeros(2, 4), 0)
