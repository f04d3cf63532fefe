"""Weights of examples by labels: the target's risk, the largest ESS, and what clients see."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from fedshift import recipes
from fedshift.algorithms.base import Algorithm
from fedshift.algorithms.fedavg import FedAvg
from fedshift.algorithms.label_weights import LabelWeights
from fedshift.client.local import Local
from fedshift.data import register
from fedshift.engine.checks.gate import Gate
from fedshift.engine.round import open_round
from fedshift.errors import InputError
from fedshift.recipes import Setting
from fedshift.server.combine import Mean
from fedshift.server.label_weights import JointLabels, mass_ess, masses, node_ratios, ratios
from fedshift.server.pals import pals_weights
from fedshift.server.weights import Pals
from fedshift.tree import Params
from support.by_hand import final, max_difference, softmax_federation, softmax_regression
from support.federations import CLASSES, TARGET, make_clients, make_federation, one_job

LR = 0.1
ONE_STEP = Local(lr=LR, epochs=1, batch=10_000)
# The clients hold three labels each, so that no mixture of theirs has one alone.
OUTSIDE = (0.0, 0.0, 1.0, 0.0, 0.0)
SIZES = (12, 20, 9)


def target_step(target: tuple[float, ...], federation: Any) -> dict[str, Tensor]:
    """One step along the gradient of sum_y T_y (mean loss of all clients' examples of label y)."""
    params = {k: v.clone().requires_grad_() for k, v in federation.params.items()}
    x, y = (torch.cat([getattr(c, k) for c in federation.clients]) for k in ("x", "y"))
    losses = F.cross_entropy(F.linear(x, params["weight"], params["bias"]), y, reduction="none")
    present = [c for c, T in enumerate(target) if T and bool((y == c).any())]
    risk = sum((target[c] * losses[y == c].mean() for c in present), losses.new_zeros(()))
    grads = torch.autograd.grad(risk / sum(target[c] for c in present), list(params.values()))
    steps = zip(params.items(), grads, strict=True)
    return {k: (v - LR * g).detach() for (k, v), g in steps}


def weighed(name: str, target: tuple[float, ...]) -> Algorithm:
    setting = Setting(softmax_regression(), target, ONE_STEP)
    make: Any = getattr(recipes, name)
    return make(setting, clip=math.inf)


@pytest.mark.parametrize("target", [TARGET, OUTSIDE, (0.1, 0.2, 0.1, 0.2, 0.4)], ids=str)
@pytest.mark.parametrize("name", ["iwerm", "fedpals_joint"])
def test_a_full_step_is_one_on_the_targets_risk(name: str, target: tuple[float, ...]) -> None:
    """Also where no weights of clients alone reach the target."""
    federation = softmax_federation(SIZES)
    target_params = target_step(target, federation)
    assert (
        max_difference(final(weighed(name, target), federation, 1).server["params"], target_params)
        < 1e-9
    )
    # Weights of clients alone: FedAvg's and, outside the hull, FedPALS' as well.
    plain = FedAvg(softmax_regression(), local=ONE_STEP)
    assert max_difference(final(plain, federation, 1).server["params"], target_params) > 1e-3
    pals = replace(plain, combine=Mean(Pals(target, lam=0.0)))
    if target == OUTSIDE:
        assert max_difference(final(pals, federation, 1).server["params"], target_params) > 1e-3


def test_it_is_so_under_fedpals_weights_and_under_a_cap() -> None:
    federation, target_params = (
        softmax_federation(SIZES),
        target_step(TARGET, softmax_federation(SIZES)),
    )
    pals = FedAvg(softmax_regression(), local=ONE_STEP, combine=Mean(Pals(TARGET, ess=0.9)))
    around = LabelWeights(pals, TARGET, math.inf)
    assert max_difference(final(around, federation, 1).server["params"], target_params) < 1e-9
    joint, cap = weighed("fedpals_joint", TARGET), 0.4
    assert float(final(joint, federation, 1).weights.max()) > cap
    capped = final(joint, replace(federation, gate=Gate(max_weight=cap)), 1)
    assert float(capped.weights.max()) <= cap + 1e-12
    assert max_difference(capped.server["params"], target_params) < 1e-9


def test_a_clip_bounds_a_weight_and_leaves_the_targets_risk() -> None:
    federation = softmax_federation(SIZES)
    setting = Setting(softmax_regression(), TARGET, ONE_STEP)
    clipped = recipes.iwerm(setting, clip=1.5)
    everyone = torch.arange(3)
    server = clipped.init(federation.params, {}, federation.table)
    w = clipped.label_weights(server, everyone, clipped.weigh(server, everyone))
    free = replace(clipped, clip=math.inf)
    assert float(w.max()) == 1.5
    raw = free.label_weights(server, everyone, clipped.weigh(server, everyone))
    assert torch.equal(raw.clamp(max=1.5), w)
    assert not torch.equal(raw, w)
    apart_from = max_difference(
        final(clipped, federation, 1).server["params"], target_step(TARGET, federation)
    )
    assert apart_from > 1e-3


def test_global_weights_are_ratios_of_shares() -> None:
    labels = torch.tensor([[30.0, 10.0, 0.0], [20.0, 0.0, 40.0]])
    target, n = torch.tensor([0.5, 0.3, 0.2]).double(), labels.sum(1)
    w, p = ratios(labels, target, n / n.sum()), labels.sum(0) / labels.sum()
    assert torch.allclose(w[labels > 0], (target / p).expand(2, 3)[labels > 0], rtol=1e-7)
    assert not w[labels == 0].any()
    node = node_ratios(labels, target)
    assert torch.allclose(node[0, :2], target[:2] / torch.tensor([0.75, 0.25]))
    assert not node[0, 2]


def test_joint_weights_have_mean_1_on_every_client() -> None:
    labels = register(make_clients(), CLASSES)["labels"]
    table = {"n": labels.sum(1), "labels": labels}
    a = JointLabels(TARGET)(table)
    w = ratios(labels, torch.tensor(TARGET), a)
    means = (w * labels).sum(1) / labels.sum(1)
    assert torch.allclose(means, torch.ones(len(a)).double())
    assert torch.allclose(
        a @ (w * labels / labels.sum(1, keepdim=True)), torch.tensor(TARGET).double()
    )


def test_a_label_of_no_client_is_left_out() -> None:
    labels = torch.tensor([[5.0, 0.0, 5.0], [0.0, 0.0, 10.0]])
    A = masses(labels, torch.tensor([0.25, 0.5, 0.25]))
    assert torch.allclose(A.sum(0), torch.tensor([0.5, 0.0, 0.5]).double())
    assert not masses(labels, torch.tensor([0.0, 1.0, 0.0])).any()
    assert math.isnan(mass_ess(masses(labels, torch.tensor([0.0, 1.0, 0.0])), labels))


@pytest.mark.slow
@given(st.data())
def test_no_weights_of_clients_alone_have_a_larger_ess(data: st.DataObject) -> None:
    """Where FedPALS reaches T, its ESS is at most 1 / sum_y T_y^2 / n_y."""
    clients, classes = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 5))
    cells = st.lists(st.integers(0, 40), min_size=classes, max_size=classes)
    counts = np.array(data.draw(st.lists(cells, min_size=clients, max_size=clients)), dtype=float)
    n = counts.sum(1)
    assume((n > 0).all())
    a = np.array(data.draw(st.lists(st.integers(0, 9), min_size=clients, max_size=clients)), float)
    assume(a.sum() > 0)
    target = a / a.sum() @ (counts / n[:, None])  # covered, by the weights a
    solved = pals_weights(counts, target / target.sum(), lam=0.0)
    labels, T = torch.from_numpy(counts), torch.from_numpy(target)
    joint = mass_ess(masses(labels, T), labels)
    assert joint >= solved.ess * (1 - 1e-6) - 1e-9
    assert joint == pytest.approx(1 / (T[T > 0] ** 2 / labels.sum(0)[T > 0]).sum())
    # Any other masses with the same sums by label have less; here those of FedPALS' weights.
    of_labels = torch.tensor(solved.weights)[:, None] * labels / labels.sum(1, keepdim=True)
    assert mass_ess(of_labels, labels) == pytest.approx(solved.ess)


def test_with_one_label_per_client_it_is_fedpals() -> None:
    counts = np.array([[30.0, 0, 0], [10, 0, 0], [0, 25, 0], [0, 0, 5], [0, 40, 0]])
    target = np.array([0.5, 0.3, 0.2])
    solved, labels = pals_weights(counts, target, lam=0.0), torch.from_numpy(counts)
    assert mass_ess(masses(labels, torch.from_numpy(target)), labels) == pytest.approx(solved.ess)
    a = JointLabels(tuple(target))({"n": labels.sum(1), "labels": labels})
    assert np.abs(a.numpy() - solved.weights).max() < 1e-9
    two = np.array([[30.0, 1, 0], [10, 0, 0], [0, 25, 0], [0, 0, 5], [0, 40, 0]])
    mixed = torch.from_numpy(two)
    best = mass_ess(masses(mixed, torch.from_numpy(target)), mixed)
    assert best > pals_weights(two, target, lam=0.0).ess + 1e-3


def test_a_target_of_the_pooled_shares_is_fedavg(setting: Setting) -> None:
    """Every weight is 1 but for rounding; for the uniform target it is not."""
    federation = make_federation(setting.model)
    labels = federation.table["labels"]
    pooled = tuple((labels.sum(0) / labels.sum()).tolist())
    alike = final(recipes.iwerm(replace(setting, target=pooled)), federation)
    plain = final(recipes.fedavg(setting), federation)
    assert max_difference(alike.server["params"], plain.server["params"]) < 1e-5
    even = final(recipes.iwerm(replace(setting, target=(0.2,) * CLASSES)), federation)
    assert max_difference(even.server["params"], plain.server["params"]) > 1e-3


def test_a_client_is_sent_weights_of_its_labels_alone(setting: Setting) -> None:
    algorithm, federation = recipes.fedpals_joint(setting), make_federation(setting.model)
    for i, client in enumerate(federation.clients):
        w = one_job(algorithm, federation, i).message["label_weights"]["w"]
        lacking = torch.ones(CLASSES, dtype=torch.bool).index_fill(0, client.y, False)
        assert w.shape == (CLASSES,)
        assert not w[lacking].any()
        assert bool(w[client.y.unique()][torch.tensor(TARGET)[client.y.unique()] > 0].all())
    assert "examples per label" in algorithm.reveals()["register"]
    assert "label_weights" not in algorithm.reveals()


def test_clients_without_a_label_of_the_target_are_left_out(setting: Setting) -> None:
    one = replace(setting, target=(1.0, 0.0, 0.0, 0.0, 0.0))
    federation = make_federation(setting.model)
    holders = (federation.table["labels"][:, 0] > 0).nonzero().flatten().tolist()
    assert 0 < len(holders) < len(federation.clients)
    assert list(final(recipes.fedpals_joint(one), federation, 1).trained) == holders
    # The global form asks everyone, and those that lack the label move nothing.
    played = final(recipes.iwerm(one), federation, 1)
    assert len(played.trained) == len(federation.clients)


def test_a_round_without_a_label_of_the_target_changes_nothing(setting: Setting) -> None:
    """By chance of the draw; where no client at all has one, it is refused."""
    federation, cohort = make_federation(setting.model), torch.tensor([0, 1])
    T = [0.0] * CLASSES
    T[4] = 1.0
    assert not federation.table["labels"][cohort, 4].any()
    for make in (recipes.fedpals_joint, recipes.iwerm):
        algorithm = make(replace(setting, target=tuple(T)))
        server = algorithm.init(federation.params, federation.buffers, federation.table)
        opened = open_round(algorithm, server, cohort, 1)
        assert not any(opened.message(i)["label_weights"]["w"].any() for i in (0, 1))
        none = {**server, "table": {k: v[:2] for k, v in server["table"].items()}}
        with pytest.raises(InputError, match="no client has an example of a label that the"):
            open_round(algorithm, none, cohort, 1).message(0)


def test_what_is_refused(setting: Setting) -> None:
    with pytest.raises(InputError, match=r"clip must be 1 or more.*got 0.5"):
        recipes.iwerm(setting, clip=0.5)
    with pytest.raises(InputError, match="must sum to 1"):
        LabelWeights(recipes.fedavg(setting), (0.5, 0.2))
    with pytest.raises(InputError, match="must sum to 1"):
        JointLabels((0.5, 0.2))
    with pytest.raises(InputError, match=r"unknown ratio.*Did you mean \"node\""):
        recipes.iwerm(setting, ratio="nodes")  # type: ignore[arg-type]
    federation = make_federation(setting.model)
    other = LabelWeights(recipes.fedavg(setting), (0.5, 0.5))
    with pytest.raises(InputError, match="the target has 2 labels, and clients register 5"):
        other.init(federation.params, federation.buffers, federation.table)


def test_examples_of_weight_0_teach_nothing(setting: Setting) -> None:
    """Other inputs of labels outside the target change no bit; of labels inside they do."""
    clients, algorithm = make_clients(), recipes.iwerm(setting)

    def moved(label: int) -> Params:
        others = [c._replace(x=c.x + 3.0 * (c.y == label)[:, None]) for c in clients]
        return final(algorithm, make_federation(setting.model, tuple(others))).server["params"]

    plain = final(algorithm, make_federation(setting.model)).server["params"]
    assert not max_difference(plain, moved(4))
    assert max_difference(plain, moved(1)) > 1e-3
