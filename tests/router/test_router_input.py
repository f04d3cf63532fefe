"""Queries that a router cannot answer, and methods without one, get one clear message."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedshift import recipes
from fedshift.algorithms.base import Algorithm
from fedshift.algorithms.fedavg import FedAvg
from fedshift.algorithms.finetune import FineTune
from fedshift.algorithms.local_only import LocalOnly
from fedshift.client.local import Local
from fedshift.client.objectives import CrossEntropy, Proximal, Term
from fedshift.client.origin import ClientEntropy
from fedshift.client.sharing import Share
from fedshift.data import client_data
from fedshift.engine.run import run
from fedshift.errors import InputError, TrainingError
from fedshift.model import Model, build
from fedshift.models.lenet_gn import SMALL, lenet_gn
from fedshift.recipes import Setting
from fedshift.router.route import Router
from support.by_hand import final, max_difference
from support.federations import CLASSES, FEATURES, SIZES, TARGET, make_clients, make_federation
from support.routing import routed_federation, routed_model, routed_setting

N = len(SIZES)
MODEL = routed_model()
NAN, INF = float("nan"), float("inf")


# --------------------------------------------------------------------------- order of the clients


@pytest.mark.slow
def test_clients_out_of_order_are_refused(router: Router) -> None:
    """Clients are not confused: the order is not their identity."""
    clients = make_clients()
    for fit in (router.refitted, router.from_moments, router.with_moments):
        with pytest.raises(
            InputError, match=r"ids must be 0\.\.5 in order, got \[5, 4, 3, 2, 1, 0"
        ):
            fit(clients[::-1])
    twice = [*clients[:-1], clients[0]]
    with pytest.raises(InputError, match=r"in order, got \[0, 1, 2, 3, 4, 0\]"):
        router.refitted(twice)
    assert router.refitted(clients).clients == list(range(N))


# ----------------------------------------------------------------------------------- queries of NaN


@pytest.mark.slow
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_queries_that_are_not_finite_are_refused(
    router: Router, queries: Tensor, value: float
) -> None:
    fitted = router.refitted(make_clients()).with_moments(make_clients())
    many = torch.cat([queries] * 12)
    row = 1100  # beyond the first block
    many[row, 3] = value
    many[row + 5] = value
    ways = (
        fitted.route, fitted.predict, fitted.scores, fitted.logits, fitted.features, fitted.novelty,
        lambda x: fitted.predict(x, "mixture"), lambda x: fitted.predict(x, 2),
        lambda x: fitted.route(x, min_posterior=0.1, max_novelty=9.0), router.route, router.predict,
    )  # fmt: skip
    for ask in ways:
        with pytest.raises(
            InputError, match=r"query 1100 holds NaN or infinity.*leave it out: x\["
        ):
            ask(many)
    left = many[many.flatten(1).isfinite().all(1)]
    assert len(left) == len(many) - 2
    assert bool(fitted.predict(left).isfinite().all())


def test_a_query_whose_logits_overflow_is_refused(router: Router, queries: Tensor) -> None:
    params = {k: v * 1e30 if k == "router.head.weight" else v for k, v in router.shared[0].items()}
    wild = replace(router, shared=(params, {}))
    assert len(wild.route(queries).clients) == len(queries)
    params["router.head.weight"][2, 0] = INF
    with pytest.raises(InputError, match=r"query \d+: the client logits are not finite"):
        wild.route(queries)


# -------------------------------------------------------------------------------------- bad queries

X = torch.zeros(4, FEATURES)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (X[:, :3], r"cannot read queries torch.float32 \(4, 3\): .* of the shape of the clients'"),
        (
            X.double(),
            r"queries torch.float64 \(4, 8\).*give it x.to\(torch.float32\), scaled as in",
        ),
        (X.long(), r"queries torch.int64 \(4, 8\).*give it x.to\(torch.float32\)"),
        (X.to(torch.uint8), r"queries torch.uint8 \(4, 8\).*give it x.to\(torch.float32\)"),
        (X[0], r"cannot read queries torch.float32 \(8,\).*This is one query: give x\[None\]"),
        (X[None], r"cannot read queries torch.float32 \(1, 4, 8\): it gives logits \(1, 4, 5\)"),
        (X.numpy(), r"queries are a ndarray; give a tensor \[B, ...\], as torch.as_tensor\(x\)"),
        (X.tolist(), "queries are a list; give a tensor"),
        (torch.tensor(1.0), "queries are a single number; give a tensor"),
        (X[:0], "no queries; give at least one"),
    ],
)
def test_queries_that_cannot_be_read_are_refused(router: Router, x: Any, message: str) -> None:
    for ask in (router.route, router.predict, router.logits, router.features):
        with pytest.raises(InputError, match=message):
            ask(x)


def test_images_that_cannot_be_read_are_refused() -> None:
    model = build(lambda: lenet_gn(1, 28, 3, clients=2, widths=SMALL), seed=0)
    pair = model.init()
    router = Router(model, pair, {0: pair, 1: pair}, torch.ones(2))
    assert router.route(torch.zeros(2, 1, 28, 28)).clients.shape == (2, 1)
    shape = "shape of the clients' training inputs and prepared in the same way"
    for x, message in (
        (torch.zeros(2, 3, 28, 28), rf"queries torch.float32 \(2, 3, 28, 28\): .*{shape}"),
        (torch.zeros(2, 1, 40, 40), rf"queries torch.float32 \(2, 1, 40, 40\): .*{shape}"),
        (torch.zeros(1, 28, 28), r"queries torch.float32 \(1, 28, 28\).*one query: give x\[None\]"),
        (torch.zeros(2, 1, 28, 28, dtype=torch.uint8), r"x.to\(torch.float32\), scaled as in"),
    ):
        with pytest.raises(InputError, match=message):
            router.predict(x)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"k": 1.5}, "k must be a whole number, got 1.5"),
        ({"k": True}, "k must be a whole number, got True"),
        ({"k": 7}, "k = 7 clients of 6"),
        ({"k": 0}, "k = 0 clients of 6; give 1 to all of them"),
        ({"min_posterior": True}, "min_posterior must be a probability, 0 to 1, .* got True"),
        ({"prices": [0, 0, 1]}, r"prices must be 6 finite numbers, got \[0, 0, 1\]"),
        ({"prices": ["a"] * 6}, r"prices must be a number per client, got \['a'"),
        ({"prior": [0.5, 0.5]}, r"a prior of shape \(2,\) for 6 clients"),
        ({"prior": {"a": 1}}, r"a prior must be a number per client, got \{'a': 1\}"),
        ({"min_posterior": 2.0}, "min_posterior must be a probability, 0 to 1, or None .* got 2.0"),
        ({"min_posterior": "0.5"}, "min_posterior must be a probability, 0 to 1, .* got '0.5'"),
        ({"max_novelty": -3.0}, "max_novelty must be a squared distance, 0 or more, .* got -3.0"),
        ({"max_novelty": NAN}, "max_novelty must be a squared distance, 0 or more, .* got nan"),
    ],
)
def test_wrong_questions_are_refused(
    router: Router, queries: Tensor, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        router.route(queries, **given)


@pytest.mark.parametrize("client", [6, -1, True, 1.0, "1", None, [1, 2]])
def test_clients_that_are_none_cannot_leave(router: Router, client: Any) -> None:
    with pytest.raises(InputError, match=r"cannot be routed to; there are \[0, 1, 2, 3, 4, 5\]"):
        router.without(client)
    assert router.without(np.int64(1)).clients == [0, 2, 3, 4, 5]


def test_whole_numbers_of_any_kind_do_for_k(router: Router, queries: Tensor) -> None:
    assert torch.equal(router.route(queries, np.int64(2)).clients, router.route(queries, 2).clients)
    assert torch.equal(router.predict(queries, np.int64(2)), router.predict(queries, 2))  # type: ignore[arg-type]


def test_lists_and_arrays_do_for_priors_and_prices(router: Router, queries: Tensor) -> None:
    q, mu = [0.1, 0.2, 0.3, 0.1, 0.1, 0.2], [0, 0, 1, 0, 0, 0]
    exact = torch.tensor(q, dtype=torch.float64)
    predicted = router.predict(queries, 2, prior=exact, prices=torch.tensor(mu))
    for kind in (list, tuple, np.array):
        assert torch.equal(router.predict(queries, 2, prior=kind(q), prices=kind(mu)), predicted)
    assert not torch.equal(router.predict(queries, 2), predicted)
    ask = recipes.feddrm(routed_setting(MODEL))
    played = final(ask, routed_federation(MODEL), 1)
    with pytest.raises(InputError, match='unknown prior "densty"; .* Did you mean "density"'):
        Router.of(ask, played.server, played.states, "densty")  # type: ignore[arg-type]


# ------------------------------------------------------------- methods that have trained no router


def test_methods_that_train_no_router_are_refused() -> None:
    setting, plain = routed_setting(MODEL), routed_setting(routed_model(None))
    methods: list[tuple[Algorithm, Model]] = [
        (recipes.fedavg(setting), MODEL),
        (recipes.fedper(plain), plain.model),
        (recipes.feddrm(setting, lam=1.0), MODEL),
        (FineTune(recipes.fedavg(setting), 0), MODEL),
        (LocalOnly(MODEL), MODEL),
    ]
    for method, model in methods:
        played = final(method, routed_federation(model), 1)
        with pytest.raises(
            InputError, match=r"trained no router: .* Train with recipes.feddrm \(lam"
        ):
            Router.of(method.at(1), played.server, played.states)


def test_a_router_that_was_never_trained_can_be_refitted(queries: Tensor) -> None:
    """Its branch is random, and yet a refit finds clients better than chance."""
    method = recipes.fedavg(routed_setting(MODEL))
    played = final(method, routed_federation(MODEL), 1)
    raw = Router.of(method, played.server, played.states, untrained=True)
    origin = torch.repeat_interleave(torch.arange(N), torch.tensor(SIZES))

    def right(r: Router) -> float:
        return float((r.route(queries).clients[:, 0] == origin).double().mean())

    assert right(raw) < 0.3
    assert right(raw.refitted(make_clients())) > right(raw) + 0.1


@pytest.mark.parametrize(
    ("objective", "trains"),
    [
        (CrossEntropy(), False),
        (ClientEntropy(), True),
        (0.8 * CrossEntropy() + 0.2 * ClientEntropy(), True),
        (CrossEntropy() + Proximal(0.1), False),
        (CrossEntropy() + 0.0 * ClientEntropy(), False),
        (Proximal(0.1) + (CrossEntropy() + 0.5 * (0.5 * ClientEntropy())), True),
    ],
)
def test_the_objective_says_whether_a_router_is_trained(objective: Term, trains: bool) -> None:
    assert FedAvg(MODEL, objective).trains_router() is trains
    assert FineTune(FedAvg(MODEL, objective), 1).trains_router() is trains


def test_a_network_without_the_clients_columns_is_refused_before_round_1() -> None:
    for model, message in (
        (routed_model(None), 'routing needs "client_logits", and this model returns'),
        (routed_model(4), r"\"client_logits\" \(2, 4\) and there are 6 clients; build the network"),
    ):
        for recipe in (recipes.feddrm, recipes.feddrm_shared_head):
            method = recipe(routed_setting(model))
            with pytest.raises(InputError, match=message):
                next(run(method, make_federation(model), 1))
    plain = routed_model(None)
    next(run(recipes.feddrm(routed_setting(plain), lam=1.0), make_federation(plain), 1))


def test_a_cohort_of_one_trains_no_router() -> None:
    """Its softmax has one entry: the router would stay at its first weights."""
    setting = routed_setting(MODEL)
    for method in (
        recipes.feddrm(setting),
        recipes.feddrm_shared_head(setting),
        FineTune(recipes.feddrm(setting), 2),
    ):
        with pytest.raises(InputError, match="a cohort of 1 client of 6 trains no router: it"):
            next(run(method, make_federation(MODEL), 1, cohort=1))
        next(run(method, make_federation(MODEL), 1, cohort=2))
    for plain in (recipes.fedper(setting), FineTune(recipes.feddrm(setting), 0)):
        assert not plain.trains_router()
        next(run(plain, make_federation(MODEL), 1, cohort=1))


# ---------------------------------------------------------------------------------- data of NaN


@pytest.mark.parametrize("value", [NAN, INF])
def test_inputs_that_are_not_finite_are_refused(value: float) -> None:
    x, y = torch.zeros(6, 2, 3), torch.zeros(6).long()
    x[4, 1, 2] = value
    with pytest.raises(InputError, match=r"client 3: x\[4\] holds NaN or infinity; leave such"):
        client_data(x, y, 3)
    with pytest.raises(InputError, match=r"client 3: x\[4\] holds NaN or infinity"):
        client_data(x[:, 1, 2], y, 3)
    assert len(client_data(x[:4], y[:4], 3).x) == 4


def test_finite_inputs_whose_sum_overflows_and_whole_numbers_are_let_through() -> None:
    y = torch.zeros(6).long()
    assert client_data(torch.full((6, 2), 3e38), y, 0).x.sum() == INF
    assert len(client_data(torch.full((6, 2), 255, dtype=torch.uint8), y, 0).x) == 6
    assert len(client_data(torch.zeros(0, 2), y[:0], 0).x) == 0


# ------------------------------------------------------------------------------- heads and lambdas


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
    ("head", "message"),
    [
        ("classifier.", r'Setting.head is the text "classifier."; .* head=\("classifier.",\)'),
        (
            ("head.",),
            r"Setting.head = \['head.'\] must match some .* its layers are \".*\"classifier.\"",
        ),
        (("clasifier.",), 'Did you mean "classifier."'),
        ((), r"Setting.head = \[\] names none; name it by head=.*, or use feddrm_shared_head"),
    ],
)
def test_heads_that_cannot_be_are_refused(head: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        recipes.feddrm(Setting(OWN, TARGET, Local(), head=head))


def test_a_named_head_stays_private() -> None:
    method = recipes.feddrm(Setting(OWN, TARGET, Local(batch=8), head=("classifier.",)))
    played = final(method, make_federation(OWN), 1)
    assert [k for k in played.server["params"] if k.startswith("classifier.")] == []
    router = Router.of(method, played.server, played.states)
    assert max_difference(router.served[0][0], router.served[1][0]) > 1e-3


def test_shares_are_refused_as_heads_are() -> None:
    with pytest.raises(InputError, match=r'private is the text "l"; .* private=\("l",\)'):
        Share(private="l")  # type: ignore[arg-type]
    with pytest.raises(InputError, match='Did you mean "classifier."'):
        Share(("clasifier.",)).check(OWN.init()[0])


@pytest.mark.parametrize(
    ("lam", "message"),
    [
        (None, "feddrm lam must be a number, got None"),
        ("0.5", 'feddrm lam must be a number, got the text "0.5"; give 0.5'),
        (1.5, r"lam must be in \[0, 1\], got 1.5; it weighs"),
    ],
)
def test_a_lam_that_is_no_number_is_refused(lam: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        recipes.feddrm(routed_setting(MODEL), lam=lam)


# ------------------------------------------------------------------------------------------ refits


@pytest.mark.slow
def test_the_advice_on_rounds_can_be_followed(router: Router) -> None:
    clients = make_clients()
    with pytest.raises(TrainingError, match="after 6 rounds; give more than rounds=5, or a larger"):
        router.refitted(clients, rounds=5)
    few, many = (router.refitted(clients, rounds=n) for n in (200, 2000))
    assert few.head is not None
    assert many.head is not None
    assert torch.equal(few.head.xi, many.head.xi)
