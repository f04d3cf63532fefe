"""What a router refuses: each call, with a word of the message that names what is at fault."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedshift import recipes
from fedshift.algorithms.fedavg import FedAvg
from fedshift.algorithms.finetune import FineTune
from fedshift.algorithms.local_only import LocalOnly
from fedshift.algorithms.method import Method
from fedshift.client.local import Local
from fedshift.client.objectives import CrossEntropy, Proximal, Term
from fedshift.client.origin import ClientEntropy
from fedshift.client.sharing import Share
from fedshift.engine.run import run
from fedshift.errors import InputError, TrainingError
from fedshift.model import Model, build
from fedshift.models.lenet_gn import SMALL, lenet_gn
from fedshift.recipes import Setting
from fedshift.router import quality
from fedshift.router.moments import moments, pooled
from fedshift.router.route import Router
from fedshift.router.score import estimate_prior, scores
from support.by_hand import final, max_difference
from support.federations import CLASSES, FEATURES, SIZES, TARGET, make_clients, make_federation
from support.routing import drawn, refit_locally, routed_federation, routed_model, routed_setting

N = len(SIZES)
MODEL = routed_model()
NAN, INF = float("nan"), float("inf")
X, Z = torch.zeros(4, FEATURES), drawn((4, 3))


def refused(call: Callable[[], Any], *words: str, kind: type[Exception] = InputError) -> None:
    with pytest.raises(kind) as error:
        call()
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(
    ("x", "word"),
    [
        (X[:, :3], "(4, 3)"), (X.double(), "x.to(torch.float32)"),
        (X.to(torch.uint8), "x.to(torch.float32)"), (X[0], "give x[None]"),
        (X[None], "it gives logits (1, 4, 5)"), (X.numpy(), "ndarray"), (X.tolist(), "list"),
        (torch.tensor(1.0), "single number"), (X[:0], "no queries"),
        (X.masked_fill(torch.arange(4)[:, None] == 2, NAN), "query 2 holds NaN"),
        (X + torch.tensor(INF), "query 0 holds NaN or infinity"),
    ],
)  # fmt: skip
def test_queries_that_cannot_be_read(router: Router, x: Any, word: str) -> None:
    for ask in (router.route, router.predict, router.logits, router.features, router.scores):
        refused(lambda ask=ask: ask(x), word)


def test_images_that_cannot_be_read() -> None:
    model = build(lambda: lenet_gn(1, 28, 3, clients=2, widths=SMALL), seed=0)
    pair = model.init()
    router = Router(model, pair, {0: pair, 1: pair}, torch.ones(2))
    assert router.route(torch.zeros(2, 1, 28, 28)).clients.shape == (2, 1)
    for x, word in (
        (torch.zeros(2, 3, 28, 28), "(2, 3, 28, 28)"), (torch.zeros(1, 28, 28), "x[None]"),
    ):  # fmt: skip
        refused(lambda x=x: router.predict(x), word)


def test_a_query_whose_logits_overflow(router: Router, queries: Tensor) -> None:
    params = {k: v * 1e30 if k == "router.head.weight" else v for k, v in router.shared[0].items()}
    wild = replace(router, shared=(params, {}))
    assert len(wild.route(queries).clients) == len(queries)
    params["router.head.weight"][2, 0] = INF
    refused(lambda: wild.route(queries), "the client logits are not finite")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"k": 1.5}, "k got 1.5"), ({"k": True}, "k got True"), ({"k": 7}, "k = 7 of 6"),
        ({"k": 0}, "k = 0"), ({"prior": [0.5, 0.5]}, "prior (2,) 6"),
        ({"prior": {"a": 1}}, "prior per client"), ({"prior": "densty"}, "prior density"),
        ({"min_posterior": True}, "min_posterior True"), ({"min_posterior": 2.0}, "0 to 1"),
        ({"min_posterior": "0.5"}, "min_posterior '0.5'"), ({"max_novelty": -3.0}, "-3.0"),
        ({"max_novelty": NAN}, "max_novelty nan"), ({"max_novelty": 1.0}, "with_moments"),
    ],
)  # fmt: skip
def test_wrong_questions(router: Router, queries: Tensor, given: Any, words: str) -> None:
    refused(lambda: router.route(queries, **given), *words.split())


@pytest.mark.parametrize("client", [6, -1, True, 1.0, "1", None, [1, 2]])
def test_clients_that_are_none_cannot_leave(router: Router, client: Any) -> None:
    refused(lambda: router.without(client), "cannot be routed to")
    assert router.without(np.int64(1)).clients == [0, 2, 3, 4, 5]


def test_other_arguments(router: Router, queries: Tensor) -> None:
    clients, flat = make_clients(), [moments(torch.ones(5, 2)), moments(torch.ones(4, 2) * 2)]
    single, third = make_clients(sizes=(1,) * N), torch.tensor([0.0, 0.0, 1.0])
    x = [c.x for c in clients]
    for call, *words in (
        (lambda: scores(Z, torch.ones(2)), "(4, 3)", "(2,)"),
        (lambda: scores(Z, torch.zeros(3)), "sizes", "[0, 0, 0]"),
        (lambda: scores(Z, torch.tensor([1.0, 1.0, 0.0]), third), "[0, 1]"),
        (lambda: scores(Z, torch.ones(3), [0.5] * 3), "sum to 1"),
        (lambda: estimate_prior(Z[:0], torch.ones(3)), "no queries"),
        (lambda: router.predict(queries, "sfot"), "mode", "hard"),
        (lambda: router.refitted(clients[:2]), "2 clients", "6"),
        (lambda: router.refitted(clients[::-1]), "[5, 4, 3, 2, 1, 0"),
        (lambda: router.refitted([*clients[:-1], clients[0]]), "[0, 1, 2, 3, 4, 0]"),
        (lambda: router.refitted(single), "fresh="),
        (lambda: router.refitted(clients, fresh=x[:2]), "2 clients"),
        (lambda: router.refitted(clients, fresh=[x[0][:, :3], *x[1:]]), "(8,)"),
        (lambda: router.from_moments(clients, fresh=[v[:0] for v in x]), "held-out example"),
        (lambda: router.refitted(clients, tolerance=NAN), "tolerance=nan"),
        (lambda: router.refitted(clients, rounds=0), "rounds=0"),
        (lambda: router.without(3).without(3), "client 3"),
        (lambda: replace(router, sizes=torch.eye(N)[2]).without(2), "last one"),
        (lambda: replace(router, prior=torch.eye(N)[3]).without(3), "0 for every client"),
        (lambda: pooled(flat), "loading=0.01"), (lambda: pooled(flat, -0.1), "loading", "-0.1"),
        (lambda: pooled([moments(torch.zeros(0, 2))]), "no client has examples"),
        (lambda: refit_locally([Z.double()], penalty=-1.0), "penalty", "-1"),
    ):  # fmt: skip
        refused(call, *words)
    refused(lambda: router.refitted(clients, rounds=5), "rounds=5", kind=TrainingError)


@pytest.mark.parametrize(
    ("measure", "given", "origin", "word"),
    [
        (quality.calibration_error, 3 * torch.eye(2), torch.tensor([0, 1]), "beyond 0 to 1"),
        (quality.brier, torch.eye(2), torch.tensor([0, 2]), "origin holds 2"),
        (quality.brier, torch.eye(2), torch.tensor([0, -1]), "origin holds -1"),
        (quality.brier, torch.eye(3), torch.tensor([0, 1]), "(2,)"),
        (quality.calibration_error, torch.ones(2), torch.tensor([0, 1]), "(2,)"),
        (quality.calibration_error, [[1.0, 0.0]], torch.tensor([0]), "a list"),
        (quality.calibration_error, torch.eye(2), [0, 1], "origin is a list"),
        (quality.client_accuracy, torch.zeros(0), torch.zeros(0), "0 queries"),
        (quality.threshold, torch.ones(3), 1.1, "coverage 1.1"),
        (quality.threshold, torch.ones(3), 0.0, "coverage 0.0"),
        (quality.threshold, torch.ones(0), 0.5, "0 queries"),
        (quality.threshold, torch.ones(2, 2), 0.5, "(2, 2)"),
        (quality.threshold, torch.tensor([NAN]), 0.5, "confidence[0] is NaN"),
    ],
)
def test_what_cannot_be_measured(measure: Any, given: Any, origin: Any, word: str) -> None:
    refused(lambda: measure(given, origin), word)
    rounded = torch.tensor([[1.0, -1e-9], [0.5, 0.5]])
    assert quality.brier(rounded, torch.tensor([0, 0])) == pytest.approx(0.25)


def test_methods_that_train_no_router(queries: Tensor) -> None:
    setting, plain = routed_setting(MODEL), routed_setting(routed_model(None))
    methods: list[tuple[Method, Model]] = [
        (recipes.fedavg(setting), MODEL), (recipes.fedper(plain), plain.model),
        (recipes.feddrm(setting, lam=1.0), MODEL), (LocalOnly(MODEL), MODEL),
        (FineTune(recipes.fedavg(setting), 0), MODEL),
    ]  # fmt: skip
    for method, model in methods:
        played = final(method, routed_federation(model), 1)
        refused(lambda m=method, p=played: Router.of(m.at(1), p.server, p.states), "no router")
    played = final(recipes.feddrm(setting), routed_federation(MODEL), 1)
    refused(lambda: Router.of(recipes.feddrm(setting), played.server, {}), "no client has taken")
    refused(lambda: Router.of(recipes.feddrm(setting), played.states, {}), "params")
    private = FedAvg(MODEL, ClientEntropy(), share=Share(("head.", "router.")))
    alone = final(private, routed_federation(MODEL), 1)
    refused(lambda: Router.of(private, alone.server, alone.states), '"router.branch.0.0.weight"')
    head = final(recipes.fedper(plain), routed_federation(plain.model), 1)
    without = Router.of(recipes.fedper(plain), head.server, head.states, untrained=True)
    refused(lambda: without.route(queries), '"client_logits"')
    refused(lambda: without.features(queries), '"client_features"')


@pytest.mark.parametrize(
    ("objective", "trains"),
    [
        (CrossEntropy(), False), (ClientEntropy(), True),
        (0.8 * CrossEntropy() + 0.2 * ClientEntropy(), True),
        (CrossEntropy() + 0.0 * ClientEntropy(), False),
        (Proximal(0.1) + (CrossEntropy() + 0.5 * (0.5 * ClientEntropy())), True),
    ],
)  # fmt: skip
def test_the_objective_says_whether_a_router_is_trained(objective: Term, trains: bool) -> None:
    assert FedAvg(MODEL, objective).trains_router() is trains
    assert FineTune(FedAvg(MODEL, objective), 1).trains_router() is trains


def test_networks_and_cohorts_that_train_no_router_are_refused_before_round_1() -> None:
    for model, word in ((routed_model(None), '"client_logits"'), (routed_model(4), "6 clients")):
        for recipe in (recipes.feddrm, recipes.feddrm_shared_head):
            method = recipe(routed_setting(model))
            refused(lambda m=method, f=make_federation(model): next(run(m, f, 1)), word)
    plain, setting = routed_model(None), routed_setting(MODEL)
    next(run(recipes.feddrm(routed_setting(plain), lam=1.0), make_federation(plain), 1))
    # A softmax over one client has one entry.
    for method in (recipes.feddrm(setting), FineTune(recipes.feddrm(setting), 2)):
        alone = lambda m=method: next(run(m, make_federation(MODEL), 1, cohort=1))  # noqa: E731
        refused(alone, "a cohort of 1 client of 6 trains no router")
        next(run(method, make_federation(MODEL), 1, cohort=2))
    next(run(recipes.fedper(setting), make_federation(MODEL), 1, cohort=1))


class Own(nn.Module):
    """A network whose last layer has another name."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.classifier = nn.Linear(FEATURES, 6), nn.Linear(6, CLASSES)
        self.clients = nn.Linear(6, N)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.trunk(x).relu()
        z = self.clients(h)
        return {"logits": self.classifier(h), "client_features": h, "client_logits": z}


OWN = Model(Own())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"head": "classifier."}, 'head=("classifier.",)'), ({"head": ("head.",)}, "classifier."),
        ({"head": ("clasifier.",)}, 'Did you mean "classifier."'), ({"head": ()}, "head="),
        ({"lam": None}, "lam"), ({"lam": "0.5"}, "lam"), ({"lam": 1.5}, "lam"),
    ],
)  # fmt: skip
def test_heads_and_lambdas_that_cannot_be(options: Any, words: str) -> None:
    lam = {k: options.pop(k) for k in ("lam",) if k in options}
    head = {"head": ("classifier.",)} | options
    refused(lambda: recipes.feddrm(Setting(OWN, TARGET, Local(), **head), **lam), words)


def test_a_named_head_stays_private() -> None:
    method = recipes.feddrm(Setting(OWN, TARGET, Local(batch=8), head=("classifier.",)))
    played = final(method, make_federation(OWN), 1)
    assert [k for k in played.server["params"] if k.startswith("classifier.")] == []
    router = Router.of(method, played.server, played.states)
    assert max_difference(router.served[0][0], router.served[1][0]) > 1e-3
