"""FedDyn and FedNova: their fixed points, their state, and one round of each in numpy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedshift import recipes
from fedshift.algorithms.fedavg import FedAvg
from fedshift.algorithms.feddyn import FedDyn
from fedshift.algorithms.fednova import normaliser
from fedshift.algorithms.method import Method
from fedshift.client.local import Local
from fedshift.client.objectives import CrossEntropy, Proximal, Term, View
from fedshift.engine.run import run
from fedshift.recipes import Setting
from fedshift.server.combine import Mean
from fedshift.server.optimizers import Sgd
from fedshift.server.weights import BySize, Uniform
from fedshift.tree import zeros
from support.by_hand import (
    THREE,
    Array,
    Hand,
    final,
    max_difference,
    quadratic_federation,
    quadratic_model,
    softmax_federation,
    softmax_regression,
    theta,
)
from support.extras import feddyn, fednova
from support.federations import double, make_clients, make_federation

UNEQUAL = (2, 5, 12)  # steps, and examples, of the three quadratic clients


@dataclass(frozen=True, eq=False)
class Slopes(Term):
    """F_i(t) = g_i' t: a constant gradient; g [M, d]."""

    g: Tensor

    def __call__(self, view: View) -> Tensor:
        return self.g[view.context["client"]["id"]] @ view.params["weight"].flatten()


# FedDyn


@pytest.mark.parametrize(("cohort", "factor"), [(6, 2.0), (3, 1.5)])
def test_feddyn_starts_as_fedprox_with_a_longer_server_step(
    cohort: int, factor: float, setting: Setting, federated: Any
) -> None:
    """Round 1: m_i = 0, and -h/alpha = (C/N) mean(theta_i - theta) adds to the mean change."""
    federation = double(federated())
    got = final(recipes.feddyn(setting, alpha=0.3), federation, 1, cohort=cohort).server["params"]

    def prox(mu: float, lr: float) -> Any:
        algorithm = FedAvg(
            setting.model, CrossEntropy() + Proximal(mu), setting.local,
            combine=Mean(Uniform()), server=Sgd(lr),
        )  # fmt: skip
        return final(algorithm, federation, 1, cohort=cohort).server["params"]

    assert max_difference(got, prox(0.3, factor)) < 1e-14
    assert max_difference(got, prox(0.3, 1.0)) > 1e-2
    assert max_difference(got, prox(0.6, factor)) > 1e-4


@pytest.mark.parametrize("cohort", [6, 3])
def test_h_is_the_population_mean_of_the_memories(
    cohort: int, setting: Setting, federated: Any
) -> None:
    """h = (1/N) sum_i m_i after every round; absent clients keep m_i."""
    federation, before = double(federated()), {}
    by_cohort = zeros(federation.params)
    for played in run(
        feddyn(setting.model, 0.2, local=setting.local), federation, 4, cohort=cohort
    ):
        memories = [s["memory"] for s in played.states.values()]
        mean = {k: sum(m[k] for m in memories) / 6 for k in federation.params}
        assert max_difference(played.server["memory"], mean) < 1e-14
        for i, state in played.states.items():
            old = before[i]["memory"] if i in before else zeros(federation.params)
            assert (max_difference(state["memory"], old) == 0) == (i not in played.trained)
            by_cohort = {
                k: v + (state["memory"][k] - old[k]) / cohort for k, v in by_cohort.items()
            }
        before = played.states
    wrong = max_difference(by_cohort, played.server["memory"])
    assert wrong > 1e-3 if cohort < 6 else wrong < 1e-14


@pytest.mark.slow
def test_feddyn_stops_at_the_minimiser() -> None:
    """With few and unequal numbers of local steps; FedAvg and FedProx stop elsewhere."""
    model, federation = quadratic_model(), quadratic_federation((3, 4, 6), (5.0, 5.0))
    local, best = Local(lr=0.1, batch=1), THREE.minimiser(torch.ones(3))

    def miss(algorithm: Method, rounds: int = 20) -> float:
        return float((theta(final(algorithm, federation, rounds)) - best).abs().max())

    assert miss(feddyn(model, 1.0, THREE, local), 60) < 1e-7
    assert miss(FedAvg(model, THREE, local, combine=Mean(Uniform()))) > 1e-2
    assert miss(FedAvg(model, THREE + Proximal(1.0), local, combine=Mean(Uniform()))) > 1e-2


@pytest.mark.slow
def test_feddyn_with_adam_stops_at_the_minimiser() -> None:
    model, federation = quadratic_model(), quadratic_federation((2, 2, 2), (2.0, 2.0))
    falling = Local(lr=lambda t: 0.5 * 0.85**t, epochs=5, batch=1, optimizer="adam")
    best = THREE.minimiser(torch.ones(3))
    done = final(feddyn(model, 0.5, THREE, falling), federation, 40)
    assert float((theta(done) - best).abs().max()) < 5e-3
    plain = final(FedAvg(model, THREE, falling), federation, 40)
    assert float((theta(plain) - best).abs().max()) > 0.2


def test_memories_are_gradients_where_local_training_is_exact() -> None:
    """grad F_i(theta_i) - m_i + alpha (theta_i - theta) = 0: the new m_i is grad F_i(theta_i)."""
    model, federation = quadratic_model(), quadratic_federation((1, 1, 1), (5.0, 5.0))

    def gap(steps: int) -> float:
        local = Local(lr=0.2, steps=steps, batch=1)
        algorithm = feddyn(model, 0.5, THREE, local)
        first, second = run(algorithm, federation, 2)
        update, changed = algorithm.client_update(
            algorithm.broadcast(first.server, 1), first.states[1], federation.clients[1],
            {"train0": local.plan(1, 2, torch.Generator().manual_seed(0))},
        )  # fmt: skip
        trained = theta(first) + update["delta"]["weight"].flatten()
        assert max_difference(changed["memory"], second.states[1]["memory"]) == 0
        gradient = THREE.a[1] @ (trained - THREE.b[1])
        return float((changed["memory"]["weight"].flatten() - gradient).abs().max())

    assert gap(200) < 1e-12
    assert gap(2) > 1e-2


def test_feddyn_by_hand() -> None:
    """Three rounds of softmax regression in numpy, two of three clients each."""
    alpha, federation = 0.4, softmax_federation()
    algorithm = feddyn(softmax_regression(), alpha, local=Local(lr=0.2, epochs=2, batch=5))
    hand = Hand(federation, algorithm)
    rounds = list(run(algorithm, federation, 3, cohort=2))
    x = hand.start()
    h, client_h = np.zeros_like(x), [np.zeros_like(x)] * 3
    for t, played in enumerate(rounds, 1):
        ends: list[Array] = []
        for i in played.cohort.tolist():
            y = x
            for rows in hand.batches(i, t):
                y = y - 0.2 * (hand.gradient(y, i, rows) - client_h[i] + alpha * (y - x))
            client_h[i] = client_h[i] - alpha * (y - x)
            ends.append(y)
        h = h - alpha / 3 * sum(y - x for y in ends)
        x = sum(ends) / 2 - h / alpha
        assert np.abs(hand.flat(played.server["params"]) - x).max() < 1e-13
        assert np.abs(hand.flat(played.server["memory"]) - h).max() < 1e-13
    other = final(replace(algorithm, extras=(FedDyn(0.5),)), federation, 3, cohort=2).server[
        "params"
    ]
    assert np.abs(hand.flat(other) - x).max() > 1e-3


# FedNova


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_the_normaliser_is_how_far_unit_gradients_carry(momentum: float) -> None:
    """||a||_1 = |theta - y| / eta for F(t) = 1' t, through the library's own local steps."""
    model, term = quadratic_model(), Slopes(torch.ones(1, 2).double())
    for tau in range(1, 8):
        federation = quadratic_federation((tau,))
        local = Local(lr=0.1, batch=1, momentum=momentum)
        plan = local.plan(tau, 1, torch.Generator().manual_seed(0))
        data, context = federation.clients[0], {"client": {"id": torch.tensor(0)}}
        end = local(model, term, federation.params, {}, context, data, plan).params["weight"]
        norm = normaliser(torch.tensor(float(tau)).double(), momentum)
        assert float((end / -0.1 - norm).abs().max()) < 1e-13
        assert (abs(float(norm) - tau) < 1e-13) == (momentum == 0 or tau == 1)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weights", [BySize(), Uniform()])
def test_fednova_steps_along_the_true_gradient(momentum: float, weights: Any) -> None:
    """With constant gradients: -eta tau_eff sum_i p_i g_i exactly; FedAvg has p_i tau_i."""
    g = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-0.5, 2.0]]).double()
    model, federation = quadratic_model(), quadratic_federation(UNEQUAL)
    local, p = Local(lr=0.1, batch=1, momentum=momentum), weights(federation.table)
    norm = normaliser(torch.tensor(UNEQUAL).double(), momentum)
    step = -0.1 * (p @ norm) * (p @ g)
    nova = theta(final(fednova(model, Slopes(g), local, Mean(weights)), federation, 1))
    assert float((nova - step).abs().max()) < 1e-13
    plain = theta(final(FedAvg(model, Slopes(g), local, combine=Mean(weights)), federation, 1))
    assert float((plain + 0.1 * (p * norm) @ g).abs().max()) < 1e-13
    assert float((plain - step).abs().max()) > 0.1


def fixed_point(algorithm: Method) -> Tensor:
    """theta = R theta + s solved from three single rounds, a round on quadratics being affine."""
    starts = ((0.0, 0.0), (1.0, 0.0), (0.0, 1.0))
    s, x, y = (theta(final(algorithm, quadratic_federation(UNEQUAL, at), 1)) for at in starts)
    return torch.linalg.solve(torch.eye(2).double() - torch.stack([x - s, y - s], 1), s)


@pytest.mark.few(1)
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_fednova_stops_at_the_minimiser_as_the_rate_falls(momentum: float) -> None:
    """Its distance to argmin sum_i p_i F_i is O(eta); FedAvg tends to argmin sum_i p_i tau_i F_i.

    Wang et al. 2020, Theorems 1 and 2 and Section 5.
    """
    model, p = quadratic_model(), torch.tensor([2.0, 5.0, 12.0]) / 19
    norm = normaliser(torch.tensor(UNEQUAL).double(), momentum)
    best, biased = THREE.minimiser(p), THREE.minimiser(p * norm)
    assert float((best - biased).norm()) > 0.3

    def misses(rate: float) -> tuple[float, float, float]:
        local = Local(lr=rate, batch=1, momentum=momentum)
        nova, plain = (fixed_point(a(model, THREE, local)) for a in (fednova, FedAvg))
        gaps = (nova - best, plain - best, plain - biased)
        return tuple(float(v.norm()) for v in gaps)  # type: ignore[return-value]

    coarse, fine = misses(2e-3), misses(1e-3)
    assert fine[0] < 0.02
    assert fine[0] / coarse[0] == pytest.approx(0.5, abs=0.02)
    assert fine[1] > 0.3
    assert fine[2] / coarse[2] == pytest.approx(0.5, abs=0.02)


def test_fednova_by_hand() -> None:
    """Two rounds of softmax regression in numpy: local momentum, decay, server momentum."""
    federation = softmax_federation()
    local = Local(lr=0.1, epochs=2, batch=5, momentum=0.5, decay=0.01)
    algorithm = fednova(softmax_regression(), local=local, server=Sgd(1.0, momentum=0.3))
    hand, p = Hand(federation, algorithm), np.array([12, 20, 9]) / 41
    x = hand.start()
    moment = np.zeros_like(x)
    for t in (1, 2):
        norms, directions = [], []
        for i in range(3):
            y, v, counter, norm = x, np.zeros_like(x), 0.0, 0.0
            for rows in hand.batches(i, t):
                v = 0.5 * v + hand.gradient(y, i, rows) + 0.01 * y
                y = y - 0.1 * v
                counter = counter * 0.5 + 1  # the authors' recursion for ||a_i||_1
                norm += counter
            norms.append(norm)
            directions.append((x - y) / norm)
        change = -(p @ norms) * sum(w * d for w, d in zip(p, directions, strict=True))
        moment = 0.3 * moment + change
        x = x + moment
    done = final(algorithm, federation, 2).server["params"]
    assert np.abs(hand.flat(done) - x).max() < 1e-14
    plain = FedAvg(softmax_regression(), local=local, server=Sgd(1.0, momentum=0.3))
    assert np.abs(hand.flat(final(plain, federation, 2).server["params"]) - x).max() > 1e-3


def test_a_client_without_steps_moves_nothing() -> None:
    """Its normaliser is 0 and so is its change: it takes 1/3 from tau_eff and from the mean."""
    federation = make_federation(softmax_regression(), make_clients(sizes=(0, 16, 16)))
    algorithm = fednova(softmax_regression(), local=Local(batch=8), combine=Mean(Uniform()))
    moved = final(algorithm, federation, 1).server["params"]
    two = final(replace(algorithm, combine=Mean()), federation, 1).server["params"]  # 0, 1/2, 1/2
    start = federation.params
    expected = {k: start[k] + (two[k] - start[k]) * (2 / 3) ** 2 for k in start}
    assert max_difference(moved, expected) < 1e-7
    assert max_difference(moved, two) > 1e-2
