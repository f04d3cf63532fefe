"""FedDisk: densities first, then the inner method untouched but for the weights of examples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from fedshift import recipes
from fedshift.algorithms.base import Algorithm
from fedshift.algorithms.fedavg import FedAvg
from fedshift.algorithms.feddisk import FedDisk
from fedshift.client.importance import Classified, NegativeLogDensity
from fedshift.client.local import plan_all
from fedshift.data import ClientData, client_data
from fedshift.engine.run import Federation, Round, start
from fedshift.recipes import Setting
from fedshift.tree import Parts, add, stack
from support.by_hand import final, max_difference
from support.densities import direct, fast, weighed
from support.federations import SIZES, double, make_clients

# ------------------------------------------------------------------ laws of the method


def test_density_rounds_are_fedavg_of_the_density(inputs: Setting, federated: Any) -> None:
    """p is FedAvg with Adam on the density network; the model stays; q_i is training alone."""
    algorithm, federation = direct(inputs), double(federated())
    density = algorithm.network()
    plain = FedAvg(density, NegativeLogDensity(), algorithm.local)
    first = {k: v.double() for k, v in density.init()[0].items()}
    alone = replace(federation, params=first)
    got = final(algorithm, federation, 2)
    server = start(plain, alone)
    densities = [first] * len(SIZES)
    assert max_difference(got.server["params"], federation.params) == 0
    for t in (1, 2):
        updates = []
        for i, data in enumerate(alone.clients):
            plans = plan_all(algorithm.at(t).phases(), data, t, 0, i)
            renamed = {"train0": plans["density0"]}
            message = plain.broadcast(server.server, i)
            state = plain.init_client(first, {}, data)
            updates.append(plain.client_update(message, state, data, renamed)[0])
            by_itself = plain.client_update(
                message | {"params": densities[i]}, state, data, renamed
            )[0]
            densities[i] = add(densities[i], by_itself["delta"])
        stacked = stack(updates)
        weights = plain.weigh(server.server, torch.arange(len(SIZES)))
        stacked["cohort"] = {"id": torch.arange(len(SIZES)), "weight": weights}
        server = server._replace(server=server.server | plain.server_update(
            server.server, stacked, 0
        ))  # fmt: skip
    assert max_difference(got.server["density"], server.server["params"]) == 0
    assert max_difference(got.server["density"], first) > 1e-3
    assert all(max_difference(got.states[i]["density"], q) == 0 for i, q in enumerate(densities))
    assert all(max_difference(a, got.server["density"]) > 1e-4 for a in densities)
    assert max_difference(densities[0], densities[1]) > 1e-4


def play(
    algorithm: Algorithm,
    federation: Federation,
    rounds: Sequence[int],
    plans_of: Callable[[Algorithm, ClientData, int], Any],
) -> tuple[Parts, list[Parts]]:
    """Rounds by hand, so that clients can be given the same batches: (server, states)."""
    server = start(algorithm, federation).server
    clients, ids = federation.clients, torch.arange(len(federation.clients))
    params = federation.params
    states = [algorithm.init_client(params, {}, data) for data in clients]
    for t in rounds:
        stage = algorithm.at(t)
        weights = stage.weigh(server, ids)
        sent = server | {"cohort": {"id": ids, "weight": weights}}
        replies = [
            stage.client_update(stage.broadcast(sent, i), states[i], d, plans_of(stage, d, t))
            for i, d in enumerate(clients)
        ]
        updates = stack([update for update, _ in replies]) | {
            "cohort": {"id": ids, "weight": weights}
        }
        server = server | stage.server_update(server, updates, 0)
        states = [s | changed for s, (_, changed) in zip(states, replies, strict=True)]
    return server, states


def twins(count: int, n: int = 24) -> tuple[ClientData, ...]:
    one = make_clients(sizes=(n,))[0]
    return tuple(client_data(one.x, one.y, i) for i in range(count))


def test_equal_clients_with_equal_batches_have_direct_weights_of_exactly_one(
    inputs: Setting, federated: Any
) -> None:
    algorithm = fast(direct(inputs))
    rounds = range(1, algorithm.rounds_before_inner + 1)

    def as_the_first(stage: Algorithm, data: ClientData, t: int) -> Any:
        return plan_all(stage.phases(), data, t, 0, 0)

    def each_its_own(stage: Algorithm, data: ClientData, t: int) -> Any:
        return plan_all(stage.phases(), data, t, 0, int(data.id))

    federation = federated(twins(4))
    server, states = play(algorithm, federation, rounds, as_the_first)
    for state in states:
        assert max_difference(state["density"], server["density"]) == 0
        assert state["importance"]["a"].tolist() == [1.0] * 24
    assert server["importance"]["ess"].tolist() == [24.0] * 4
    _, others = play(algorithm, federation, rounds, each_its_own)
    assert others[0]["importance"]["a"].tolist() != [1.0] * 24  # the control: other batches


def test_equal_clients_have_classifier_weights_near_one(inputs: Setting, federated: Any) -> None:
    algorithm = direct(inputs, estimator="classifier")
    played = weighed(algorithm, federated(twins(3, 60)))
    for state in played.states.values():
        assert float((state["importance"]["a"] - 1).abs().max()) < 0.1
    assert float(played.server["importance"]["ess"].min()) > 59.5


@pytest.mark.parametrize("estimator", ["direct", "classifier"])
def test_one_client_has_weights_of_exactly_one(
    inputs: Setting, federated: Any, estimator: str
) -> None:
    played = weighed(direct(inputs, estimator=estimator), federated(make_clients(sizes=(31,))))
    assert played.states[0]["importance"]["a"].tolist() == [1.0] * 31


def test_weights_of_different_clients_keep_to_their_bounds(inputs: Setting, federated: Any) -> None:
    algorithm = fast(direct(inputs, density_epochs=4, most=3.0, least_ess=0.0))
    played = weighed(algorithm, federated())
    for i, n in enumerate(SIZES):
        a = played.states[i]["importance"]["a"]
        assert float(a.mean()) == pytest.approx(1.0, abs=1e-12)
        assert n / sum(SIZES) - 1e-12 <= float(a.min()) < 1 < float(a.max()) <= 3.0 + 1e-12
        last = algorithm.at(algorithm.rounds_before_inner).broadcast(played.server, i)
        assert float(last["share"]["least"]) == n / sum(SIZES)
        ess = float(played.server["importance"]["ess"][i])
        assert ess == pytest.approx(float(a.sum() ** 2 / (a**2).sum()))
    assert max_difference(played.server["params"], federated().params) == 0


def inner_from(setting: Setting, federation: Federation, algorithm: FedDisk, rounds: int) -> Round:
    """The inner method's rounds, at the batches that it has after the density rounds."""
    late = start(algorithm.inner, federation)._replace(t=algorithm.rounds_before_inner)
    return final(algorithm.inner, federation, algorithm.rounds_before_inner + rounds, after=late)


@pytest.mark.few(1)
@pytest.mark.parametrize("mu", [0.0, 0.5])
def test_weights_of_one_are_the_inner_method(inputs: Setting, federated: Any, mu: float) -> None:
    algorithm, federation = direct(inputs, mu=mu), federated()
    before = weighed(algorithm, federation)
    ones = {
        i: s | {"importance": {"a": torch.ones_like(s["importance"]["a"])}}
        for i, s in before.states.items()
    }
    rounds = algorithm.rounds_before_inner + 2
    got = final(algorithm, federation, rounds, after=before._replace(states=ones))
    plain = inner_from(inputs, federation, algorithm, 2)
    assert max_difference(got.server["params"], plain.server["params"]) == 0
    weighted = final(algorithm, federation, rounds, after=before)
    assert max_difference(weighted.server["params"], plain.server["params"]) > 1e-6  # the control


def test_weights_are_data(inputs: Setting, federated: Any) -> None:
    """A round of FedDisk is the inner method's round on clients with `w` times their weights."""
    algorithm, federation = direct(inputs), federated()
    before = weighed(algorithm, federation)
    got = final(algorithm, federation, algorithm.rounds_before_inner + 1, after=before)
    heavier = tuple(
        d._replace(w=before.states[i]["importance"]["a"].float())
        for i, d in enumerate(federation.clients)
    )
    plain = inner_from(inputs, replace(federation, clients=heavier), algorithm, 1)
    assert max_difference(got.server["params"], plain.server["params"]) == 0


@pytest.mark.slow
def test_any_method_can_be_the_inner_one(inputs: Setting, federated: Any) -> None:
    federation, base = federated(), direct(inputs)
    staged = recipes.fedavgft(replace(inputs, rounds=3), tune_rounds=1)
    for inner in (recipes.scaffold(inputs), recipes.fedpals(inputs, ess=0.6), staged):
        algorithm = replace(base, inner=inner)
        played = final(algorithm, federation, algorithm.rounds_before_inner + 3)
        assert max_difference(played.server["params"], federation.params) > 1e-3
    # FineTune's own rounds are counted from the inner method's first.
    kinds = [type(algorithm.at(t)).__name__ for t in range(1, 7)]
    assert kinds == ["Before", "Before", "Before", "FedDisk", "FedDisk", "FedDisk"]
    tuned = [bool(final(algorithm, federation, t).server["tuned"]["client"].all()) for t in (5, 6)]
    assert tuned == [False, True]


def test_clients_that_are_not_drawn_to_weigh_train_unweighted(
    inputs: Setting, federated: Any
) -> None:
    algorithm, federation = direct(inputs), federated()
    once = weighed(algorithm, federation, cohort=3)
    ess = once.server["importance"]["ess"]
    assert ((ess > 0) == torch.isin(torch.arange(6), torch.tensor(once.trained))).all()
    fresh = algorithm.init_client(federation.params, {}, federation.clients[0])
    assert fresh["importance"]["a"].tolist() == [1.0] * SIZES[0]
    longer = replace(algorithm, weighing=8)
    assert (weighed(longer, federation, cohort=3).server["importance"]["ess"] > 0).all()


def test_the_made_of_the_report_averages_uniformly(inputs: Setting, federated: Any) -> None:
    algorithm = recipes.made(inputs, density_rounds=1, hidden=(4,), low=-8.0, high=8.0)
    server = start(algorithm, federated()).server
    ids = torch.arange(len(SIZES))
    assert algorithm.weigh(server, ids).tolist() == [1 / 6] * 6
    by_size = torch.tensor(SIZES).double() / sum(SIZES)
    assert torch.equal(algorithm.at(1).weigh(server, ids), by_size)
    assert isinstance(algorithm.ratio, Classified)


def test_what_leaves_a_client(inputs: Setting, federated: Any) -> None:
    """A density's change, then two numbers, then the inner method's update; q_i and a_i stay."""
    algorithm, federation = direct(inputs), federated()
    seen: list[tuple[set[str], set[str]]] = []
    revealed = algorithm.reveals()
    for t in range(1, 5):
        played = final(algorithm, federation, t - 1) if t > 1 else start(algorithm, federation)
        stage, data = algorithm.at(t), federation.clients[1]
        ids = torch.arange(6)
        cohort = {"id": ids, "weight": stage.weigh(played.server, ids)}
        message = stage.broadcast(played.server | {"cohort": cohort}, 1)
        state = played.states.get(1, algorithm.init_client(federation.params, {}, data))
        plans = plan_all(stage.phases(), data, t, 0, 1)
        update, changed = stage.client_update(message, state, data, plans)
        assert update.keys() <= stage.reveals().keys()
        assert changed.keys() <= state.keys()
        seen.append(({k for k, v in update.items() if v}, set(update["report"])))
    assert seen == [
        ({"delta", "report"}, {"id", "loss"}),
        ({"delta", "report"}, {"id", "loss"}),
        ({"report"}, {"id", "loss", "ess", "estimated"}),
        ({"delta", "report"}, {"id", "loss"}),
    ]
    assert "of a density of inputs in rounds 1 to 2" in revealed["delta"]
    assert "effective sample size" in revealed["report"]


# ------------------------------------------------------------------ refusals
