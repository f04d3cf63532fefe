"""Weights of examples by labels, CCVR, and weights to the mix so far."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import minimize
from torch import Tensor
from torch.nn import functional as F

from fedshift import recipes
from fedshift.algorithms.fedavg import FedAvg
from fedshift.algorithms.method import Method
from fedshift.algorithms.so_far import SoFar
from fedshift.client.local import Local
from fedshift.engine.round import open_round
from fedshift.engine.run import run
from fedshift.errors import InputError
from fedshift.recipes import Setting
from fedshift.seeds import key, numpy_generator
from fedshift.server.combine import Mean
from fedshift.server.label_weights import JointLabels, mass_ess, masses
from fedshift.server.pals import pals_weights
from fedshift.server.virtual import drawn, gaussians, refitted
from fedshift.server.weights import Pals, weights_so_far
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


def weighed(name: str, target: tuple[float, ...]) -> Method:
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


ROUNDS = 3


@pytest.fixture
def known_end(setting: Setting) -> Setting:
    return replace(setting, rounds=ROUNDS)


def test_all_but_the_head_is_fedavg_of_one_round_less(known_end: Setting, federated: Any) -> None:
    federation = federated()
    done = final(recipes.ccvr(known_end, virtual=30), federation, ROUNDS).server
    before = final(recipes.fedavg(known_end), federation, ROUNDS - 1).server
    changed = {k for k, v in done["params"].items() if not torch.equal(v, before["params"][k])}
    assert changed == {"head.weight", "head.bias"}
    assert all(torch.equal(v, before["buffers"][k]) for k, v in done["buffers"].items())


@pytest.mark.parametrize("name", ["ccvr", "ccvr_target"])
def test_the_head_is_the_fit_to_all_examples(known_end: Setting, name: str) -> None:
    """As in one place: features of all examples, their Gaussians, and one fit."""
    federation = make_federation(known_end.model)
    algorithm = getattr(recipes, name)(known_end, virtual=30, ridge=1e-2)
    before = final(recipes.fedavg(known_end), federation, ROUNDS - 1).server
    x, y = (torch.cat([getattr(c, k) for c in federation.clients]) for k in ("x", "y"))
    with torch.no_grad():
        f = known_end.model(before["params"], before["buffers"], x)["features"].double()
    of = F.one_hot(y, CLASSES).double()
    moments = of.mean(0), of.T @ f / len(y), torch.einsum("bk,bi,bj->kij", of, f, f) / len(y)
    shares = torch.tensor(TARGET if name == "ccvr_target" else (1 / CLASSES,) * CLASSES)
    virtual = drawn(*gaussians(*moments), 30, key(federation.seeds.batch, "server", ROUNDS))
    weight, bias = refitted(virtual, shares.double(), 1e-2)
    done = final(algorithm, federation, ROUNDS).server["params"]
    assert torch.allclose(done["head.weight"].double(), weight, atol=1e-3)
    assert torch.allclose(done["head.bias"].double(), bias, atol=1e-3)
    even = getattr(recipes, "ccvr" if name == "ccvr_target" else "ccvr_target")
    other = final(even(known_end, virtual=30, ridge=1e-2), federation, ROUNDS).server["params"]
    assert not torch.allclose(other["head.bias"].double(), bias, atol=1e-2)


def test_labels_that_no_client_has_are_left_out(known_end: Setting) -> None:
    """Clients 0 and 1 have labels 0 to 3; a target of the fifth alone leaves the head as it is."""
    few = make_federation(known_end.model, make_clients()[:2])
    done = final(recipes.ccvr(known_end, virtual=30), few, ROUNDS).server["params"]
    assert done["head.bias"].isfinite().all()
    assert done["head.bias"][4] < done["head.bias"][:4].min()
    unmet = replace(known_end, target=(0.0, 0.0, 0.0, 0.0, 1.0))
    after = final(recipes.ccvr_target(unmet), few, ROUNDS).server["params"]
    before = final(recipes.fedavg(known_end), few, ROUNDS - 1).server["params"]
    assert all(torch.equal(v, before[k]) for k, v in after.items())


LABELS = np.array([[30.0, 10, 0, 0, 0], [0, 20, 20, 0, 0], [5, 0, 0, 45, 0], [2, 2, 2, 2, 2]])
NO_DEBT = np.zeros(5)


def table(labels: NDArray[np.float64] = LABELS) -> dict[str, torch.Tensor]:
    counts = torch.tensor(labels, dtype=torch.float64)
    return {"n": counts.sum(1), "labels": counts}


@pytest.mark.parametrize("options", [{"lam": 0.0}, {"lam": 7.0}, {"ess": 0.6}, {"lam": np.inf}])
def test_all_clients_in_every_round_are_fedpals(options: dict[str, float]) -> None:
    """Then the debt is what the clients cannot mix, and the weights stay."""
    rule = Pals(TARGET, **options)  # type: ignore[arg-type]
    plain = rule(table()).numpy()
    debt = NO_DEBT
    shares = LABELS / LABELS.sum(1, keepdims=True)
    for rounds in range(6):
        a = weights_so_far(rule, table(), debt, rounds).weights
        if rounds == 0:
            assert a.tolist() == plain.tolist()
        assert a == pytest.approx(plain, abs=1e-7)
        debt = debt + np.array(TARGET) - a @ shares
    # With others in between, they would not: the memory has an effect.
    owed = weights_so_far(Pals(TARGET, lam=7.0), table(), np.array([0.5, -0.5, 0, 0, 0]), 3).weights
    assert np.abs(owed - Pals(TARGET, lam=7.0)(table()).numpy()).max() > 0.01


def mean_distance(mixtures: list[NDArray[np.float64]], target: NDArray[np.float64]) -> float:
    return float(np.linalg.norm(target - np.mean(mixtures, axis=0)))


@pytest.mark.parametrize("lam", [0.5, 20.0])
def test_weights_minimise_the_distance_of_the_mean_mixture(lam: float) -> None:
    """t ||T - m||^2 + lam sum_s sum_i a_si^2 / n_i over a_t, the earlier weights given."""
    rng, target = numpy_generator(0, "so far"), np.array(TARGET)
    sizes = LABELS.sum(1)
    shares = LABELS / sizes[:, None]
    earlier = [rng.dirichlet(np.ones(4)) @ shares for _ in range(4)]
    debt = sum((target - m for m in earlier), NO_DEBT)

    def objective(a: NDArray[np.float64]) -> float:
        distance = mean_distance([*earlier, a @ shares], target)
        return 5 * distance**2 + lam * float(np.sum(a**2 / sizes))

    solved = weights_so_far(Pals(TARGET, lam=lam), table(), debt, 4)
    simplex = {"type": "eq", "fun": lambda a: a.sum() - 1}
    theirs = minimize(
        objective, np.full(4, 0.25), bounds=[(0, 1)] * 4, constraints=simplex, tol=1e-14
    )
    assert solved.certified
    assert objective(solved.weights) <= objective(theirs.x) + 1e-10
    assert solved.weights == pytest.approx(theirs.x, abs=1e-4)
    assert objective(Pals(TARGET, lam=lam)(table()).numpy()) > objective(theirs.x) + 1e-4


def test_the_debt_is_what_rounds_have_not_mixed(setting: Setting) -> None:
    """By the weights of the rounds as they were played, over their cohorts."""
    federation = make_federation(setting.model)
    method = recipes.fedpals(setting, ess=0.3, so_far=True)
    assert isinstance(method, SoFar)
    labels = federation.table["labels"].numpy()
    shares, owed = labels / labels.sum(1, keepdims=True), np.zeros(5)
    for current in run(method, federation, rounds=4, cohort=2):
        owed += np.array(setting.target) - current.weights.numpy() @ shares[current.cohort.numpy()]
        mixed = current.server["mixed"]
        assert int(mixed["rounds"]) == current.t
        assert mixed["debt"].numpy() == pytest.approx(owed, abs=1e-12)
        assert abs(float(mixed["debt"].sum())) < 1e-12
