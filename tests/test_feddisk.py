"""FedDisk: importance weights within their bounds, and the inner method untouched but for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from by_hand import apart, final
from conftest import CLASSES, FEATURES, SIZES, TARGET, double, make_clients, make_federation
from torch import Tensor

from fedshift import recipes
from fedshift.algorithms.base import Algorithm
from fedshift.algorithms.fedavg import FedAvg
from fedshift.algorithms.feddisk import FedDisk
from fedshift.algorithms.preparing import WeighExamples
from fedshift.client.importance import (
    Classified,
    Direct,
    NegativeLogDensity,
    PairEntropy,
    bounded,
    effective_size,
    scored,
)
from fedshift.client.local import Local, plan_all
from fedshift.client.objectives import View
from fedshift.data import Batch, ClientData, client_data
from fedshift.engine.rounds import Federation, Round, run, start
from fedshift.errors import InputError, TrainingError
from fedshift.model import Model, build
from fedshift.models.made import Discriminator, Made
from fedshift.recipes import Setting
from fedshift.seeds import generator
from fedshift.tree import Parts, stack


@pytest.fixture
def inputs(setting: Setting) -> Setting:
    """The setting with the shape of an input."""
    return replace(setting, shape=(FEATURES,))


def direct(setting: Setting, **options: Any) -> FedDisk:
    given = {"estimator": "direct", "density_rounds": 2, "hidden": (6,), "low": -3.0, "high": 3.0}
    return recipes.feddisk(setting, **(given | {"temper": 1.0} | options))


def fast(algorithm: FedDisk) -> FedDisk:
    """With small batches and large steps, so that densities come apart in a few of them."""
    return replace(algorithm, local=replace(algorithm.local, lr=0.05, batch=8))


def weighed(algorithm: FedDisk, federation: Federation, cohort: int | None = None) -> Round:
    return final(algorithm, federation, algorithm.before, cohort=cohort)


# ------------------------------------------------------------------ bounds and sizes


def drawn(n: int = 40, spread: float = 3.0, seed: int = 0) -> Tensor:
    return spread * torch.randn(n, generator=generator(seed, "logs"), dtype=torch.float64)


@pytest.mark.parametrize("spread", [1e-3, 1.0, 5.0, 400.0])
@pytest.mark.parametrize("low", [0.01, 0.3, 0.9])
def test_weights_keep_to_both_bounds_and_have_mean_one(spread: float, low: float) -> None:
    logs = drawn(spread=spread)
    held, least = torch.ones(40).bool(), torch.tensor(low, dtype=torch.float64)
    a = bounded(logs, held, least, 4.0)
    assert float(a.mean()) == pytest.approx(1.0, abs=1e-12)
    assert low - 1e-12 <= float(a.min()) <= float(a.max()) <= 4.0 + 1e-12
    # Between the bounds they are the ratios, up to one factor.
    free = (a > low + 1e-9) & (a < 4.0 - 1e-9)
    factor = a[free].log() - logs[free]
    assert free.any()
    assert float(factor.max() - factor.min()) < 1e-9
    order = logs.argsort()
    assert (a[order].diff() >= 0).all()
    shifted = bounded(logs + 123.0, held, least, 4.0)
    assert float((a - shifted).abs().max()) < 1e-9


def test_wide_bounds_give_the_plain_ratio() -> None:
    """The control: the same logs within tight bounds are something else."""
    logs = drawn(spread=1.0)
    held = torch.ones(40).bool()
    plain = logs.exp() / logs.exp().mean()
    wide = bounded(logs, held, torch.tensor(1e-6), 1e6)
    assert float((wide - plain).abs().max()) < 1e-12
    assert float((bounded(logs, held, torch.tensor(0.2), 2.0) - plain).abs().max()) > 0.1


def test_equal_ratios_and_one_client_give_exactly_one() -> None:
    held = torch.ones(7).bool()
    for value in (0.0, -611.3, 0.1):
        a = bounded(torch.full((7,), value), held, torch.tensor(0.3), 10.0)
        assert a.tolist() == [1.0] * 7
    alone = bounded(drawn(7), held, torch.tensor(1.0), 10.0)
    assert alone.tolist() == [1.0] * 7
    assert bounded(drawn(7), held, torch.tensor(0.999), 10.0).tolist() != [1.0] * 7


def test_padding_has_no_weight_and_no_say() -> None:
    logs, held = drawn(12), torch.arange(12) < 9
    a = bounded(logs, held, torch.tensor(0.1), 5.0)
    alone = bounded(logs[:9], held[:9], torch.tensor(0.1), 5.0)
    assert torch.equal(a[:9], alone)
    assert not a[9:].any()


def test_effective_sizes() -> None:
    assert float(effective_size(torch.full((6,), 0.3))) == pytest.approx(6.0)
    assert float(effective_size(torch.tensor([1.0, 0.0, 0.0]))) == 1.0
    # One of weight 10 among 90 of weight 0.1, times any factor: (10 + 9)^2 / (100 + 0.9).
    w = torch.cat([torch.tensor([10.0]), torch.full((90,), 0.1)])
    assert float(effective_size(3 * w)) == pytest.approx(361 / 100.9)


# ------------------------------------------------------------------ terms and ratios


def view(out: dict[str, Tensor], w: Tensor) -> View:
    y = torch.zeros(len(w)).long()
    batch = Batch(torch.zeros(len(w), 1), y, w, y, torch.tensor(float(len(w))))
    return View(Model(torch.nn.Identity()), {}, out, batch, {})


def test_losses_are_their_equations() -> None:
    w, q = torch.tensor([1.0, 2.0, 0.0]), torch.tensor([-3.0, -1.0, -50.0])
    assert float(NegativeLogDensity()(view({"log_density": q}, w))) == pytest.approx(5.0 / 3)
    z = torch.tensor([[0.5, -1.0], [2.0, 0.3], [9.0, 9.0]])
    h = z.sigmoid()
    expected = (w * -(h[:, 0].log() + (1 - h[:, 1]).log()) / 2).sum() / 3
    assert float(PairEntropy()(view({"logits": z}, w))) == pytest.approx(float(expected), rel=1e-5)


def densities() -> tuple[Model, dict[str, Tensor], dict[str, Tensor]]:
    model = build(lambda: Made((FEATURES,), (12,), seed=1, low=-3.0, high=3.0), 1)
    p, _ = model.init()
    source = generator(0, "own")
    q = {k: v + 0.3 * torch.randn(v.shape, generator=source) for k, v in p.items()}
    return model, p, q


def test_the_direct_ratio_is_the_difference_of_logs() -> None:
    model, p, q = densities()
    data = make_clients()[3]
    for temper in (1.0, 0.25):
        got, loss = Direct(temper)(model, p, q, data, {})
        logs = [model(params, {}, data.x)["log_density"] for params in (p, q)]
        assert torch.allclose(got, temper * (logs[0] - logs[1]).double(), atol=1e-5)
        assert float(loss) == pytest.approx(-float(logs[1].mean()), rel=1e-5)


def classified(epochs: int) -> Classified:
    net = build(lambda: Discriminator(FEATURES, 20), 0)
    return Classified(net, Local(lr=0.05, epochs=epochs, batch=20, optimizer="adam"))


def ratio_of(
    estimate: Classified, model: Model, p: Any, q: Any, data: ClientData
) -> tuple[Tensor, Tensor]:
    plans = plan_all(estimate.phases(), data, 1, 0, int(data.id))
    return estimate(model, p, q, data, plans)


def test_the_classifier_starts_at_one_and_learns_to_tell() -> None:
    model, p, q = densities()
    data = make_clients(sizes=(80,))[0]
    estimate = classified(6)
    ratio, loss = ratio_of(estimate, model, p, q, data)
    same, level = ratio_of(estimate, model, p, p, data)
    assert float(loss) < 0.6 < math.log(2)
    assert float(ratio.mean()) < -0.5  # what only q's network says is taken for q's
    assert float(same.abs().max()) < 0.05  # sampling error of nothing but rounding
    assert float(level) == pytest.approx(math.log(2), abs=1e-3)
    tempered, _ = ratio_of(replace(estimate, temper=0.5), model, p, q, data)
    assert torch.equal(tempered, 0.5 * ratio)


def test_no_row_is_scored_by_the_network_that_saw_it() -> None:
    """Changing one even row moves the scores of odd rows, and of even rows its own alone."""
    model, p, q = densities()
    data = make_clients(sizes=(40,))[0]
    other = data._replace(x=data.x.index_fill(0, torch.tensor([6]), 2.5))
    estimate = classified(2)
    one, two = (ratio_of(estimate, model, p, q, d)[0] for d in (data, other))
    moved = (one != two).nonzero().flatten()
    assert set(moved[moved % 2 == 0].tolist()) <= {6}
    assert (moved % 2 == 1).sum() > 15


def test_blocks_do_not_change_scores() -> None:
    model, p, _ = densities()
    x = torch.randn(600, FEATURES)
    assert torch.allclose(scored(model, p, x)["log_density"], model(p, {}, x)["log_density"])


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
    assert apart(got.server["params"], federation.params) == 0
    for t in (1, 2):
        updates = []
        for i, data in enumerate(alone.clients):
            plans = plan_all(algorithm.at(t).phases(), data, t, 0, i)
            renamed = {"train0": plans["density0"]}
            message = plain.broadcast(server.server, i)
            state = plain.init_client(first, {}, data)
            updates.append(plain.client_update(message, state, data, renamed)[0])
        stacked = stack(updates)
        weights = plain.weigh(server.server, torch.arange(len(SIZES)))
        stacked["cohort"] = {"id": torch.arange(len(SIZES)), "weight": weights}
        server = server._replace(server=server.server | plain.server_update(
            server.server, stacked, 0
        ))  # fmt: skip
    assert apart(got.server["density"], server.server["params"]) == 0
    assert apart(got.server["density"], first) > 1e-3
    own = [got.states[i]["density"] for i in range(len(SIZES))]
    assert all(apart(a, got.server["density"]) > 1e-4 for a in own)
    assert apart(own[0], own[1]) > 1e-4


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
        told = server | {"cohort": {"id": ids, "weight": weights}}
        replies = [
            stage.client_update(stage.broadcast(told, i), states[i], d, plans_of(stage, d, t))
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
    rounds = range(1, algorithm.before + 1)

    def as_the_first(stage: Algorithm, data: ClientData, t: int) -> Any:
        return plan_all(stage.phases(), data, t, 0, 0)

    def each_its_own(stage: Algorithm, data: ClientData, t: int) -> Any:
        return plan_all(stage.phases(), data, t, 0, int(data.id))

    federation = federated(twins(4))
    server, states = play(algorithm, federation, rounds, as_the_first)
    for state in states:
        assert apart(state["density"], server["density"]) == 0
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
        ess = float(played.server["importance"]["ess"][i])
        assert ess == pytest.approx(float(a.sum() ** 2 / (a**2).sum()))
    assert apart(played.server["params"], federated().params) == 0


def inner_from(setting: Setting, federation: Federation, algorithm: FedDisk, rounds: int) -> Round:
    """The inner method's rounds, at the batches that it has after the density rounds."""
    late = start(algorithm.inner, federation)._replace(t=algorithm.before)
    return final(algorithm.inner, federation, algorithm.before + rounds, after=late)


@pytest.mark.parametrize("mu", [0.0, 0.5])
def test_weights_of_one_are_the_inner_method(inputs: Setting, federated: Any, mu: float) -> None:
    algorithm, federation = direct(inputs, mu=mu), federated()
    before = weighed(algorithm, federation)
    ones = {
        i: s | {"importance": {"a": torch.ones_like(s["importance"]["a"])}}
        for i, s in before.states.items()
    }
    rounds = algorithm.before + 2
    got = final(algorithm, federation, rounds, after=before._replace(states=ones))
    plain = inner_from(inputs, federation, algorithm, 2)
    assert apart(got.server["params"], plain.server["params"]) == 0
    weighted = final(algorithm, federation, rounds, after=before)
    assert apart(weighted.server["params"], plain.server["params"]) > 1e-6  # the control


def test_weights_are_data(inputs: Setting, federated: Any) -> None:
    """A round of FedDisk is the inner method's round on clients with `w` times their weights."""
    algorithm, federation = direct(inputs), federated()
    before = weighed(algorithm, federation)
    got = final(algorithm, federation, algorithm.before + 1, after=before)
    heavier = tuple(
        d._replace(w=before.states[i]["importance"]["a"].float())
        for i, d in enumerate(federation.clients)
    )
    plain = inner_from(inputs, replace(federation, clients=heavier), algorithm, 1)
    assert apart(got.server["params"], plain.server["params"]) == 0


def test_any_method_can_be_the_inner_one(inputs: Setting, federated: Any) -> None:
    federation, base = federated(), direct(inputs)
    staged = recipes.fedavgft(replace(inputs, rounds=3), tune_rounds=1)
    for inner in (recipes.scaffold(inputs), recipes.fedpals(inputs, ess=0.6), staged):
        algorithm = replace(base, inner=inner)
        played = final(algorithm, federation, algorithm.before + 3)
        assert apart(played.server["params"], federation.params) > 1e-3
    # FineTune's own rounds are counted from the inner method's first.
    kinds = [type(algorithm.at(t)).__name__ for t in range(1, 7)]
    assert kinds == ["Before", "Before", "Before", "FedDisk", "FedDisk", "FedDisk"]
    tuned = [bool(final(algorithm, federation, t).server["tuned"]["client"].all()) for t in (5, 6)]
    assert tuned == [False, True]


def test_who_is_not_drawn_to_weigh_trains_unweighted(inputs: Setting, federated: Any) -> None:
    algorithm, federation = direct(inputs), federated()
    once = weighed(algorithm, federation, cohort=3)
    ess = once.server["importance"]["ess"]
    assert ((ess > 0) == torch.isin(torch.arange(6), torch.tensor(once.trained))).all()
    fresh = algorithm.init_client(federation.params, {}, federation.clients[0])
    assert fresh["importance"]["a"].tolist() == [1.0] * SIZES[0]
    longer = replace(algorithm, weighing=8)
    assert (weighed(longer, federation, cohort=3).server["importance"]["ess"] > 0).all()


def test_the_made_of_the_report_averages_uniformly(inputs: Setting, federated: Any) -> None:
    algorithm = recipes.made(inputs, density_rounds=1, hidden=(4,))
    server = start(algorithm, federated()).server
    ids = torch.arange(len(SIZES))
    assert algorithm.weigh(server, ids).tolist() == [1 / 6] * 6
    by_size = torch.tensor(SIZES).double() / sum(SIZES)
    assert torch.equal(algorithm.at(1).weigh(server, ids), by_size)
    assert isinstance(algorithm.ratio, Classified)


def test_what_leaves_a_client(inputs: Setting, federated: Any) -> None:
    """A density's change, then one number, then the inner method's update; q_i and a_i stay."""
    algorithm, federation = direct(inputs), federated()
    seen: list[tuple[set[str], set[str]]] = []
    told = algorithm.reveals()
    for t in range(1, 5):
        played = final(algorithm, federation, t - 1) if t > 1 else start(algorithm, federation)
        stage, data = algorithm.at(t), federation.clients[1]
        ids = torch.arange(6)
        cohort = {"id": ids, "weight": stage.weigh(played.server, ids)}
        message = stage.broadcast(played.server | {"cohort": cohort}, 1)
        state = played.states.get(1, algorithm.init_client(federation.params, {}, data))
        plans = plan_all(stage.phases(), data, t, 0, 1)
        update, changed = stage.client_update(message, state, data, plans)
        assert update.keys() <= told.keys()
        assert changed.keys() <= state.keys()
        seen.append(({k for k, v in update.items() if v}, set(update["report"])))
    assert seen == [
        ({"delta", "report"}, {"id", "loss"}),
        ({"delta", "report"}, {"id", "loss"}),
        ({"report"}, {"id", "loss", "ess"}),
        ({"delta", "report"}, {"id", "loss"}),
    ]
    assert "of a density of inputs in rounds 1 to 2" in told["delta"]
    assert "effective sample size" in told["report"]


# ------------------------------------------------------------------ refusals


def test_degenerate_weights_are_refused(inputs: Setting, federated: Any) -> None:
    algorithm = fast(direct(inputs, density_epochs=4, least_ess=0.95))
    with pytest.raises(TrainingError) as caught:
        weighed(algorithm, federated())
    text = str(caught.value)
    assert text.startswith("client ")
    assert "importance weights of its" in text
    assert "less than least_ess = 0.95 allows" in text
    assert "lower temper" in text
    assert weighed(replace(algorithm, least_ess=0.0), federated()).t == 3


def test_the_check_is_the_share_of_the_clients_own_examples() -> None:
    weigh = WeighExamples(densities()[0], Direct(), 10.0, 0.5)
    server = {"importance": {"n": torch.tensor([10.0, 30.0]), "ess": torch.zeros(2)}}

    def fold(ess: float) -> Parts:
        cohort = {"id": torch.tensor([1]), "weight": torch.ones(1)}
        return weigh.fold(server, {"cohort": cohort, "report": {"ess": torch.tensor([ess])}})

    assert fold(15.0)["importance"]["ess"].tolist() == [0.0, 15.0]
    with pytest.raises(TrainingError, match=r"client 1: .* 30 examples are worth 14.9 \(50 %\)"):
        fold(14.9)


def test_settings_out_of_range_are_refused(inputs: Setting, normed: Model) -> None:
    for options, message in (
        ({"density_rounds": 0}, "FedDisk needs 1 or more rounds, got 0"),
        ({"weighing_rounds": 0}, "FedDisk needs 1 or more weighing, got 0"),
        ({"most": 1.0}, "the largest weight must be above 1, got most = 1.0"),
        ({"least_ess": 1.0}, r"least_ess is a share in \[0, 1\), got 1.0"),
        ({"temper": 0.0}, "temper must be above 0 and at most 1, got 0.0"),
        ({"temper": 1.5, "estimator": "classifier"}, "temper must be above 0 and at most 1, got"),
        ({"estimator": "clasifier"}, 'unknown estimator of feddisk.*Did you mean "classifier"'),
        ({"ordering": "reversed"}, "unknown ordering of MADE"),
        ({"low": 2.0, "high": 1.0}, "low must be below high"),
        ({"mu": -1.0}, "Contrastive mu must be a positive number"),
    ):
        for setting in (inputs, replace(inputs, shape=None)):
            with pytest.raises(InputError, match=message):
                direct(setting, **options)
    with pytest.raises(InputError, match="the density has buffers; masks and the like"):
        replace(direct(inputs), density=normed)


def test_tempers_by_default(inputs: Setting) -> None:
    assert recipes.feddisk(inputs, estimator="direct").ratio == Direct(0.02)
    default = recipes.feddisk(inputs).ratio
    assert isinstance(default, Classified)
    assert default.temper == 1.0


def test_without_the_shape_of_inputs_nothing_starts(setting: Setting, federated: Any) -> None:
    """The recipe can be listed and its options checked; a run is refused before its first round."""
    algorithm = recipes.feddisk(setting)
    message = r"no density network: .* Setting\(..., shape=\(1, 28, 28\)\)"
    with pytest.raises(InputError, match=message):
        next(run(algorithm, federated(), 30))


def test_the_first_densities_belong_to_the_settings_seed(inputs: Setting) -> None:
    a, b, c = (direct(replace(inputs, seed=k)).network().init()[0] for k in (0, 0, 1))
    assert apart(a, b) == 0
    assert apart(a, c) > 1e-3


# ------------------------------------------------------------------ MOON with a projection head


def test_moon_compares_the_projection(setting: Setting) -> None:
    """With a head the term is that of z, without one that of the features: other rounds."""
    from fedshift.models.dense import Mlp
    from fedshift.models.projected import projected_mlp

    makers = {
        "with": lambda: projected_mlp((FEATURES,), (10,), CLASSES, out=6),
        "without": lambda: Mlp((FEATURES,), (10,), CLASSES),
    }
    for name, make in makers.items():
        model = build(make, seed=1)
        s = Setting(model, TARGET, setting.local)
        federation = make_federation(model)
        plain, moon = recipes.fedavg(s), recipes.moon(s, mu=1.0)
        for rounds, equal in ((1, True), (2, False)):
            a, b = (final(m, federation, rounds).server["params"] for m in (plain, moon))
            assert (apart(a, b) == 0) == equal, name
        moved = final(moon, federation, 2).server["params"]
        assert all(apart({k: v}, {k: federation.params[k]}) > 0 for k, v in moved.items())
