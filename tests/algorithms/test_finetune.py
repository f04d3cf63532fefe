"""Fine-tuning after a federated method, and schedules that run on through it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from fedshift import recipes
from fedshift.algorithms.base import Algorithm
from fedshift.algorithms.fedavg import FedAvg
from fedshift.algorithms.finetune import FineTune
from fedshift.algorithms.local_only import LocalOnly
from fedshift.client.local import Local, plan_all
from fedshift.client.objectives import CrossEntropy
from fedshift.client.oracles import Clip, Sam
from fedshift.client.schedules import Cosine
from fedshift.engine.backends import ClientUpdate, Job, loop
from fedshift.engine.run import Federation, Round, run
from fedshift.errors import InputError
from fedshift.model import Model
from fedshift.recipes import Setting
from support.by_hand import THREE, final, max_difference, quadratic_federation, quadratic_model
from support.federations import TARGET, double, make_clients, make_federation

TUNED: dict[str, Callable[..., Algorithm]] = {
    "fedavgft": recipes.fedavgft,
    "fedproxft": recipes.fedproxft,
    "fedsamft": recipes.fedsamft,
}
each = pytest.mark.parametrize("make", TUNED.values(), ids=TUNED)


@pytest.fixture
def four(setting: Setting) -> Setting:
    """A run of four rounds."""
    return replace(setting, rounds=4)


def served(algorithm: Algorithm, federation: Federation, played: Round, client: int) -> Any:
    """The parameters that a client serves after a round."""
    data = federation.clients[client]
    fresh = algorithm.init_client(federation.params, federation.buffers, data)
    state = played.states.get(client, fresh)
    return algorithm.at(played.t).model_for(played.server, state)[0]


def test_cosine_is_the_formula() -> None:
    """The paper's protocol: rounds 601, 701 and 751 of 800 run at very small rates."""
    rate = Cosine(0.01, 800)
    assert rate(1) == 0.01
    assert rate(401) == pytest.approx(0.005)
    for t, value in ((601, 1.46e-3), (701, 3.8e-4), (751, 9.6e-5)):
        assert rate(t) == pytest.approx(value, rel=5e-3)
    assert all(a > b > 0 for a, b in pairwise(map(rate, range(1, 801))))
    assert Cosine(0.3, 1)(1) == 0.3


def test_cosine_ends() -> None:
    for t in (0, 5):
        with pytest.raises(InputError, match=f"no rate for round {t}: it was made for rounds 1 to"):
            Cosine(0.1, 4)(t)
    with pytest.raises(InputError, match="Cosine lr must be a positive number, got 0"):
        Cosine(0.0, 4)
    with pytest.raises(InputError, match="Cosine rounds must be at least 1, got 0"):
        Cosine(0.1, 0)


def test_a_schedule_that_ends_early_is_refused_before_round_1(mlp: Model, federated: Any) -> None:
    algorithm = FedAvg(mlp, local=Local(lr=Cosine(0.1, 3)))
    with pytest.raises(InputError, match="no rate for round 5"):
        next(run(algorithm, federated(), 5))
    assert len(list(run(algorithm, federated(), 3))) == 3


def test_the_schedule_goes_on_through_tuning(four: Setting, federated: Any) -> None:
    rate = Cosine(0.2, 4)
    algorithm = recipes.fedavgft(replace(four, local=Local(lr=rate)), tune_rounds=2)
    data = federated().clients[0]
    for t in range(1, 5):
        (plan,) = plan_all(algorithm.at(t).phases(), data, t, 0, 0).values()
        assert float(plan.lr) == rate(t)
    with pytest.raises(InputError, match="no rate for round 5"):
        next(run(algorithm, federated(), 5))


@each
def test_without_tuning_it_is_the_inner_method(make: Any, setting: Setting) -> None:
    inner = {"fedavgft": "fedavg", "fedproxft": "fedprox", "fedsamft": "fedsam"}[make.__name__]
    assert make(setting, tune_rounds=0) == getattr(recipes, inner)(setting)


def test_without_pull_or_ascent_it_is_fedavgft(four: Setting) -> None:
    plain = recipes.fedavgft(four, tune_rounds=2)
    assert recipes.fedproxft(four, mu=0.0, tune_rounds=2) == plain
    assert recipes.fedsamft(four, rho=0.0, tune_rounds=2) == plain
    assert recipes.fedproxft(four, tune_rounds=2) != plain


@pytest.mark.few(2)
@each
def test_global_rounds_are_the_inner_methods(make: Any, four: Setting, federated: Any) -> None:
    """Bit for bit, and every client serves the global model: a vote is its answer."""
    algorithm, federation = make(four, tune_rounds=2), federated()
    for a, b in zip(
        run(algorithm, federation, 2, cohort=4),
        run(make(four, tune_rounds=0), federation, 2, cohort=4),
        strict=True,
    ):
        assert max_difference(a.server["params"], b.server["params"]) == 0
        for i in range(6):
            assert max_difference(served(algorithm, federation, a, i), a.server["params"]) == 0


@pytest.mark.few(1)
@each
def test_tuning_is_plain_sgd_from_the_global_model(
    make: Any, four: Setting, federated: Any
) -> None:
    """The same model tuned after any of the three methods: no pull and no ascent is left."""
    algorithm, federation = make(four, tune_rounds=2), federated()
    middle = final(algorithm, federation, 2)
    done = final(algorithm, federation, 4, after=middle)
    assert max_difference(done.server["params"], middle.server["params"]) == 0
    for i, data in enumerate(federation.clients):
        end, context = middle.server["params"], {"client": {"id": data.id}}
        for t in (3, 4):
            plan = plan_all({"personal0": four.local}, data, t, 0, i)["personal0"]
            end = four.local(four.model, CrossEntropy(), end, {}, context, data, plan).params
        assert max_difference(served(algorithm, federation, done, i), end) == 0
        assert max_difference(end, middle.server["params"]) > 1e-3


def test_what_the_setting_does_to_gradients_stays_in_tuning(four: Setting) -> None:
    clipped = replace(four, local=replace(four.local, oracles=(Clip(1.0),)))
    algorithm: Any = recipes.fedsamft(clipped, rho=0.1, tune_rounds=2)
    assert algorithm.tune.oracles == (Clip(1.0),)
    assert algorithm.inner.local.oracles == (Sam(0.1), Clip(1.0))


@pytest.mark.few(2)
@each
def test_one_client_is_plain_sgd(make: Any, four: Setting, mlp: Model) -> None:
    """With one client and nothing but SGD, rounds and tuning are one long local training."""
    plain = {"fedproxft": {"mu": 0.0}, "fedsamft": {"rho": 0.0}}.get(make.__name__, {})
    federation = double(make_federation(mlp, make_clients(sizes=(37,))))
    algorithm = make(four, tune_rounds=2, **plain)
    end, data = federation.params, federation.clients[0]
    for t in range(1, 5):
        (plan,) = plan_all(algorithm.at(t).phases(), data, t, 0, 0).values()
        end = four.local(mlp, CrossEntropy(), end, {}, {}, data, plan).params
    done = final(algorithm, federation, 4)
    assert max_difference(served(algorithm, federation, done, 0), end) < 1e-14
    assert max_difference(done.server["params"], end) > 1e-3


def recorded(algorithm: Algorithm, federation: Federation, **options: Any) -> dict[int, list[Any]]:
    """(client, message, update) of every job, by round."""
    seen: dict[int, list[Any]] = {}

    def backend(update: ClientUpdate, jobs: Any) -> Any:
        todo: list[Job] = list(jobs)
        replies = list(loop(update, todo))
        pairs = zip(todo, replies, strict=True)
        seen[len(seen) + 1] = [(j.client, j.message, r.update) for j, r in pairs]
        return iter(replies)

    final(algorithm, federation, 4, backend=backend, **options)
    return seen


def test_tuning_sends_nothing_but_reports(four: Setting, federated: Any) -> None:
    """The model comes down once per client, in the first tuning round that it is drawn for."""
    algorithm = recipes.fedavgft(four, tune_rounds=3)
    seen, informed = recorded(algorithm, federated(), cohort=4), set()
    assert all("delta" in update for _, _, update in seen[1])
    for t in (2, 3, 4):
        for client, message, update in seen[t]:
            assert update.keys() == {"report"}
            assert set(message) == (set() if client in informed else {"params", "buffers"})
            informed.add(client)
    assert len(seen[4]) == 4
    assert any(not message for _, message, _ in seen[3])


def test_clients_not_drawn_serve_the_global_model(four: Setting, federated: Any) -> None:
    algorithm, federation = recipes.fedavgft(four, tune_rounds=2), federated()
    rounds = list(run(algorithm, federation, 4, cohort=2))
    drawn = set(rounds[2].trained) | set(rounds[3].trained)
    done = rounds[3]
    assert done.server["tuned"]["client"].nonzero().flatten().tolist() == sorted(drawn)
    gaps = [
        max_difference(served(algorithm, federation, done, i), done.server["params"])
        for i in range(6)
    ]
    assert {i for i, gap in enumerate(gaps) if gap > 0} == drawn
    assert 0 < len(drawn) < 6


def test_resumed_anywhere_it_is_the_same_run(four: Setting, federated: Any) -> None:
    algorithm, federation = recipes.fedavgft(four, tune_rounds=2), federated()
    whole = list(run(algorithm, federation, 4, cohort=4))
    for t in (1, 2, 3):
        again = final(algorithm, federation, 4, cohort=4, after=whole[t - 1])
        for i, state in whole[-1].states.items():
            assert max_difference(state["personal"], again.states[i]["personal"]) == 0
    lost = final(algorithm, federation, 4, cohort=4, after=whole[2]._replace(states={}))
    ends = [(whole[-1].states[i]["personal"], lost.states[i]["personal"]) for i in lost.trained]
    assert max(max_difference(*pair) for pair in ends) > 1e-3


def test_tuning_from_the_start_is_local_only(setting: Setting, federated: Any) -> None:
    federation = federated()
    alone = LocalOnly(setting.model, local=setting.local)
    one = final(FineTune(recipes.fedavg(setting), 0, setting.local), federation, 3, cohort=4)
    two = final(alone, federation, 3, cohort=4)
    late = final(FineTune(recipes.fedavg(setting), 1, setting.local), federation, 3, cohort=4)
    for i in two.states:
        assert max_difference(one.states[i]["personal"], two.states[i]["personal"]) == 0
    assert (
        max(
            max_difference(late.states[i]["personal"], two.states[i]["personal"])
            for i in two.states
        )
        > 0
    )


def test_tuning_a_quadratic_is_its_closed_form() -> None:
    """S steps on (1/2)(v - b)'A(v - b): v = b + (I - eta A)^S (w - b)."""
    federation, local = quadratic_federation((4, 2, 3)), Local(lr=0.2, batch=1)
    inner = FedAvg(quadratic_model(), objective=THREE, local=local)
    algorithm = FineTune(inner, 1, local, THREE)
    w = final(inner, federation, 1).server["params"]["weight"].flatten()
    done = final(algorithm, federation, 3)
    for i, steps in enumerate((4, 2, 3)):
        shrink = torch.linalg.matrix_power(torch.eye(2).double() - 0.2 * THREE.a[i], 2 * steps)
        expected = THREE.b[i] + shrink @ (w - THREE.b[i])
        got = done.states[i]["personal"]["weight"].flatten()
        assert float((got - expected).abs().max()) < 1e-14
        assert float((got - w).abs().max()) > 0.1


def test_statistics_are_tuned_too(normed: Model) -> None:
    """With BatchNorm the running statistics are the client's own from the first tuning round on."""
    federation = make_federation(normed)
    setting = Setting(normed, TARGET, Local(batch=7), rounds=2)
    algorithm = recipes.fedavgft(setting, tune_rounds=1)
    done = final(algorithm, federation, 2)
    for i in range(6):
        _, buffers = algorithm.at(2).model_for(done.server, done.states[i])
        mean, shared = buffers["body.1.running_mean"], done.server["buffers"]["body.1.running_mean"]
        assert float((mean - shared).abs().max()) > 1e-3


def test_what_is_revealed_says_until_when(four: Setting) -> None:
    revealed = recipes.fedavgft(four, tune_rounds=3).reveals()
    assert revealed["delta"] == "the change of the shared parameters, until tuning begins"
    assert revealed["report"] == recipes.fedavg(four).reveals()["report"]
    assert "delta" not in FineTune(recipes.fedavg(four), 0, four.local).reveals()


@each
def test_impossible_rounds_are_refused(make: Any, setting: Setting, four: Setting) -> None:
    with pytest.raises(InputError, match="tune_rounds must be 0 or more, got -1"):
        make(four, tune_rounds=-1)
    with pytest.raises(InputError, match=r"tune_rounds=4 of 4 rounds leave none .* give 0 to 3"):
        make(four, tune_rounds=4)
    with pytest.raises(InputError, match=r"tune_rounds=100 .* give Setting\(\.\.\., rounds="):
        make(setting)
    with pytest.raises(InputError, match="fine-tuning after round -1; give 0 or more"):
        FineTune(recipes.fedavg(setting), -1)
