"""Ditto: two models per client, one of them shared."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fedshift import recipes
from fedshift.algorithms.ditto import Ditto
from fedshift.algorithms.fedavg import FedAvg
from fedshift.client.local import Local, plan_all
from fedshift.client.sharing import Share
from fedshift.engine.run import run
from fedshift.errors import InputError, TrainingError
from fedshift.model import Model
from fedshift.recipes import Setting
from fedshift.server.combine import Mean
from fedshift.server.weights import Pals
from fedshift.tree import Params, Parts, flatten, map_
from support.by_hand import (
    THREE,
    Quadratics,
    final,
    max_difference,
    quadratic_federation,
    quadratic_model,
)
from support.comparing import same
from support.every_method import BEFORE, of_inputs
from support.federations import TARGET, make_federation, one_job


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


def test_any_method_can_train_the_global_model(setting: Setting, federated: Any) -> None:
    """w* from any solver: SCAFFOLD's path is as it is alone."""
    inner = recipes.scaffold(setting)
    assert same(Ditto(inner, 1.0, setting.local), inner, federated(), 2) == 0
    assert same(Ditto(inner, 1.0, setting.local), recipes.fedavg(setting), federated(), 2) > 1e-4


def test_stages_of_the_inner_method_are_kept(setting: Setting, federated: Any) -> None:
    inner = recipes.feddisk(of_inputs(setting), **BEFORE)
    algorithm = Ditto(inner, 1.0, setting.local)
    assert algorithm.at(1) == inner.at(1)  # a density is fitted, and no model is sent
    assert algorithm.at(3) is algorithm
    assert recipes.ditto(setting).at(7) == recipes.ditto(setting)


def test_clients_not_drawn_keep_their_model(setting: Setting, federated: Any) -> None:
    first, second = run(recipes.ditto(setting), federated(), 2, cohort=3)
    idle = set(first.trained) - set(second.trained)
    assert idle
    for i in first.trained:
        gap = max_difference(first.states[i]["personal"], second.states[i]["personal"])
        assert (gap == 0) == (i in idle)


def test_clients_of_weight_zero_still_get_a_model(setting: Setting, federated: Any) -> None:
    inner = FedAvg(setting.model, local=setting.local, combine=Mean(Pals(TARGET, lam=0.0)))
    done = final(Ditto(inner, 1.0, setting.local), federated(), 1)
    assert (done.weights == 0).any()
    assert len(done.trained) == 6
    assert same(Ditto(inner, 1.0, setting.local), inner, federated()) == 0


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


def test_a_personal_model_that_diverges_is_named(setting: Setting, federated: Any) -> None:
    """eta lam = 50: the update does not show it, but the client would serve it."""
    with pytest.raises(TrainingError, match=r"client \d would keep non-finite numbers in .pers"):
        final(recipes.ditto(setting, lam=500.0), federated(), 15)


def test_statistics_of_the_personal_model_are_its_own(normed: Model) -> None:
    federation = make_federation(normed)
    setting = Setting(normed, TARGET, Local(batch=7))
    algorithm = recipes.ditto(setting)
    done = final(algorithm, federation, 2)
    assert same(algorithm, recipes.fedavg(setting), federation) == 0
    params, buffers = algorithm.model_for(done.server, done.states[1])
    assert params is done.states[1]["personal"]
    name = "body.1.running_mean"
    assert float((buffers[name] - done.server["buffers"][name]).abs().max()) > 1e-3


def test_steps_are_shared_out(setting: Setting, federated: Any) -> None:
    """The repository's 10 steps are 5 and 5; an odd one goes to the personal model."""
    for steps, halves in ((10, [5, 5]), (7, [3, 4])):
        local = replace(setting.local, epochs=None, steps=steps, momentum=0.9)
        algorithm = recipes.ditto_drm_repo(replace(setting, local=local))
        plans = plan_all(algorithm.phases(), federated().clients[1], 1, 0, 1)
        assert [p.steps for p in plans.values()] == halves
        assert {phase.momentum for phase in algorithm.phases().values()} == {0.9}


def test_impossible_settings_are_refused(setting: Setting, federated: Any) -> None:
    with pytest.raises(InputError, match="Ditto lam must be 0 or more, got -1"):
        recipes.ditto(setting, lam=-1.0)
    private = FedAvg(setting.model, share=Share(("head.",)))
    with pytest.raises(InputError, match=r"would not receive head\.bias \(2 parameters"):
        next(run(Ditto(private), federated(), 1))
    with pytest.raises(InputError, match=r"counts steps.*Local\(steps=10\)"):
        recipes.ditto_drm_repo(setting)
    one = replace(setting, local=replace(setting.local, epochs=None, steps=1))
    with pytest.raises(InputError, match="ditto_drm_repo gives 1 in 2 .* 1 is too few"):
        recipes.ditto_drm_repo(one)


def test_nothing_of_the_personal_model_is_revealed(setting: Setting) -> None:
    assert recipes.ditto(setting).reveals() == recipes.fedavg(setting).reveals()


def test_inputs_of_a_later_round_are_not_written_to(setting: Setting, federated: Any) -> None:
    algorithm, federation = recipes.ditto(setting), federated()
    played = final(algorithm, federation, 1)
    before = map_(torch.clone, played.states[2]["personal"])
    final(algorithm, federation, 2, after=played)
    assert max_difference(before, played.states[2]["personal"]) == 0
