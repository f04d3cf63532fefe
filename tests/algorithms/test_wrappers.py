"""A method that wraps another has, and declares, the inner one's capabilities."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fedshift.algorithms
from fedshift import recipes
from fedshift.algorithms.afl import Afl
from fedshift.algorithms.base import Capabilities, ask
from fedshift.algorithms.ditto import Ditto
from fedshift.algorithms.fedala import FedAla
from fedshift.algorithms.fedas import FedAs
from fedshift.algorithms.fedavg import FedAvg
from fedshift.algorithms.feddyn import FedDyn
from fedshift.algorithms.fednova import FedNova
from fedshift.algorithms.fedpac import FedPac
from fedshift.algorithms.finetune import FineTune
from fedshift.algorithms.labelsets import LabelSets
from fedshift.algorithms.local_only import LocalOnly
from fedshift.algorithms.scaffold import Scaffold
from fedshift.client.local import Local
from fedshift.client.objectives import CrossEntropy, Proximal, Term
from fedshift.client.origin import ClientEntropy
from fedshift.client.slots import OwnLabels
from fedshift.engine.run import Round, run, start
from fedshift.errors import InputError
from fedshift.experiments.measures.served import models
from fedshift.model import Model
from fedshift.recipes import Setting
from fedshift.router.route import Router
from fedshift.tree import Params, Parts
from support.every_method import WRAP, Make, disk, tuned
from support.federations import SIZES, TARGET, make_clients, make_federation
from support.routing import routed_model

pytestmark = pytest.mark.routed

ROUTES = 0.8 * CrossEntropy() + 0.2 * ClientEntropy()
# Rounds after which every wrapper has done all that it does: FedDisk's first two train no model.
ROUNDS = 4
ALL = [name for name in dir(Capabilities) if not name.startswith("_")]


@pytest.fixture
def setting(mlp: Model) -> Setting:
    """Three local steps."""
    return Setting(mlp, TARGET, Local(lr=0.1, epochs=None, steps=3, batch=16))


def final(method: Any, setting: Setting, rounds: int = ROUNDS) -> Round:
    return list(run(method, make_federation(setting.model), rounds))[-1]


def moved(played: Round, setting: Setting) -> bool:
    """Whether the router's branch has changed."""
    first, _ = setting.model.init()
    router = {k: v for k, v in played.server["params"].items() if k.startswith("router.")}
    assert router
    return not all(torch.equal(v, first[k]) for k, v in router.items())


def routed(method: Any, played: Round) -> Tensor:
    """The clients that a method's router chooses for all clients' inputs."""
    router = Router.of(method, played.server, played.states)
    return router.route(torch.cat([c.x for c in make_clients()])).clients[:, 0]


def inner(kind: str, setting: Setting, objective: Term = ROUTES) -> Any:
    make: dict[str, Any] = {"FedAvg": FedAvg, "Scaffold": Scaffold}
    return make[kind](setting.model, objective=objective, local=setting.local)


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", ["FedAvg", "Scaffold"])
@pytest.mark.parametrize("name", WRAP)
def test_a_router_inside_is_trained_and_reported(name: str, kind: str, setting: Setting) -> None:
    method = WRAP[name](inner(kind, setting), setting)
    if name == "FineTune at once":  # nothing of the inner method is left
        assert not ask(method, Capabilities.trains_router)
        return
    assert ask(method, Capabilities.trains_router)
    played = final(method, setting)
    assert moved(played, setting) is (name != "FineTune(FedDisk) in its first rounds")
    assert len(routed(method, played)) == sum(SIZES)


@pytest.mark.few(3)
@pytest.mark.parametrize("name", WRAP)
def test_no_router_is_reported_where_none_is_trained(name: str, setting: Setting) -> None:
    """The control of the test above."""
    method = WRAP[name](inner("FedAvg", setting, CrossEntropy()), setting)
    assert not ask(method, Capabilities.trains_router)
    played = final(method, setting)
    assert not moved(played, setting)
    with pytest.raises(InputError, match="has trained no router"):
        routed(method, played)


@pytest.mark.few(7)
@pytest.mark.parametrize("name", [name for name in WRAP if name != "FineTune at once"])
def test_a_network_without_a_branch_is_refused_before_round_1(name: str, setting: Setting) -> None:
    narrow = replace(setting, model=routed_model(len(SIZES) - 1))
    method = WRAP[name](inner("FedAvg", narrow), narrow)
    with pytest.raises(InputError, match="build the network with one column per client, 6"):
        final(method, narrow)


METHODS: dict[str, Make] = {
    "Afl": lambda s: Afl(s.model, objective=ROUTES, local=s.local),
    "FedAla": lambda s: FedAla(s.model, objective=ROUTES, local=s.local),
    "FedAs": lambda s: FedAs(s.model, objective=ROUTES, local=s.local),
    "FedDyn": lambda s: FedDyn(s.model, objective=ROUTES, local=s.local),
    "FedNova": lambda s: FedNova(s.model, objective=ROUTES, local=s.local),
    "FedPac": lambda s: FedPac(s.model, objective=ROUTES, fit=s.local, local=s.local),
    "Scaffold I": lambda s: Scaffold(s.model, option="I", objective=ROUTES, local=s.local),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", METHODS)
def test_every_method_can_train_a_router(name: str, setting: Setting) -> None:
    """Its clients are sent the cohort, and the router is better than at first."""
    method, federation = METHODS[name](setting), make_federation(setting.model)
    played = list(run(method, federation, 8, cohort=5))[-1]
    assert moved(played, setting)
    first = start(method, federation).server
    assert surprise(method, played.server, played) < surprise(method, first, played) - 0.01


def surprise(method: Any, server: Parts, played: Round) -> float:
    """Mean -log P(client | x) of the clients that examples come from, in nats."""
    router = Router.of(method, server, played.states)
    z = router.logits(torch.cat([c.x for c in make_clients()]))
    origin = torch.repeat_interleave(torch.arange(len(SIZES)), torch.tensor(SIZES))
    return float(torch.nn.functional.cross_entropy(z, origin))


@pytest.mark.parametrize(
    "make",
    [
        lambda s: LocalOnly(s.model, ROUTES, s.local),
        lambda s: Ditto(recipes.fedavg(s), 1.0, s.local, ROUTES),
        lambda s: FineTune(recipes.fedavg(s), 1, s.local, ROUTES),
    ],
)
def test_models_of_ones_own_learn_no_router(make: Make, setting: Setting) -> None:
    with pytest.raises(InputError, match="a model of their own are not sent the cohort: put "):
        make(setting)


def test_terms_in_terms_are_seen() -> None:
    assert OwnLabels(ROUTES).trains_router()
    assert (Proximal(0.1) + 0.5 * OwnLabels(ROUTES)).trains_router()
    assert not (OwnLabels(CrossEntropy()) + 0.0 * ROUTES).trains_router()


@dataclass(frozen=True)
class Ours:
    """A user's method, which inherits from nothing and declares only what is required."""

    method: Any

    def __getattr__(self, name: str) -> Any:
        if name in ALL or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.method, name)


def test_a_method_that_says_nothing_has_the_defaults(setting: Setting) -> None:
    """It runs with its replies stacked, and the numbers are those of sums."""
    method, ours = recipes.fedavg(setting), Ours(recipes.fedavg(setting))
    assert [ask(ours, Capabilities.trains_router), ask(ours, Capabilities.moves_server)] == [
        False, True,
    ]  # fmt: skip
    assert ask(ours, Capabilities.sums, {}, {"weight": torch.ones(2)}) == {}
    assert ask(method, Capabilities.sums, {}, {"weight": torch.ones(2)}).keys() >= {"delta"}
    a, b = final(method, setting).server["params"], final(ours, setting).server["params"]
    assert all(torch.equal(a[k], b[k]) for k in a)
    with pytest.raises(InputError, match="this Ours has trained no router"):
        Router.of(ours, final(ours, setting).server, final(ours, setting).states)
    wrapped = Ditto(Ours(inner("FedAvg", setting)), 1.0, setting.local)  # type: ignore[arg-type]
    assert not ask(wrapped, Capabilities.trains_router)


def test_a_wrapper_answers_every_capability() -> None:
    """Otherwise the default would answer in place of the inner method."""
    places = sorted(Path(fedshift.algorithms.__path__[0]).glob("[a-z]*.py"))
    modules = (import_module(f"fedshift.algorithms.{place.stem}") for place in places)
    kinds = {k for m in modules for _, k in inspect.getmembers(m, inspect.isclass)}
    wrappers = [
        k for k in kinds
        if hasattr(k, "__dataclass_fields__") and "inner" in {f.name for f in fields(k)}
    ]  # fmt: skip
    assert {k.__name__ for k in wrappers} == {
        "Around", "Ditto", "LabelSets", "CentralTuning", "FedDisk", "FineTune", "Before", "Ccvr",
        "LabelWeights", "SoFar",
    }  # fmt: skip
    # `is_elementwise` is of a class's own `client_update`, not of the inner method's.
    names = set(ALL) - {"is_elementwise"}
    assert [(k.__name__, name) for k in wrappers for name in names if not hasattr(k, name)] == []


def personal(method: Any, setting: Setting) -> list[tuple[Params, Params]]:
    """What clients serve after the last round, the server's model if it is that."""
    played = final(method, setting)
    server = played.server["params"]
    served = models(method, played, make_federation(setting.model))
    return [pair for pair in served if not all(v is server.get(k) for k, v in pair[0].items())]


def of_state(played: Round, part: str) -> Mapping[int, Params]:
    return {i: state[part] for i, state in played.states.items()}


PERSONAL = {
    "Ditto": lambda s: Ditto(recipes.fedavg(s), 1.0, s.local),
    "FedPer": recipes.fedper,
    "FedALA": recipes.fedala,
    "FedPAC": recipes.fedpac,
    "FedAS": recipes.fedas,
    "LocalOnly": recipes.local_only,
}
AROUND = {
    "FedDisk": disk,
    "FineTune": lambda m, s: FineTune(m, 2, s.local),
    "FineTune(FedDisk)": lambda m, s: FineTune(disk(m, s), 3, s.local),
    "FedDisk(FineTune)": lambda m, s: disk(FineTune(m, 1, s.local), s),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("name", PERSONAL)
def test_personal_models_inside_are_served(name: str, around: str, setting: Setting) -> None:
    made = AROUND[around](PERSONAL[name](setting), setting)  # type: ignore[no-untyped-call]
    served = personal(made, setting)
    assert len(served) == len(SIZES)
    assert not torch.equal(served[0][0]["head.weight"], served[1][0]["head.weight"])


@pytest.mark.slow
def test_label_sets_serve_the_personal_models_of_ditto(setting: Setting) -> None:
    method = Ditto(recipes.fedavg(setting), 1.0, setting.local)
    for wrapped in (LabelSets(method, "holders"), tuned(method, setting)):
        played = final(wrapped, setting)
        served = models(wrapped, played, make_federation(setting.model))
        assert all(served[i][0] is model for i, model in of_state(played, "personal").items())
    # The control: one model for all is the server's.
    assert personal(tuned(recipes.fedavg(setting), setting), setting) == []
    assert personal(disk(recipes.fedavg(setting), setting), setting) == []


def test_which_method_sets_the_label_rules(setting: Setting) -> None:
    plain: Any = recipes.fedavg(setting)
    assert ask(plain, Capabilities.label_rules) is None
    assert ask(disk(plain, setting), Capabilities.label_rules) is None
    holders = {"mode": "holders", "tune": "none", "tune_over": None}
    tunes = holders | {"tune": "mse", "tune_over": "all"}
    for name, rules in (
        ("LabelSets holders", holders), ("Ditto(LabelSets)", holders), ("CentralTuning", tunes),
        ("FedDisk(CentralTuning)", tunes), ("CentralTuning(FedDisk)", tunes),
        ("FineTune(CentralTuning)", tunes),
        ("CentralTuning without steps", holders | {"mode": "public"}),
    ):  # fmt: skip
        assert ask(WRAP[name](plain, setting), Capabilities.label_rules) == rules, name


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m, s: Ditto(FineTune(m, 1)), "FineTune moves none; put Ditto inside, as FineTune"),
        (lambda m, s: Ditto(LocalOnly(m.model)), "LocalOnly moves none"),
        (lambda m, s: Ditto(disk(FineTune(m, 1), s)), "FedDisk moves none"),
        (lambda m, s: Ditto(LabelSets(m)), r"another order|give LabelSets\(Ditto\(...\)\)"),
        (lambda m, s: Ditto(tuned(m, s, "private")), r"give LabelSets\(Ditto\(...\)\)"),
        (lambda m, s: FineTune(LabelSets(m), 1), 'give LabelSets mode="holders" or "public"'),
    ],
)
def test_wrappers_that_do_not_fit_are_refused(make: Any, message: str, setting: Setting) -> None:
    with pytest.raises(InputError, match=message):
        make(recipes.fedavg(setting), setting)
