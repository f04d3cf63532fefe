"""FedDisk: densities first, true log ratios, weights of examples, and what it warns of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedshift import recipes
from fedshift.algorithms.fedavg import FedAvg
from fedshift.algorithms.feddisk import FedDisk
from fedshift.algorithms.method import Method
from fedshift.algorithms.weighing import (
    Estimate,
    centred,
    compare_log_weights,
    rounds_for_all,
)
from fedshift.client.importance import NegativeLogDensity, bounded
from fedshift.client.local import plan_all
from fedshift.client.schedules import Cosine
from fedshift.data import ClientData, client_data
from fedshift.engine.run import Federation, Round, draw_cohort, start
from fedshift.errors import InputError, TrainingError
from fedshift.models.made import Made, MixtureMade
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
    algorithm: Method,
    federation: Federation,
    rounds: Sequence[int],
    plans_of: Callable[[Method, ClientData, int], Any],
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

    def as_the_first(stage: Method, data: ClientData, t: int) -> Any:
        return plan_all(stage.phases(), data, t, 0, 0)

    def each_its_own(stage: Method, data: ClientData, t: int) -> Any:
        return plan_all(stage.phases(), data, t, 0, int(data.id))

    federation = federated(twins(4))
    server, states = play(algorithm, federation, rounds, as_the_first)
    for state in states:
        assert max_difference(state["density"], server["density"]) == 0
        assert state["importance"]["a"].tolist() == [1.0] * 24
    assert server["importance"]["ess"].tolist() == [24.0] * 4
    _, others = play(algorithm, federation, rounds, each_its_own)
    assert others[0]["importance"]["a"].tolist() != [1.0] * 24  # the control: other batches


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


# ------------------------------------------------------------------ refusals


def ratios(scale: float = 1.0) -> tuple[Tensor, ...]:
    source = torch.Generator().manual_seed(4)
    return tuple(scale * torch.randn(n, generator=source, dtype=torch.float64) for n in SIZES)


def true(inputs: Setting, log_ratios: tuple[Tensor, ...] | None, **options: Any) -> Any:
    setting = replace(inputs, log_ratios=log_ratios)
    return direct(setting, estimator="true", least_ess=0.0, **options)


def test_true_weights_are_the_known_ratios(inputs: Setting, federated: Any) -> None:
    played = weighed(true(inputs, ratios()), federated())
    for i, true_ratios in enumerate(ratios()):
        least = torch.tensor(SIZES[i] / sum(SIZES), dtype=torch.float64)
        expected = bounded(true_ratios, torch.ones(len(true_ratios), dtype=torch.bool), least, 10.0)
        assert torch.equal(played.states[i]["importance"]["a"], expected)
    assert played.states[0]["importance"]["a"].std() > 0.1


def test_equal_is_the_inner_method_after_as_many_rounds(inputs: Setting, federated: Any) -> None:
    """The control has the cohorts and batches of the others, and weights of exactly 1."""
    even, zero = direct(inputs, estimator="equal"), true(inputs, ratios(0.0))
    a, b, c = (final(m, federated(), 5) for m in (even, zero, true(inputs, ratios())))
    assert max_difference(a.server["params"], b.server["params"]) == 0
    assert max_difference(a.server["params"], c.server["params"]) > 1e-6
    assert all(s["importance"]["a"].eq(1).all() for s in a.states.values())


# ------------------------------------------------------------------ weights that do not pay


def test_weights_of_little_use_are_replaced_by_one(inputs: Setting, federated: Any) -> None:
    wide = ratios(3.0)
    weighing = weighed(true(inputs, wide), federated()).server["importance"]
    shares = weighing["ess"] / weighing["n"]
    assert torch.equal(weighing["estimated"], weighing["ess"])
    bound = float(shares.sort().values[2:4].mean())
    played = weighed(true(inputs, wide, useful=bound), federated())
    importance = played.server["importance"]
    assert torch.equal(importance["estimated"], weighing["estimated"])
    for i in range(len(SIZES)):
        even = bool(played.states[i]["importance"]["a"].eq(1).all())
        assert even == bool(shares[i] < bound)
        assert float(importance["ess"][i]) == float(
            (importance["n"] if even else weighing["ess"])[i]
        )


def importance(*shares: float, used: float | None = None) -> dict[str, Tensor]:
    n = torch.full((len(shares),), 100.0, dtype=torch.float64)
    estimated = 100 * torch.tensor(shares, dtype=torch.float64)
    ess = estimated if used is None else torch.full_like(n, 100 * used)
    return {"n": n, "ess": ess, "estimated": estimated}


@pytest.mark.slow
@pytest.mark.parametrize("cohort", [None, 1])
def test_estimated_log_weights_have_the_slope_of_the_true_ones(cohort: int | None) -> None:
    """0.8 to 1.2 on Gaussians; Bernoulli likelihoods of the same numbers, a tenth."""
    from fedshift_papers.pictures.log_weights import estimates

    assert 0.8 < estimates("mixture", 0, cohort=cohort)["direct"].slope < 1.2
    assert abs(estimates("bernoulli", 0, cohort=cohort)["direct"].slope) < 0.3


@pytest.mark.slow
def test_degenerate_weights_are_refused(inputs: Setting, federated: Any) -> None:
    narrow = direct(inputs, density_epochs=4, least_ess=0.95, low=-3.0, high=3.0)
    algorithm = replace(fast(narrow), span=None)
    with pytest.raises(TrainingError) as caught:
        weighed(algorithm, federated())
    text = str(caught.value)
    assert text.startswith("client ")
    assert "importance weights of its" in text
    assert "less than least_ess = 0.95 allows" in text
    assert "(density_rounds), lower least_ess" in text  # options of both methods, these first
    assert "in feddisk lower temper or most" in text
    assert "bounds" not in text
    assert weighed(replace(algorithm, least_ess=0.0), federated()).t == 3


def test_inputs_that_the_density_would_clip_are_refused(inputs: Setting, federated: Any) -> None:
    federation = federated()
    x = federation.clients[0].x
    outside = int((x.abs() > 1).sum()) / x.numel()
    message = (
        rf"client 0: {100 * outside:.0f} % of its inputs' values lie outside \[low, high\] = "
        r"\[-1, 1\], where the density clips them; give low and high"
    )
    given: dict[str, Any] = {"density_rounds": 1, "hidden": (4,)}
    algorithm = recipes.feddisk(inputs, density="bernoulli", **given)
    for refused in (algorithm, recipes.made(inputs, **given)):
        with pytest.raises(InputError, match=message):
            final(refused, federation, 1)
    assert final(recipes.feddisk(inputs, **given), federation, 1).t == 1  # mixtures reach further
    assert final(replace(algorithm, span=None), federation, 1).t == 1
    for outliers, ones in ((40, 100), (41, 0)):  # of 800 values: up to 5 % are clipped
        few = torch.where(torch.arange(800) < outliers, 2.0, 0.5).reshape(100, 8)
        data = client_data(few, torch.zeros(100).long(), 2)
        if ones:
            state = algorithm.init_client(federation.params, {}, data)
            assert state["importance"]["a"].sum() == ones
            continue
        with pytest.raises(InputError, match="client 2: 5 % of"):
            algorithm.init_client(federation.params, {}, data)
        padded = data._replace(w=(torch.arange(100) >= 6).to(data.w))
        algorithm.init_client(federation.params, {}, padded)  # padding is not looked at


@pytest.mark.parametrize(
    ("shape", "two", "density", "kind"),
    [
        ((8,), None, "auto", MixtureMade),
        ((8,), (0.0, 1.0), "auto", Made),
        ((1, 3, 3), None, "auto", Made),
        ((1, 3, 3), None, "mixture", MixtureMade),
        ((8,), None, "bernoulli", Made),
    ],
)
def test_the_kind_of_density_follows_the_inputs(
    inputs: Setting, shape: tuple[int, ...], two: Any, density: Any, kind: type
) -> None:
    setting = replace(inputs, shape=shape, two_values=two)
    # The two values are the range of a binary density, and another one is refused.
    span: dict[str, Any] = {} if two else {"low": -2.0, "high": 2.0}
    made = recipes.feddisk(setting, density=density, **span)
    net = made.network().net
    assert type(net) is kind
    assert (net.low, net.high) == (two or (-2.0, 2.0))
    assert made.span == (net.low, net.high)
    assert made.reach == (5.0 if kind is MixtureMade else 1.0)
    # Of grey values the likelihood is no density, and the rate stays as in the report.
    falls = kind is MixtureMade or two is not None
    assert made.local.lr == (Cosine(1e-3, 20) if falls else 1e-3)


# ------------------------------------------------------------------ weighing rounds


def share_complete(clients: int, drawn: int, rounds: int, runs: int = 400) -> float:
    """Share of runs of which every client is drawn in the first rounds."""
    seen = [
        len(
            {i for t in range(1, rounds + 1) for i in draw_cohort(clients, drawn, t, seed).tolist()}
        )
        for seed in range(runs)
    ]
    return sum(n == clients for n in seen) / runs


def test_so_many_rounds_draw_all_clients_in_95_percent_of_runs() -> None:
    """By the engine's own cohorts; the mean number of rounds, 5.5, is the control."""
    assert rounds_for_all(1, 2, 1 / 3) == 11
    left_out = 3 * (2 / 3) ** 11 - 3 * (1 / 3) ** 11  # inclusion and exclusion
    assert left_out < 0.05 < 3 * (2 / 3) ** 9 - 3 * (1 / 3) ** 9
    assert share_complete(3, 1, 11) > 0.94
    assert share_complete(3, 1, 6) == pytest.approx(1 - 0.26, abs=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(("clients", "drawn"), [(10, 2), (20, 10), (30, 3)])
def test_so_do_those_of_other_cohorts(clients: int, drawn: int) -> None:
    rounds = rounds_for_all(1, clients - drawn, drawn / clients)
    assert share_complete(clients, drawn, rounds) > 0.93
    assert share_complete(clients, drawn, rounds // 2) < 0.9


# ------------------------------------------------------------------ slope


def follows(slope: float, noise: float = 0.0) -> Estimate:
    source = np.random.default_rng(0)
    true = [source.normal(size=50) + 3.0, source.normal(size=80)]
    estimated = [slope * t + noise * source.normal(size=len(t)) - 7.0 for t in true]
    return Estimate(centred(true), centred(estimated))


def test_the_slope_is_that_of_least_squares() -> None:
    of = follows(0.9, noise=0.5)
    (slope,), *_ = np.linalg.lstsq(of.true[:, None], of.estimated)
    assert of.slope == pytest.approx(slope, rel=1e-12)
    assert of.slope != pytest.approx(0.9, abs=1e-3)
    # Each client's constant cancels: the same without a shift between them.
    assert follows(0.9).slope == pytest.approx(0.9, rel=1e-12)
    assert follows(0.9).correlation == pytest.approx(1.0)


def test_a_temper_as_named_puts_the_slope_right() -> None:
    """The ratio is multiplied by temper, so that 1 / slope of it has the slope 1."""
    of = follows(1.6, noise=0.1)
    times = float(of.sentence().rpartition("temper ")[2].split()[0])
    assert Estimate(of.true, times * of.estimated).slope == pytest.approx(1.0, abs=0.01)


def test_python_can_ask_for_the_slope_of_a_run(inputs: Setting, federated: Any) -> None:
    """Of true weights it is 1; of those of half the ratio, half; weights of 1 have none."""
    source = torch.Generator().manual_seed(4)
    ratios = tuple(0.2 * torch.randn(n, generator=source, dtype=torch.float64) for n in SIZES)
    federation = federated()

    def slope(scale: float, **options: Any) -> float | None:
        setting = replace(inputs, log_ratios=tuple(scale * r for r in ratios))
        last = weighed(direct(setting, estimator="true", **options), federation)
        estimate = compare_log_weights(last.server, last.states, federation.clients, ratios)
        return None if estimate is None else estimate.slope

    assert slope(1.0) == pytest.approx(1.0, abs=1e-12)
    assert slope(0.5) == pytest.approx(0.5, abs=0.02)
    assert slope(1.0, useful=0.999) is None
    last = weighed(direct(inputs), federation)
    with pytest.raises(InputError, match="give log_ratios one for each example of each client"):
        compare_log_weights(last.server, last.states, federation.clients, ratios[:1])


# ------------------------------------------------------------------ options without effect
