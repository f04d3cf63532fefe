"""A network is what it says it is: its layers, its constants, what it does to its inputs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CLASSES, FEATURES, TARGET, Normed, make_clients, make_federation
from routing import routed_federation, routed_model, routed_setting
from torch import Tensor, nn
from torch.nn.utils import parametrizations, weight_norm

from fedshift import recipes
from fedshift.algorithms.ditto import Ditto
from fedshift.algorithms.fedavg import FedAvg
from fedshift.algorithms.local_only import LocalOnly
from fedshift.client.local import Local
from fedshift.client.objectives import Contrastive, CrossEntropy, Proximal
from fedshift.client.sharing import Share
from fedshift.data import Examples
from fedshift.engine.backends import Backend, loop
from fedshift.engine.checkpoint import read_checkpoint, write_checkpoint
from fedshift.engine.evaluate import score
from fedshift.engine.rounds import Round, run
from fedshift.engine.stacked import Stacked
from fedshift.engine.workers import workers
from fedshift.errors import DivergedError, InputError
from fedshift.model import Model, build, dry_logits
from fedshift.models.dense import Mlp
from fedshift.recipes import Setting
from fedshift.router.route import Router
from fedshift.tree import Parts, flatten

LOCAL = Local(epochs=1, batch=8)


def last(rounds: Iterable[Round]) -> Round:
    return list(rounds)[-1]


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
        else:
            x = x.sub_(1.0) if self.in_place else x - 1.0
        z = torch.relu(self.body(x))
        return {"features": z, "logits": self.head(z)}


def centring(in_place: bool, hidden: str = "") -> Model:
    return build(lambda: Centring(in_place, hidden), seed=3)


@pytest.mark.parametrize("hidden", ["", "data"])
@pytest.mark.parametrize("backend", [loop, Stacked()], ids=["loop", "stacked"])
@pytest.mark.parametrize("name", ["moon", "fedsam", "scaffold", "fedas", "afl"])
def test_passes_that_write_into_their_inputs(name: str, backend: Backend, hidden: str) -> None:
    """Each pass sees the batch as it is, the terms' own and the second one of SAM too."""
    if hidden and backend is not loop:
        pytest.skip("torch refuses it itself")
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


def test_what_is_scored_and_routed_stays() -> None:
    model, x = centring(True), make_clients()[0].x.clone()
    examples = Examples(x.clone(), make_clients()[0].y)
    first = score(model, *model.init(), examples, CLASSES).loss
    assert score(model, *model.init(), examples, CLASSES).loss == first
    assert torch.equal(examples.x, x)
    routed = routed_model()
    routed.net.body[0][0].register_forward_pre_hook(lambda module, given: given[0].mul_(2.0))
    algorithm = recipes.feddrm(routed_setting(routed))
    played = last(run(algorithm, routed_federation(routed), 1))
    router, queries = Router.of(algorithm, played.server, played.states), x.clone()
    told = router.route(queries).probabilities
    assert torch.equal(queries, x)
    assert torch.equal(router.route(queries).probabilities, told)


def test_a_pass_that_writes_now_and_then_is_refused() -> None:
    class Sometimes(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.sub_(1.0) if len(x) > 5 else x)

    model = Model(Sometimes(FEATURES, CLASSES))
    first = model.init()
    model(*first, torch.randn(2, FEATURES))
    with pytest.raises(InputError, match=r"writes into its inputs.* begin with x = x.clone\(\)"):
        model(*first, torch.randn(9, FEATURES))


@contextlib.contextmanager
def ungraded() -> Any:
    torch.set_grad_enabled(False)
    try:
        yield
    finally:
        torch.set_grad_enabled(True)


@pytest.mark.parametrize("where", [torch.no_grad, torch.inference_mode, ungraded])
@pytest.mark.parametrize("kind", ["loop", "stacked", "dense", "workers"])
def test_it_trains_wherever_it_is_called(where: Callable[[], Any], kind: str) -> None:
    """All that is made there, too, and what leaves can be trained on by whoever has it."""

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
    (new_parameter, '"0.scale" is missing among the parameters and buffers given'),
    (new_buffer, '"0.scale" is missing among the parameters and buffers given'),
    (
        lambda net: weight_norm(net[0]),
        'no parameter or buffer "0.weight"; it has 0.bias',
    ),
    (lambda net: parametrizations.weight_norm(net[0]), 'no parameter or buffer "0.weight"; it has'),
]


@pytest.mark.filterwarnings("ignore:.*weight_norm")
@pytest.mark.parametrize(("change", "message"), CHANGES)
def test_a_network_that_is_changed_after_its_model(
    change: Callable[[Any], Any], message: str
) -> None:
    """As if it had been so before; tensors of the old one are refused where they do not fit."""
    model, late = Model(network()), network()
    old = model.init()
    torch.manual_seed(5)
    change(model.net)
    torch.manual_seed(5)
    change(late)
    one, two = (
        last(run(recipes.fedavg(Setting(m, TARGET, LOCAL)), make_federation(m), 2)).server
        for m in (model, Model(late))
    )
    assert equal(one, two)
    x, model = torch.randn(3, FEATURES), Model(network())
    right = model(*old, x)["logits"]
    change(model.net)
    if not message:
        assert torch.equal(model(*old, x)["logits"], right)  # the given ones count, whatever it has
        return
    with pytest.raises(InputError, match=message):
        model(*old, x)
    with pytest.raises(InputError, match=message):
        dry_logits(model, *old, x)


def test_what_is_fixed_is_what_is_fixed_when_a_run_begins() -> None:
    model = Model(network())
    federation = make_federation(model)
    fix(model.net)
    after = last(run(recipes.fedavg(Setting(model, TARGET, LOCAL)), federation, 1)).server["params"]
    moved = {k for k in after if not torch.equal(after[k], federation.params[k])}
    assert moved == {"2.weight", "2.bias"}


def test_names_that_are_not_the_networks() -> None:
    model = Model(Normed())
    params, buffers = model.init()
    x = torch.randn(3, FEATURES)
    for training in (False, True):
        call = model.train if training else model
        with pytest.raises(InputError, match='no parameter or buffer "haed.bias"; .*"head.bias"'):
            call({**params, "haed.bias": params["head.bias"]}, buffers, x)
    with pytest.raises(InputError, match='"body.1.running_mean" is missing among'):
        model(params, {}, x)
    less = {k: v for k, v in params.items() if k != "head.bias"}
    federation = replace(make_federation(model), params=less)
    with pytest.raises(InputError, match='"head.bias" is missing among'):
        next(run(FedAvg(model, local=Local(batch=7)), federation, 1))


MASK = torch.triu(torch.full((4, 4), -torch.inf), 1)
CONSTANTS = {
    "mask": MASK,
    "nan": torch.tensor([torch.nan, 1.0]),
    "whole": torch.tensor([-1, 2]),
    "large": torch.tensor(2**63 - 1),
    "complex": torch.polar(torch.ones(4), torch.arange(4.0)),
    "bool": torch.tensor([True, False]),
    "uint8": torch.tensor([250], dtype=torch.uint8),
    "uint16": torch.tensor([65535], dtype=torch.uint16),
    "uint64": torch.tensor([7], dtype=torch.uint64),
    "float16": torch.tensor([0.1], dtype=torch.float16),
}


UNSIGNED, TO_PROCESSES = ("uint16", "uint64"), ("workers", "shares")


class Holding(nn.Module):
    """With constants of all kinds."""

    def __init__(self, constants: dict[str, Tensor]) -> None:
        super().__init__()
        self.head = nn.Linear(FEATURES, CLASSES)
        for name, v in constants.items():
            self.register_buffer(name, v.clone())

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)  # type: ignore[no-any-return]


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.numpy().tobytes() == b.numpy().tobytes()


METHODS: dict[str, Callable[[Model], Any]] = {
    "fedavg": lambda m: FedAvg(m, local=LOCAL),
    "private": lambda m: FedAvg(m, local=LOCAL, share=Share(tuple(CONSTANTS))),
    "local": lambda m: LocalOnly(m, local=LOCAL),
    "ditto": lambda m: Ditto(FedAvg(m, local=LOCAL), personal=LOCAL),
}


@pytest.mark.parametrize("name", METHODS)
def test_constants_pass(name: str, tmp_path: Path) -> None:
    model = build(lambda: Holding(CONSTANTS), seed=0)
    algorithm, federation = METHODS[name](model), make_federation(model)
    played = last(run(algorithm, federation, 2))
    served = algorithm.model_for(played.server, played.states[0])[1]
    assert all(same(served[k], v) for k, v in CONSTANTS.items())
    write_checkpoint(tmp_path, last(run(algorithm, federation, 1)), {})
    saved = read_checkpoint(tmp_path)
    assert saved is not None
    after = last(run(algorithm, federation, 2, after=saved.round))
    pairs = zip(flatten(played.server).values(), flatten(after.server).values(), strict=True)
    assert all(same(a, b) for a, b in pairs)


@pytest.mark.parametrize("kind", ["stacked", "workers", "shares", "flower"])
def test_constants_pass_everywhere(kind: str) -> None:
    # torch writes unsigned numbers of more than a byte, and cannot read them again.
    own = {k: v for k, v in CONSTANTS.items() if kind not in TO_PROCESSES or k not in UNSIGNED}
    model = build(lambda: Holding(own), seed=0)
    algorithm, federation = METHODS["fedavg"](model), make_federation(model)
    if kind == "flower":
        pytest.importorskip("flwr", reason="Flower is not installed (extra flower)")
        from flower_runs import on_flower

        played = on_flower(algorithm, federation, 2)
    elif kind == "stacked":
        played = last(run(algorithm, federation, 2, backend=Stacked()))
    else:
        with workers(federation.clients, 2) as team:
            backend = team.blocks(Stacked()) if kind == "shares" else team
            played = last(run(algorithm, federation, 2, backend=backend))
    assert all(same(played.server["buffers"][k], v) for k, v in own.items())


@pytest.mark.parametrize("into", [torch.nan, torch.inf, -torch.inf])
def test_a_buffer_that_training_spoils_is_refused(into: float) -> None:
    class Spoiling(Holding):
        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.mask.fill_(into)
            return super().forward(x)

    model = build(lambda: Spoiling({"mask": MASK}), seed=0)
    for method in (METHODS["fedavg"], METHODS["local"]):
        with pytest.raises(DivergedError, match=r'non-finite numbers in ".*buffers/mask"'):
            next(run(method(model), make_federation(model), 1))


def test_sums_of_complex_numbers_keep_both_parts() -> None:
    class Turning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.turn = nn.Parameter(torch.polar(torch.ones(FEATURES), torch.ones(FEATURES)))
            self.head = nn.Linear(FEATURES, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.head((x * self.turn).real + (x * self.turn).imag)  # type: ignore[no-any-return]

    model = build(Turning, seed=0)
    federation = make_federation(model)
    algorithm = FedAvg(model, local=LOCAL)
    sent: dict[int, Tensor] = {}

    def noted(update: Any, jobs: Any) -> Any:
        for reply in loop(update, jobs):
            sent[reply.client] = reply.update["delta"]["turn"].clone()
            yield reply

    after = last(run(algorithm, federation, 1, backend=noted)).server["params"]["turn"]
    n = federation.table["n"] / federation.table["n"].sum()
    mean = sum(float(n[i]) * sent[i].to(torch.complex128) for i in sent)
    assert float((after - federation.params["turn"] - mean).abs().max()) < 1e-6
    assert float(mean.imag.abs().max()) > 1e-3  # type: ignore[union-attr]


class Tied(nn.Module):
    """One matrix in two places, and a scale that no state dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(FEATURES, FEATURES, bias=False)
        self.b = nn.Linear(FEATURES, FEATURES, bias=False)
        self.b.weight = self.a.weight
        self.norm = nn.BatchNorm1d(FEATURES)
        self.head = nn.Linear(FEATURES, CLASSES)
        self.register_buffer("scale", torch.ones(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.scale.mul_(1.5)  # type: ignore[operator]
        return self.head(self.norm(self.b(torch.relu(self.a(x)))) * self.scale)  # type: ignore


@pytest.mark.filterwarnings("ignore:.*weight_norm")
@pytest.mark.parametrize(
    "make",
    [
        Tied,
        Normed,
        lambda: nn.Sequential(weight_norm(nn.Linear(FEATURES, 8)), nn.Linear(8, CLASSES)),
        lambda: nn.Sequential(
            parametrizations.spectral_norm(nn.Linear(FEATURES, 8)), nn.Linear(8, CLASSES)
        ),
    ],
)
def test_the_trained_network_loads(make: Callable[[], nn.Module]) -> None:
    model = build(make, seed=0)
    server = last(run(FedAvg(model, local=Local(batch=7)), make_federation(model), 2)).server
    net, x = model.loaded(server["params"], server["buffers"]), make_clients()[1].x
    out = net(x)
    logits = out["logits"] if isinstance(out, dict) else out
    given = model(server["params"], server["buffers"], x)["logits"]
    assert torch.allclose(logits, given, atol=1e-6)
    assert not torch.allclose(given, model(*model.init(), x)["logits"], atol=1e-2)
    assert not net.training
    assert all(torch.equal(server["params"][k], v) for k, v in net.named_parameters())
    assert all(torch.equal(server["buffers"][k], v) for k, v in net.named_buffers())


def test_what_does_not_fit_is_not_loaded() -> None:
    model = Model(Normed())
    params, buffers = model.init()
    with pytest.raises(InputError, match=r'"head.bias" is \(2,\), the network\'s \(5,\)'):
        model.loaded({**params, "head.bias": torch.zeros(2)}, buffers)
    with pytest.raises(InputError, match='"body.1.running_mean" is missing'):
        model.loaded(params, {})


@pytest.mark.parametrize(
    "make",
    [
        lambda m: FedAvg(m, objective=Proximal(0.1)),
        lambda m: FedAvg(m, objective=2.0 * (Proximal(0.1) + Proximal(0.2))),
        lambda m: FedAvg(m, objective=0.0 * CrossEntropy() + Proximal(0.1)),
        lambda m: Ditto(FedAvg(m), objective=Proximal(0.1)),
        lambda m: Ditto(FedAvg(m, objective=Proximal(0.1))),
    ],
)
def test_an_objective_without_a_loss_is_refused(make: Callable[[Model], Any], mlp: Model) -> None:
    with pytest.raises(InputError, match=r"does not depend on the clients' examples.*CrossEntropy"):
        next(run(make(mlp), make_federation(mlp), 1))


def test_an_objective_with_one_is_let_through(mlp: Model) -> None:
    objective = CrossEntropy() + 0.5 * Proximal(0.1)
    next(run(FedAvg(mlp, objective=objective), make_federation(mlp), 1))
    assert Contrastive().reads_data()
    assert partial(Proximal, 0.1)().reads_data() is False
