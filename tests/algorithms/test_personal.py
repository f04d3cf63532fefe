"""Methods with models of clients: Ditto, fine-tuning, FedPer, FedRep, FedBABU, local-only."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fedshift import recipes
from fedshift.algorithms.ditto import Ditto
from fedshift.algorithms.fedala import FedAla
from fedshift.algorithms.fedas import FedAs
from fedshift.algorithms.fedavg import FedAvg
from fedshift.algorithms.fedpac import FedPac
from fedshift.algorithms.finetune import FineTune
from fedshift.algorithms.local_only import LocalOnly
from fedshift.algorithms.method import Method
from fedshift.client.local import Local, plan_all
from fedshift.client.mixing import Mix
from fedshift.client.objectives import CrossEntropy
from fedshift.client.schedules import Cosine
from fedshift.engine.backends import Job, Stage, loop
from fedshift.engine.run import Federation, Round, run
from fedshift.errors import InputError
from fedshift.model import Model
from fedshift.recipes import Setting
from fedshift.server.confree import ConFree
from fedshift.tree import Params, Parts, flatten, split
from support.by_hand import (
    THREE,
    Quadratics,
    final,
    max_difference,
    quadratic_federation,
    quadratic_model,
)
from support.comparing import same
from support.federations import TARGET, one_job

# Momentum and decay, because both move parameters that are frozen in name only.
HEAVY = Local(lr=0.1, epochs=1, batch=8, momentum=0.9, decay=0.01)


@pytest.fixture
def heavy(mlp: Model) -> Setting:
    """A run of three rounds with momentum and decay."""
    return Setting(mlp, TARGET, HEAVY, rounds=3)


def models(algorithm: Method, federation: Federation, played: Round) -> list[Params]:
    """What the clients of a round serve after it."""
    stage = algorithm.at(played.t)
    return [stage.model_for(played.server, played.states[i])[0] for i in range(6)]


def halves(params: Params) -> tuple[Params, Params]:
    """(head, body)."""
    return split(params, ("head.",))


def test_fedreps_phases_move_one_part_each(heavy: Setting, federated: Any) -> None:
    """Head first on the body received, then the body under that head: bit for bit by hand."""
    algorithm, federation = recipes.fedrep(heavy, head_epochs=2), federated()
    done = final(algorithm, federation, 1)
    data, start = federation.clients[4], federation.params
    plans = plan_all(algorithm.phases(), data, 1, 0, 4)
    assert plans["train0"].steps == 2 * plans["train1"].steps
    phases = list(algorithm.phases().values())
    fitted = phases[0](heavy.model, CrossEntropy(), start, {}, {}, data, plans["train0"]).params
    assert max_difference(halves(fitted)[1], halves(start)[1]) == 0
    assert max_difference(halves(fitted)[0], done.states[4]["private"]) == 0
    end = phases[1](heavy.model, CrossEntropy(), fitted, {}, {}, data, plans["train1"]).params
    assert max_difference(halves(end)[0], halves(fitted)[0]) == 0
    update, _ = algorithm.client_update(*one_job(algorithm, federation, 4)[1:5])
    sent = {k: end[k] - start[k] for k in update["delta"]}
    assert max_difference(update["delta"], sent) == 0
    assert max_difference(sent, {k: torch.zeros_like(v) for k, v in sent.items()}) > 1e-2


@pytest.mark.parametrize("part", ["head", "body", "full"])
def test_fedbabu_tunes_the_part_that_is_named(part: Any, heavy: Setting, federated: Any) -> None:
    algorithm = recipes.fedbabu(heavy, tune_rounds=1, tune_part=part)
    federation = federated()
    middle = final(algorithm, federation, 2)
    before = models(algorithm, federation, middle)[0]
    after = models(algorithm, federation, final(algorithm, federation, 3, after=middle))
    for params in after:
        pairs = zip(halves(params), halves(before), strict=True)
        assert [max_difference(new, old) == 0 for new, old in pairs] == [
            part == "body",
            part == "head",
        ]


def test_local_only_does_not_depend_on_others(heavy: Setting, federated: Any) -> None:
    """The same model whatever other clients there are: plain SGD on the client's own batches."""
    algorithm, federation = recipes.local_only(heavy), federated()
    done = final(algorithm, federation, 2)
    clients = federation.clients[:3]
    few = final(algorithm, federated(clients), 2)
    end = federation.params
    for t in (1, 2):
        plan = plan_all(algorithm.phases(), clients[2], t, 0, 2)["personal0"]
        end = HEAVY(heavy.model, CrossEntropy(), end, {}, {}, clients[2], plan).params
    assert max_difference(done.states[2]["personal"], end) == 0
    assert max_difference(few.states[2]["personal"], end) == 0
    assert max_difference(done.states[1]["personal"], end) > 1e-2
    shared = final(recipes.fedavg(heavy), federation, 2)
    assert max_difference(shared.server["params"], end) > 1e-2


def test_published_defaults(heavy: Setting) -> None:
    """The values of the publications and their authors' code, copied by hand."""
    head, body = recipes.fedrep(heavy).local  # type: ignore[misc]
    assert (head.epochs, head.only, body.frozen) == (10, ("head.",), ("head.",))
    babu: Any = recipes.fedbabu(replace(heavy, rounds=20))
    assert (babu.after, babu.tune.only, babu.tune.frozen) == (15, (), ())
    pac: Any = recipes.fedpac(heavy)
    assert (pac.local[0].lr, pac.local[0].epochs) == (0.1, 1)
    assert pac.extras == (FedPac(),)
    slow: Any = recipes.fedpac(replace(heavy, local=replace(HEAVY, lr=0.02)))
    assert [phase.lr for phase in slow.local] == [0.1, 0.02]
    (extra,) = recipes.fedas(heavy).extras
    assert isinstance(extra, FedAs)
    align = extra.align
    assert align is not None
    assert (align.lr, align.batch, align.epochs) == (0.01, 16, 1)
    assert recipes.fedala(heavy).extras == (FedAla(Mix()),)
    mix = Mix()
    assert (mix.lr, mix.layers, mix.share, mix.threshold, mix.window) == (1.0, 1, 0.8, 0.1, 10)
    assert recipes.ditto(heavy).lam == 1.0
    assert recipes.confree(heavy).combine == ConFree(alpha=0.5, normalise=True, scope="tensor")


def test_without_pull_the_personal_model_is_alone(setting: Setting, federated: Any) -> None:
    """lam = 0 takes the steps of local_only, on the same batches, also under partial drawing."""
    federation = federated()
    alone = final(recipes.local_only(setting), federation, 3, cohort=4)
    free = final(recipes.ditto(setting, lam=0.0), federation, 3, cohort=4)
    tied = final(recipes.ditto(setting, lam=0.5), federation, 3, cohort=4)
    assert alone.states.keys() == free.states.keys()
    for i, state in alone.states.items():
        assert max_difference(free.states[i]["personal"], state["personal"]) == 0
        assert max_difference(tied.states[i]["personal"], state["personal"]) > 1e-3


def test_the_global_model_does_not_know_lam(setting: Setting, federated: Any) -> None:
    """w is FedAvg's bit for bit, and so is what every client sends."""
    federation, plain = federated(), recipes.fedavg(setting)
    for lam in (0.0, 5.0):
        algorithm = recipes.ditto(setting, lam=lam)
        assert same(algorithm, plain, federation, 2) == 0
        sent, _ = algorithm.client_update(*one_job(algorithm, federation)[1:5])
        alone, _ = plain.client_update(*one_job(plain, federation)[1:5])
        assert sent.keys() == alone.keys()
        assert max_difference(flatten(sent), flatten(alone)) == 0
    one, two = (final(recipes.ditto(setting, lam=lam), federation, 2) for lam in (1.0, 2.0))
    assert max_difference(one.states[0]["personal"], two.states[0]["personal"]) > 1e-4


def moved(algorithm: Ditto, received: Params, personal: Params, steps: int) -> Params:
    """The personal model of client 0 after `steps` from `personal`; `received` is the message."""
    federation = quadratic_federation((steps, 1, 1))
    data = federation.clients[0]
    plans = plan_all(algorithm.phases(), data, 1, 0, 0)
    state: Parts = algorithm.init_client(personal, {}, data)
    _, changed = algorithm.client_update({"params": received, "buffers": {}}, state, data, plans)
    return changed["personal"]


def point(*at: float) -> Params:
    return {"weight": torch.tensor([at], dtype=torch.float64)}


def test_the_fixed_point_on_a_quadratic() -> None:
    """v = (A + lam I)^{-1} (A b + lam w), w the model received: not the one trained this round."""
    local = Local(lr=0.2, batch=1)
    inner = FedAvg(quadratic_model(), objective=THREE, local=local)
    algorithm = Ditto(inner, 1.5, local, THREE)
    got = moved(algorithm, point(0.7, -0.3), point(5.0, 5.0), 200)["weight"].flatten()
    a, b, w = THREE.a[0], THREE.b[0], torch.tensor([0.7, -0.3], dtype=torch.float64)
    expected = torch.linalg.solve(a + 1.5 * torch.eye(2).double(), a @ b + 1.5 * w)
    assert float((got - expected).abs().max()) < 1e-12
    assert float((got - THREE.b[0]).abs().max()) > 0.1
    one = moved(algorithm, point(0.7, -0.3), point(5.0, 5.0), 1)["weight"].flatten()
    v = torch.tensor([5.0, 5.0]).double()
    assert float((one - (v - 0.2 * (a @ (v - b) + 1.5 * (v - w)))).abs().max()) < 1e-14


def test_one_step_without_gradient_can_reach_the_global_model() -> None:
    """grad F = 0 and eta lam = 1: v <- v - (v - w) = w."""
    flat = Quadratics(torch.zeros(3, 2, 2).double(), THREE.b)
    local = Local(lr=0.25, batch=1)
    inner = FedAvg(quadratic_model(), objective=flat, local=local)
    reached = moved(Ditto(inner, 4.0, local, flat), point(0.7, -0.3), point(5.0, 5.0), 1)
    assert max_difference(reached, point(0.7, -0.3)) < 1e-15
    half = moved(Ditto(inner, 2.0, local, flat), point(0.7, -0.3), point(5.0, 5.0), 1)
    assert max_difference(half, point(2.85, 2.35)) < 1e-14


@pytest.fixture
def four(setting: Setting) -> Setting:
    """A run of four rounds."""
    return replace(setting, rounds=4)


def served(algorithm: Method, federation: Federation, played: Round, client: int) -> Any:
    """The parameters that a client serves after a round."""
    data = federation.clients[client]
    fresh = algorithm.init_client(federation.params, federation.buffers, data)
    state = played.states.get(client, fresh)
    return algorithm.at(played.t).model_for(played.server, state)[0]


def test_the_schedule_goes_on_through_tuning(four: Setting, federated: Any) -> None:
    rate = Cosine(0.2, 4)
    algorithm = recipes.fedavgft(replace(four, local=Local(lr=rate)), tune_rounds=2)
    data = federated().clients[0]
    for t in range(1, 5):
        (plan,) = plan_all(algorithm.at(t).phases(), data, t, 0, 0).values()
        assert float(plan.lr) == rate(t)
    with pytest.raises(InputError, match="no rate for round 5"):
        next(run(algorithm, federated(), 5))


def recorded(algorithm: Method, federation: Federation, **options: Any) -> dict[int, list[Any]]:
    """(client, message, update) of every job, by round."""
    seen: dict[int, list[Any]] = {}

    def backend(stage: Stage, jobs: Any) -> Any:
        todo: list[Job] = list(jobs)
        replies = list(loop(stage, todo))
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
