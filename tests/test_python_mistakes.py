"""Usual mistakes in Python: each is refused before training, in one sentence with the cure."""

# ruff: noqa: F401 - most names are used by what is typed, in python_mistakes.txt

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from fedshift import (
    FedAvg,
    Federation,
    Local,
    Model,
    Router,
    datasets,
    ess_curve,
    estimate_target_accuracy,
    pals_weights,
    prior_shift,
    recipes,
    run,
)
from fedshift.algorithms.ditto import Ditto
from fedshift.algorithms.scaffold import Scaffold
from fedshift.client.objectives import (
    Contrastive,
    CrossEntropy,
    Proximal,
    RestrictedSoftmax,
    Sum,
    Term,
    View,
)
from fedshift.client.oracles import Clip, Sam
from fedshift.client.schedules import Cosine
from fedshift.client.sharing import Share
from fedshift.data import Examples, Task, client_data, register
from fedshift.datasets import label_shift, load_table
from fedshift.diagnose import cost, diagnose
from fedshift.engine.backends import Reply, loop, work
from fedshift.engine.checks.gate import Gate
from fedshift.engine.device import on
from fedshift.engine.one_by_one import channels_last, dense
from fedshift.engine.processes.pool import workers
from fedshift.engine.stacking.stacked import Stacked
from fedshift.engine.storage.client_states import Shelf
from fedshift.errors import InputError
from fedshift.estimate import estimate_target_loss
from fedshift.evaluation.scores import score
from fedshift.experiments.folder.routers import load_router
from fedshift.experiments.folder.run_models import load_models
from fedshift.holdout import hold_out
from fedshift.model import build
from fedshift.models.dense import Mlp
from fedshift.recipes import Setting
from fedshift.router.quality import risk_coverage, threshold
from fedshift.seeds import Seeds, generator, numpy_generator
from fedshift.server.combine import Mean
from fedshift.server.optimizers import Adam, Sgd
from fedshift.server.pals import effective_sample_size
from fedshift.server.prior import calibrate, calibrated_shift, calibration_sums
from fedshift.server.weights import BySize, Pals
from fedshift.shifts import Iid
from fedshift.shifts.covariate import Compose
from fedshift.shifts.noise import GaussianNoise
from fedshift.tasks.task import Task as Federated
from fedshift.tree import flatten, unflatten
from fedshift_papers.datasets.fedpals_clients import Imbalanced
from support.extras import scaffold

SHARES = (0.2, 0.3, 0.5)
COUNTS = [[1, 2, 3]]
FALLING: Any = pd.Series([0.5, 0.3, 0.2], index=[2, 1, 0])  # as `value_counts` gives it
X, Y = torch.randn(12, 4, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 3
CLIENTS: Any = [client_data(X, Y, i) for i in range(3)]
NET: Any = nn.Linear(4, 3)
MODEL = Model(NET)
PARAMS, BUFFERS = MODEL.init()
TABLE = register(CLIENTS, 3)
N, LABELS = TABLE["n"], TABLE["labels"]
W, B = PARAMS["weight"], PARAMS["bias"]
SETTING = Setting(MODEL, SHARES)
METHOD: Any = FedAvg(MODEL)
ARRAYS: Any = {k: v.numpy() for k, v in PARAMS.items()}


def made(**given: Any) -> Federation:
    """A federation with a field replaced."""
    right = {"clients": CLIENTS, "params": PARAMS, "buffers": BUFFERS, "table": TABLE}
    return Federation(**(right | {"seeds": Seeds.of(0)} | given))


FEDERATION: Any = made()
OTHER = Model(nn.Sequential(nn.Linear(4, 3)))
*_, PLAYED = run(METHOD, FEDERATION, 2)


def rule(needs: Any) -> Any:
    """A weight rule that reads these columns."""

    def by_size(table: Any) -> Any:
        return table["n"] / table["n"].sum()

    by_size.needs = needs  # type: ignore[attr-defined]
    return by_size


def ran(method: Any = METHOD, federation: Any = FEDERATION, rounds: Any = 3, **given: Any) -> None:
    """Ask for a run, but for none of its rounds."""
    run(method, federation, rounds, **given)


def played(backend: Any) -> None:
    """A round by a custom backend."""
    next(run(METHOD, FEDERATION, 1, backend=backend))


def weighed(by: Any) -> None:
    """A round with a weight rule of one's own."""
    by.needs = ("n",)
    next(run(FedAvg(MODEL, combine=Mean(by)), FEDERATION, 1))


@dataclass(frozen=True)
class Odd(Term):
    """A term of one's own, of logits and labels; `reads` names an output to read before."""

    value: Any
    reads: str = "logits"

    def __call__(self, view: View) -> Any:
        view.out[self.reads]
        return self.value(view.out["logits"], view.batch.y)


def others(**given: Any) -> Any:
    """The clients, with a field of the second one replaced."""
    return [CLIENTS[0], CLIENTS[1]._replace(**given), CLIENTS[2]]


def scheduled(lr: Any, rounds: int = 3) -> None:
    """A run with a schedule."""
    ran(FedAvg(MODEL, local=Local(lr)), rounds=rounds)


def team(*given: Any, **more: Any) -> None:
    """Start workers."""
    with workers(*given, **more):
        pass


def task(**given: Any) -> Task:
    """A task with a field replaced."""
    right = {"clients": tuple(CLIENTS), "validation": (Examples(X, Y),) * 3, "test": Examples(X, Y)}
    more = {"target": torch.tensor(SHARES), "target_validation": None, "classes": ("a", "b", "c")}
    return Task(**(right | more | given))


CASES = [
    tuple(part.strip() for part in line.split(" -> "))
    for line in (Path(__file__).parent / "support" / "python_mistakes.txt").read_text().splitlines()
    if line and not line.startswith("#")
]


@pytest.mark.few(181)
@pytest.mark.parametrize(("typed", "words"), CASES, ids=[typed for typed, _ in CASES])
def test_mistakes_are_refused_in_one_sentence_with_the_cure(typed: str, words: str) -> None:
    with pytest.raises(InputError) as caught:
        eval(typed)
    message = str(caught.value)
    for part in words.split("; "):
        assert part in message, f"{part!r} is not in: {message}"
    assert "\n" not in message
    assert len(message) < 900  # with the names of all methods


def test_there_are_more_cases_than_were_counted() -> None:
    assert len(CASES) == len({typed for typed, _ in CASES}) >= 200


@pytest.mark.parametrize(
    "typed",
    [
        "FedAvg(MODEL, local=[Local(), Local()])",
        "FedAvg(MODEL, combine=Mean(Pals(list(SHARES), ess=0.5)))",
        "Pals(torch.tensor(SHARES, dtype=torch.float64), ess=np.float64(0.5))",
        "Setting(MODEL, np.array(SHARES), rounds=np.int64(3))",
        "Local(np.float32(0.1), batch=np.int64(4), only=['weight'], oracles=[Sam()])",
        "scheduled(lambda t: max(0.0, 0.1 - 0.1 * t / 3))",
        "scheduled(lambda t: np.float32(0.1))",
        "2 * CrossEntropy() + CrossEntropy() * np.float64(0.5)",
        "ran(rounds=np.int64(2), cohort=np.int64(2), backend=loop)",
        "ran(rounds=0)",
        "Model(NET, freeze_norm=np.bool_(False))",
        "ran(backend=on('cpu', channels_last(loop)))",
        "ran(federation=made(params=NET.state_dict()))",
        "ran(federation=made(clients=tuple(CLIENTS), seeds=Seeds.of(np.int64(7))))",
        "ran(federation=made(table={'n': N}))",
        "recipes.fedprox(SETTING, mu=1)",
        "recipes.afl(SETTING, domains=[0, 1, 1])",
        "client_data(X, Y.bool(), np.int64(0))",
        "unflatten(flatten({'params': PARAMS}), ['params'])",
        "Pals(FALLING.sort_index(), ess=0.5)",
        "pals_weights([[1, 0], [0, 1]], [0.5, 0.5], lam=1)",
        "pals_weights([[0.9, 0.1]], [0.5, 0.5], lam=1)",
        "ran(FedAvg(MODEL, CrossEntropy() + Odd(lambda z, y: z.square().mean())))",
        "ran(federation=made(clients=others(w=torch.ones(12, requires_grad=True))))",
    ],
)
def test_right_uses_that_look_alike_pass(typed: str) -> None:
    eval(typed)


def test_lists_and_arrays_are_the_tuples_that_they_stand_for() -> None:
    exact = Pals(SHARES, ess=0.5)
    assert Pals(list(SHARES), ess=0.5) == Pals(np.array(SHARES), ess=0.5) == exact
    assert hash(Pals(torch.tensor(SHARES, dtype=torch.float64), ess=0.5)) == hash(exact)
    assert Local(only=["weight"]) == Local(only=("weight",)) != Local(only=("bias",))


@pytest.mark.parametrize(
    "typed",
    [
        "ran(FedAvg(MODEL, Sum((CrossEntropy(), Odd(lambda z, y: torch.zeros(()))))))",
        "ran(FedAvg(MODEL, Odd(lambda z, y: F.relu(z - 1e6).sum())))",
        "Mlp((4,), np.array([8]), 3)",
        "estimate_target_accuracy([0.5, 0.7], [0.9, 0.8], [0.5, 0.5])",
        "pals_weights([[1, 0], [0, 1]], [0.5, 0.5], lam=0.0)",
    ],
)
def test_right_uses_beside_these_mistakes(typed: str) -> None:
    """A batch without what a term looks for, units far below 0, weighted counts, one example."""
    eval(typed)
