"""Weights to the mix so far: FedPALS with all clients, and a smaller long-run distance without."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize

from fedshift import recipes
from fedshift.algorithms.so_far import SoFar
from fedshift.engine.round import open_round
from fedshift.engine.run import run
from fedshift.errors import InputError
from fedshift.experiments.config.load import validate
from fedshift.experiments.task.preparing import prepare
from fedshift.recipes import Setting
from fedshift.seeds import numpy_generator
from fedshift.server.so_far import weights_so_far
from fedshift.server.weights import Pals
from support.by_hand import softmax_federation, softmax_regression
from support.federations import TARGET, double, make_federation
from support.rounds import last

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


def test_runs_with_all_clients_are_fedpals(setting: Setting) -> None:
    """To the last digits of float64, over rounds of training."""
    federation = double(make_federation(setting.model))
    settled = [
        last(run(recipes.fedpals(setting, ess=0.6, so_far=so_far), federation, rounds=3)).server[
            "params"
        ]
        for so_far in (False, True)
    ]
    for name, value in settled[0].items():
        assert float((settled[1][name] - value).abs().max()) < 1e-7, name


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


@pytest.mark.slow
def test_the_long_run_distance_is_smaller_by_a_smaller_ess() -> None:
    """Figure 8's hundred clients with three labels each, ten per round, an ESS of 10 % or more."""
    plain, so_far = means_of(False, 0.1), means_of(True, 0.1)
    assert so_far[:, 0].mean() <= 0.24
    assert plain[:, 0].mean() >= 0.27
    assert (so_far[:, 0] < plain[:, 0] - 0.03).all()
    assert so_far[:, 1].mean() == pytest.approx(0.13, abs=0.005)
    assert plain[:, 1].mean() == pytest.approx(0.29, abs=0.005)


@pytest.mark.slow
def test_the_long_run_distance_at_equal_ess_is_hardly_smaller() -> None:
    """The same at 40 %, which both settle at: what the page says is left."""
    plain, so_far = means_of(False, 0.4), means_of(True, 0.4)
    assert so_far[:, 1] == pytest.approx(plain[:, 1], abs=0.01)
    assert so_far[:, 0].mean() == pytest.approx(0.31, abs=0.005)
    assert plain[:, 0].mean() == pytest.approx(0.32, abs=0.005)
    assert (so_far[:, 0] < plain[:, 0]).all()


def means_of(so_far: bool, ess: float) -> NDArray[np.float64]:
    """`long_run` of seeds 0 to 2, a row each."""
    return np.array([long_run(*drawn_labels(seed), so_far, seed, ess) for seed in range(3)])


def drawn_labels(seed: int) -> tuple[NDArray[np.float64], tuple[float, ...]]:
    """Label counts of 99 clients with three labels each, and the target's shares."""
    config = validate(
        {
            "data": {"name": "fashion-mnist-mini"},
            "shift": {"kind": "sparsity", "labels_per_client": 3, "clients": 99},
            "model": {"name": "linear"},
            "seeds": {"run": seed},
        }
    )
    prepared = prepare(config)
    return prepared.task.table()["labels"].numpy(), prepared.announced


def long_run(
    labels: NDArray[np.float64], target: tuple[float, ...], so_far: bool, seed: int, ess: float
) -> tuple[float, float]:
    """||T - the mean mixture of 150 rounds||, and the mean ESS of these as a fraction."""
    rng, rule = numpy_generator(seed, "cohorts"), Pals(target, ess=ess)
    fractions = []
    debt, mixtures = np.zeros(len(target)), []
    shares = labels / labels.sum(1, keepdims=True)
    for rounds in range(150):
        ids = np.sort(rng.choice(len(labels), 10, replace=False))
        solved = weights_so_far(rule, table(labels[ids]), debt, rounds if so_far else 0)
        mixtures.append(solved.weights @ shares[ids])
        fractions.append(solved.ess_fraction)
        debt = debt + np.array(target) - mixtures[-1]
    return mean_distance(mixtures, np.array(target)), float(np.mean(fractions))


def test_a_cap_holds_for_owed_labels_as_well() -> None:
    rule = Pals(TARGET, ess=0.9, cap=0.3, strict=False)
    solved = weights_so_far(rule, table(), np.array([3.0, -1, -1, -1, 0]), 5)
    assert solved.weights.max() <= 0.3 + 1e-12
    assert solved.weights.sum() == pytest.approx(1.0)


def test_other_distances_are_refused(setting: Setting) -> None:
    with pytest.raises(InputError, match='so_far adds up squared .* fidelity = "norm"; leave out'):
        recipes.fedpals(setting, lam=1.0, fidelity="norm", so_far=True)


def test_it_wraps_what_trains_in_other_ways() -> None:
    """Around SCAFFOLD: in the first round the weights are the rule's, whatever SCAFFOLD's are."""
    federation, rule = softmax_federation(), Pals(TARGET, lam=2.0)
    method = SoFar(recipes.scaffold(Setting(softmax_regression(), TARGET)), rule)
    server = method.init(federation.params, federation.buffers, federation.table)
    everyone = torch.arange(len(federation.clients))
    opened = open_round(method, server, everyone, 1)
    assert torch.equal(opened.weights, rule(federation.table))
