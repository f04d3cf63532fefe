"""A method that wraps another has, and declares, the inner one's capabilities."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from fedshift import recipes
from fedshift.algorithms.ditto import Ditto
from fedshift.algorithms.fedavg import FedAvg
from fedshift.algorithms.finetune import FineTune
from fedshift.algorithms.method import FORWARDED, Method, Wrapper, check_method, is_elementwise
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
from support.every_method import WRAP, Make, disk
from support.extras import afl, fedala, fedas, feddyn, fednova, fedpac, scaffold
from support.federations import SIZES, TARGET, make_clients, make_federation

pytestmark = pytest.mark.routed

ROUTES = 0.8 * CrossEntropy() + 0.2 * ClientEntropy()
# Rounds after which every wrapper has done all that it does: FedDisk's first two train no model.
ROUNDS = 4


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
    make: dict[str, Any] = {"FedAvg": FedAvg, "Scaffold": scaffold}
    return make[kind](setting.model, objective=objective, local=setting.local)


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", ["FedAvg", "Scaffold"])
@pytest.mark.parametrize("name", WRAP)
def test_a_router_inside_is_trained_and_reported(name: str, kind: str, setting: Setting) -> None:
    method = WRAP[name](inner(kind, setting), setting)
    if name == "FineTune at once":  # nothing of the inner method is left
        assert not method.trains_router()
        return
    assert method.trains_router()
    played = final(method, setting)
    assert moved(played, setting) is (name != "FineTune(FedDisk) in its first rounds")
    assert len(routed(method, played)) == sum(SIZES)


@pytest.mark.few(3)
@pytest.mark.parametrize("name", WRAP)
def test_no_router_is_reported_where_none_is_trained(name: str, setting: Setting) -> None:
    """The control of the test above."""
    method = WRAP[name](inner("FedAvg", setting, CrossEntropy()), setting)
    assert not method.trains_router()
    played = final(method, setting)
    assert not moved(played, setting)
    with pytest.raises(InputError, match="has trained no router"):
        routed(method, played)


METHODS: dict[str, Make] = {
    "Afl": lambda s: afl(s.model, objective=ROUTES, local=s.local),
    "FedAla": lambda s: fedala(s.model, objective=ROUTES, local=s.local),
    "FedAs": lambda s: fedas(s.model, objective=ROUTES, local=s.local),
    "FedDyn": lambda s: feddyn(s.model, objective=ROUTES, local=s.local),
    "FedNova": lambda s: fednova(s.model, objective=ROUTES, local=s.local),
    "FedPac": lambda s: fedpac(s.model, objective=ROUTES, fit=s.local, local=s.local),
    "Scaffold I": lambda s: scaffold(s.model, option="I", objective=ROUTES, local=s.local),
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


def test_terms_in_terms_are_seen() -> None:
    assert OwnLabels(ROUTES).trains_router()
    assert (Proximal(0.1) + 0.5 * OwnLabels(ROUTES)).trains_router()
    assert not (OwnLabels(CrossEntropy()) + 0.0 * ROUTES).trains_router()


@dataclass(frozen=True)
class Spy(Method):
    """A method whose answer is the question."""

    model: Any = None

    def __getattribute__(self, name: str) -> Any:
        known = object.__getattribute__(self, name)
        if name.startswith("_") or name in ("at", "model"):
            return known
        return lambda *given: (name, *given)


def test_a_wrapper_passes_every_function_on() -> None:
    """Otherwise the default would answer in place of the inner method."""
    wrapper: Any = Wrapper(Spy())
    for name in FORWARDED:
        count = len(inspect.signature(getattr(Method, name)).parameters) - 1
        assert getattr(wrapper, name)(*range(count)) == (name, *range(count))
    public = {name for name in vars(Method) if not name.startswith("_")}
    assert public - {*FORWARDED} == {"at", "is_elementwise"}


def test_update_of_its_own_is_not_taken_for_elementwise(setting: Setting) -> None:
    plain, ditto = recipes.fedavg(setting), recipes.ditto(setting)
    assert is_elementwise(Wrapper(plain).client_update)
    assert not is_elementwise(ditto.client_update)
    assert not is_elementwise(Wrapper(ditto).client_update)
    assert not is_elementwise(recipes.scaffold(setting).client_update)


class Half(Method):
    """A method without an end."""

    init = weigh = phases = client_update = reveals = print  # type: ignore[assignment]


class Duck:
    """Has the functions, and inherits nothing."""

    client_update = print


@pytest.mark.parametrize(
    ("given", "cure"),
    [(Duck(), "inherit"), (FedAvg, "FedAvg(model)"), (3, "FedAvg(model)"),
     (Half(), "server_update"), (FedAvg.__new__(FedAvg), "Model(net)")],
)  # fmt: skip
def test_what_is_no_method_is_refused_with_a_cure(given: Any, cure: str) -> None:
    with pytest.raises(InputError) as e:
        check_method(given)
    assert cure in str(e.value)


def personal(method: Any, setting: Setting) -> list[tuple[Params, Params]]:
    """What clients serve after the last round, the server's model if it is that."""
    played = final(method, setting)
    server = played.server["params"]
    served = models(method, played, make_federation(setting.model))
    return [pair for pair in served if not all(v is server.get(k) for k, v in pair[0].items())]


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


def test_which_method_sets_the_label_rules(setting: Setting) -> None:
    plain: Any = recipes.fedavg(setting)
    assert plain.label_rules() is None
    assert disk(plain, setting).label_rules() is None
    holders = {"mode": "holders", "tune": "none", "tune_over": None}
    tunes = holders | {"tune": "mse", "tune_over": "all"}
    for name, rules in (
        ("LabelSets holders", holders), ("Ditto(LabelSets)", holders), ("CentralTuning", tunes),
        ("FedDisk(CentralTuning)", tunes), ("CentralTuning(FedDisk)", tunes),
        ("FineTune(CentralTuning)", tunes),
        ("CentralTuning without steps", holders | {"mode": "public"}),
    ):  # fmt: skip
        assert WRAP[name](plain, setting).label_rules() == rules, name
