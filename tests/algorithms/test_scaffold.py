"""SCAFFOLD: the laws of its controls, with the published mistakes as negative controls."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedshift.algorithms.fedavg import FedAvg
from fedshift.algorithms.scaffold import Option, Scaffold
from fedshift.client.local import Local
from fedshift.client.objectives import Proximal, Term
from fedshift.engine.run import Round, run
from fedshift.model import Model
from fedshift.recipes import Setting
from fedshift.server.combine import Mean
from fedshift.server.optimizers import Sgd
from fedshift.server.weights import BySize, Pals, Uniform
from fedshift.tree import Params, Parts, zeros
from support.by_hand import (
    THREE,
    Array,
    Hand,
    Quadratics,
    final,
    max_difference,
    quadratic_federation,
    quadratic_model,
    softmax_federation,
    softmax_regression,
    theta,
    uniform_fedavg,
)
from support.extras import scaffold
from support.federations import TARGET, double, make_clients, make_federation, one_job

both = pytest.mark.parametrize("option", ["I", "II"])
WHOLE = Local(lr=0.3, epochs=1, batch=200)  # Q = 1 step over all examples


def mixed_controls(played: Round, weights: Tensor, params: Params) -> Params:
    """sum_i w_i c_i over the population, c_i = 0 for clients never seen."""
    controls = [played.states[i]["control"] if i in played.states else zeros(params)
           for i in range(len(weights))]  # fmt: skip
    return {k: sum(w * c[k] for w, c in zip(weights, controls, strict=True)) for k in params}


@pytest.mark.few(2)
@both
@pytest.mark.parametrize("cohort", [6, 3])
def test_c_is_the_population_mean_of_c_i(
    option: Option, cohort: int, setting: Setting, federated: Any
) -> None:
    """c = (1/M) sum_i c_i after every round; dividing by the cohort instead is another number."""
    federation = double(federated())
    algorithm = scaffold(setting.model, option, local=setting.local)
    every = torch.ones(6).double() / 6
    by_cohort, before = zeros(federation.params), {}
    for played in run(algorithm, federation, 4, cohort=cohort):
        mean = mixed_controls(played, every, federation.params)
        assert max_difference(played.server["control"], mean) < 1e-14
        for i in played.trained:
            old = before.get(i, {"control": zeros(federation.params)})["control"]
            new = played.states[i]["control"]
            by_cohort = {k: v + (new[k] - old[k]) / cohort for k, v in by_cohort.items()}
        before = played.states
    wrong = max_difference(by_cohort, played.server["control"])
    assert wrong > 1e-2 if cohort < 6 else wrong < 1e-14


@pytest.mark.few(1)
@both
def test_one_full_step_is_fedsgd(option: Option, mlp: Model) -> None:
    """Q = 1, full batches, all clients: the mean of the corrections is c - (1/M) sum_i c_i = 0."""
    federation = double(make_federation(mlp))
    plain = final(uniform_fedavg(mlp, WHOLE), federation, 4).server["params"]
    got = final(scaffold(mlp, option, local=WHOLE), federation, 4).server["params"]
    assert max_difference(got, plain) < 1e-14
    three = replace(WHOLE, epochs=3)
    plain = final(uniform_fedavg(mlp, three), federation, 4).server["params"]
    got = final(scaffold(mlp, option, local=three), federation, 4).server["params"]
    assert max_difference(got, plain) > 1e-3


@pytest.mark.few(1)
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_options_coincide_for_one_full_step(mlp: Model, decay: float) -> None:
    """Both controls are then grad F_i(theta), decay theta included."""
    federation, local = double(make_federation(mlp)), replace(WHOLE, decay=decay)
    one, two = (final(scaffold(mlp, o, local=local), federation, 3) for o in ("I", "II"))
    assert max_difference(one.server["control"], two.server["control"]) < 1e-13
    assert max_difference(one.states[2]["control"], two.states[2]["control"]) < 1e-13
    local = replace(local, batch=8)
    one, two = (final(scaffold(mlp, o, local=local), federation, 3) for o in ("I", "II"))
    assert max_difference(one.server["control"], two.server["control"]) > 1e-3


@pytest.mark.few(1)
@both
def test_identical_clients_are_fedavg(option: Option, mlp: Model) -> None:
    """c = c_i, so nothing is corrected; full batches, so that the order cannot matter."""
    one = make_clients(sizes=(24,))[0]
    copies = tuple(one._replace(id=torch.tensor(i)) for i in range(4))
    local = Local(lr=0.1, epochs=3, batch=24)
    federation = double(make_federation(mlp, copies))
    plain = final(uniform_fedavg(mlp, local), federation, 3).server["params"]
    got = final(scaffold(mlp, option, local=local), federation, 3).server["params"]
    assert max_difference(got, plain) < 1e-13
    other = double(make_federation(mlp, (*copies[:3], make_clients()[3])))
    plain = final(uniform_fedavg(mlp, local), other, 3).server["params"]
    assert (
        max_difference(final(scaffold(mlp, option, local=local), other, 3).server["params"], plain)
        > 1e-4
    )


def two_client_rounds(divisor: int, rounds: int) -> tuple[list[float], float]:
    """max_i |c - c_i| per round and the last theta of option II by hand, with (theta - y) /
    (lr * divisor): F_1 = (t - 10)^2 / 2 and F_2 = (t + 10)^2 / 4, 20 steps of lr 0.1."""
    a, b, lr = (1.0, 0.5), (10.0, -10.0), 0.1
    x, c, controls, gaps = 0.0, 0.0, [0.0, 0.0], []
    for _ in range(rounds):
        ends, news = [], []
        for i in range(2):
            y = x
            for _ in range(20):
                y -= lr * (a[i] * (y - b[i]) - controls[i] + c)
            ends.append(y)
            news.append(controls[i] - c + (x - y) / (lr * divisor))
        x, c, controls = sum(ends) / 2, sum(news) / 2, news
        gaps.append(max(abs(c - v) for v in controls))
    return gaps, x


def test_steps_keep_controls_bounded_and_epochs_do_not() -> None:
    """A published code divides by epochs where the paper divides by steps."""
    term = Quadratics(
        torch.tensor([[[1.0]], [[0.5]]]).double(), torch.tensor([[10.0], [-10.0]]).double()
    )
    federation = quadratic_federation((20, 20), (0.0,))
    algorithm = scaffold(quadratic_model(1), "II", term, Local(lr=0.1, batch=1))
    gaps, x = two_client_rounds(20, 12)
    rounds = list(run(algorithm, federation, 12))
    for gap, played in zip(gaps, rounds, strict=True):
        c = played.server["control"]
        distance = max(max_difference(c, played.states[i]["control"]) for i in range(2))
        assert distance == pytest.approx(gap, abs=1e-12)
    assert max(gaps) < 10
    assert float(theta(rounds[-1])) == pytest.approx(x, abs=1e-12)
    epochs, _ = two_client_rounds(1, 12)
    assert epochs[0] > 50
    assert epochs[-1] > 1e10


@pytest.mark.slow
@both
@pytest.mark.parametrize("term", [THREE, THREE + Proximal(0.5)])
def test_the_fixed_point_is_the_minimiser(option: Option, term: Term) -> None:
    """grad F_i(theta) - c_i + c = 0 there, for any number of steps; FedAvg stops elsewhere.

    A proximal term is 0 there, gradient included.
    """
    model, federation = quadratic_model(), quadratic_federation((4, 4, 4), (5.0, 5.0))
    local, best = Local(lr=0.1, batch=1), THREE.minimiser(torch.ones(3))
    done = final(scaffold(model, option, term, local), federation, 60)
    assert float((theta(done) - best).abs().max()) < 1e-8
    plain = FedAvg(model, term, local, combine=Mean(Uniform()))
    assert float((theta(final(plain, federation, 20)) - best).abs().max()) > 1e-2


@pytest.mark.slow
def test_option_one_allows_adam() -> None:
    """Adam stands still where the corrected gradient is 0; plain averaging stops elsewhere."""
    model, federation = quadratic_model(), quadratic_federation((2, 2, 2), (2.0, 2.0))
    falling = Local(lr=lambda t: 0.5 * 0.85**t, epochs=5, batch=1, optimizer="adam")
    best = THREE.minimiser(torch.ones(3))
    done = final(scaffold(model, "I", THREE, falling), federation, 40)
    assert float((theta(done) - best).abs().max()) < 5e-3
    plain = final(FedAvg(model, THREE, falling), federation, 40)
    assert float((theta(plain) - best).abs().max()) > 0.2


class UniformControls(Scaffold):
    """The paper's 1/M for c beside other weights for theta: the mistake to guard against."""

    def server(self, host: FedAvg, params: Params, buffers: Params, state: Parts) -> Parts:
        parts = super().server(host, params, buffers, state)
        weight = parts["population"]["weight"]
        return parts | {"population": {"weight": torch.full_like(weight, 1 / len(weight))}}


@pytest.mark.slow
def test_weights_reach_the_fixed_point_only_through_the_controls() -> None:
    """With c = sum_i p_i c_i: argmin sum_i p_i F_i. With c = (1/M) sum_i c_i: the uniform one."""
    model, federation = quadratic_model(), quadratic_federation((4, 8, 2), (5.0, 5.0))
    local, size = Local(lr=0.05, steps=4, batch=1), torch.tensor([4.0, 8.0, 2.0])
    fields: dict[str, Any] = {"objective": THREE, "local": local, "combine": Mean(BySize())}
    done = theta(final(scaffold(model, **fields), federation, 100))
    assert float((done - THREE.minimiser(size)).abs().max()) < 1e-7
    naive = theta(final(FedAvg(model, extras=(UniformControls(),), **fields), federation, 100))
    assert float((naive - THREE.minimiser(torch.ones(3))).abs().max()) < 1e-7
    assert float((naive - done).abs().max()) > 0.1


@pytest.mark.few(2)
@both
@pytest.mark.parametrize("cohort", [6, 4])
@pytest.mark.parametrize("lam", [0.0, 20.0])
def test_c_follows_fedpals_weights(
    option: Option, cohort: int, lam: float, setting: Setting, federated: Any
) -> None:
    """c = sum_i alpha_i c_i over the population, zero weights skipped, for any cohort."""
    federation = double(federated())
    weights = Mean(Pals(TARGET, lam=lam))
    alpha = weights.weigh(federation.table)
    algorithm = scaffold(setting.model, option, local=setting.local, combine=weights)
    skipped = 0
    for played in run(algorithm, federation, 5, cohort=cohort):
        skipped += cohort - len(played.trained)
        mixed = mixed_controls(played, alpha, federation.params)
        assert max_difference(played.server["control"], mixed) < 1e-14
    even = mixed_controls(played, torch.ones(6).double() / 6, federation.params)
    assert max_difference(played.server["control"], even) > 1e-3
    assert skipped > 0 if lam == 0 else skipped == 0


@both
def test_two_rounds_by_hand(option: Option) -> None:
    """Softmax regression in numpy: unequal sizes, batches and weights n_i/n, decay, eta_g = 0.7."""
    local, federation = Local(lr=0.2, epochs=2, batch=5, decay=0.01), softmax_federation()
    algorithm = scaffold(
        softmax_regression(), option, local=local, combine=Mean(BySize()), server=Sgd(0.7)
    )
    hand = Hand(federation, algorithm)
    x, p = hand.start(), np.array([12, 20, 9]) / 41
    c, controls = np.zeros_like(x), [np.zeros_like(x)] * 3
    for t in (1, 2):
        deltas: list[Array] = []
        news: list[Array] = []
        for i in range(3):
            y, batches = x, hand.batches(i, t)
            for rows in batches:
                y = y - 0.2 * (hand.gradient(y, i, rows) + 0.01 * y - controls[i] + c)
            mean = controls[i] - c + (x - y) / (0.2 * len(batches))
            news.append(hand.gradient(x, i) + 0.01 * x if option == "I" else mean)
            deltas.append(y - x)
        c = c + sum(w * (new - old) for w, new, old in zip(p, news, controls, strict=True))
        x, controls = x + 0.7 * sum(w * d for w, d in zip(p, deltas, strict=True)), news
    done = final(algorithm, federation, 2)
    assert np.abs(hand.flat(done.server["params"]) - x).max() < 1e-14
    assert np.abs(hand.flat(done.server["control"]) - c).max() < 1e-14
    other = replace(algorithm, extras=(Scaffold("I" if option == "II" else "II"),))
    assert np.abs(hand.flat(final(other, federation, 2).server["params"]) - x).max() > 1e-4


@pytest.mark.parametrize("option", ["I", "II"])
def test_buffers_have_no_control(option: Option, normed: Model) -> None:
    federation = make_federation(normed, make_clients(sizes=(16, 24)))
    algorithm = scaffold(normed, option, local=Local(batch=8))
    done = final(algorithm, federation, 2)
    assert done.server["control"].keys() == federation.params.keys()
    assert int(done.server["buffers"]["body.1.num_batches_tracked"]) == 6
    update, _ = algorithm.client_update(*one_job(algorithm, federation)[1:5])
    assert update["control"].keys() == federation.params.keys()
    # The extra pass of option I sees batches too; it must not move the running statistics.
    plain, _ = FedAvg(normed, local=Local(batch=8)).client_update(
        *one_job(FedAvg(normed, local=Local(batch=8)), federation)[1:5]
    )
    assert max_difference(update["buffers"], plain["buffers"]) == 0
