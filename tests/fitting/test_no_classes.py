"""Several labels per example, and which methods train where there are no classes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedshift as fs
from fedshift import recipes
from fedshift.data import Examples
from fedshift.evaluation.scores import score
from fedshift.fitting.planning import plan
from support.number_tasks import Fixed, Net, Routed, prices, symptoms

QUICK: dict[str, Any] = {"rounds": 3, "steps": 5, "lr": 0.05, "progress": False}
# What these need of a tiny run.
OPTIONS: dict[str, dict[str, Any]] = {
    "fedpals": {"ess": 0.5},
    "krum": {"byzantine": 0},
    "multikrum": {"byzantine": 0, "keep": 2},
    **{
        name: {"density_rounds": 1, "hidden": (4,), "low": -20.0, "high": 20.0}
        for name in ("feddisk", "made")
    },
    **{
        name: {"tune_rounds": 1}
        for name in ("fedavgft", "fedproxft", "fedsamft", "fedbabu", "fedbabu_drm_repo")
    },
}
REFUSED = {
    "balanced_softmax", "ccvr", "ccvr_target", "fedas", "fedas_drm_repo", "feddrm",
    "feddrm_shared_head", "fedetf", "fedgela", "fedlc", "fedntd", "fedpac", "fedrs", "fedvls",
    "labelset_ditto", "labelset_fedavg", "labelset_fedprox", "labelset_scaffold",
}  # fmt: skip


# Those in neither list are new: they may do either.
TRAINED = {
    "afl", "confree", "confree_drm_repo", "ditto", "ditto_drm_repo", "fedadam", "fedala",
    "fedala_drm_repo", "fedavg", "fedavg_uniform", "fedavgft", "fedavgm", "fedbabu",
    "fedbabu_drm_repo", "feddecorr", "feddisco", "feddisco_target", "feddisk", "feddyn",
    "fedmedian", "fednova", "fedpac_drm_repo", "fedpals", "fedpals_joint", "fedper", "fedprox",
    "fedproxft", "fedrep", "fedrep_drm_repo", "fedsam", "fedsamft", "fedtrimmed", "fedyogi",
    "iwerm", "krum", "local_only", "made", "moon", "moon_uniform", "multikrum", "oracle", "rfa",
    "scaffold",
}  # fmt: skip


@pytest.fixture(scope="module")
def tasks() -> dict[str, fs.Task]:
    keys = {"target": "clients", "n": 100}
    return {"regression": prices(**keys), "multilabel": symptoms(**keys)}


@pytest.mark.few(4)
@pytest.mark.parametrize("kind", ["regression", pytest.param("multilabel", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", sorted(recipes.__all__))
def test_every_recipe_trains_or_says_in_one_sentence_why_not(
    name: str, kind: str, tasks: dict[str, fs.Task]
) -> None:
    method = fs.method(name, **OPTIONS.get(name, {}))
    traits = recipes.traits_of(name)
    net = Routed if traits.router else Fixed if traits.fixed_head else Net
    refused = ""
    try:
        result = fs.fit(tasks[kind], net, method=method, **QUICK)
        assert np.isfinite(result.summary.final.target_loss)
    except fs.InputError as e:
        refused = str(e)
    assert name not in (TRAINED if refused else REFUSED), refused
    if refused:
        assert f"{name} works with classes" in refused
        assert f'this task is "{kind}"' in refused
        assert ". " not in refused


def test_a_method_that_restricts_nothing_is_not_refused() -> None:
    """Control: FedRS with alpha = 1 is FedAvg."""
    a, b = (
        fs.fit(prices(), Net, method=m, **QUICK) for m in (fs.method("fedrs", alpha=1.0), "fedavg")
    )
    assert a.metrics["rmse"] == b.metrics["rmse"]


def test_several_labels_are_learned(tmp_path: Path) -> None:
    task = symptoms()

    def all_right(p: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> float:
        return float(((p > 0.5) == y).all(1).mean())

    keys = {"rounds": 25, "lr": 0.5, "progress": False, "metrics": {"exact": all_right}}
    result = fs.fit(task, "linear", method="fedpals", ess=0.5, **keys)
    assert result.accuracy > 0.75
    assert result.metrics["exact"] == pytest.approx(result.accuracy)
    assert result.metrics["label_accuracy"] > result.accuracy
    estimate, error = result.estimate
    assert abs(estimate - result.accuracy) < 4 * error
    test = plan(task, "linear", "fedavg").prepared.task.test.x
    answers = result.predict(test[:, :3].numpy())
    assert answers.classes == ("fever", "cough", "rash")
    assert set(answers.names[(answers.probabilities < 0.5).all(1)]) == {"none"}
    right = (answers.probabilities > 0.5) == test[:, 3:].numpy()
    assert right.all(1).mean() == pytest.approx(result.accuracy)
    assert right.mean() == pytest.approx(result.metrics["label_accuracy"])
    assert result.summary.final.target_macro_f1 == pytest.approx(
        f1_by_hand(answers.probabilities > 0.5, test[:, 3:].numpy() > 0)
    )
    assert "subset accuracy" in str(result)
    assert "fever+cough" in result.report(tmp_path / "report.html").read_text()
    again = fs.load(result.save(tmp_path / "run"))
    assert (again.predict(test[:, :3].numpy()).names == answers.names).all()


def f1_by_hand(given: np.ndarray[Any, Any], true: np.ndarray[Any, Any]) -> float:
    return float(np.mean(2 * (given & true).sum(0) / (given.sum(0) + true.sum(0))))


def test_several_labels_of_each_client() -> None:
    result = fs.fit(symptoms(target="clients"), Net, method="fedper", **QUICK)
    assert set(result.accuracies) == {"north", "south", "east", "west"}
    assert result.accuracies == result.client_metrics["accuracy"]


def test_heads_of_networks_with_several_inputs_are_their_own() -> None:
    """Also for classes: the layers are one level deeper, within the module that unpacks inputs."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return self.head(torch.relu(self.body(torch.cat([a, b], 1))))

    draws = np.random.default_rng(0)
    x, client = (
        draws.normal(size=(120, 2)).astype(np.float32),
        np.array(list("abc"))[np.arange(120) % 3],
    )
    task = fs.Task.from_arrays((x, x[:, :1]), x[:, 0] > 0, client=client, target="clients")
    result = fs.fit(task, lambda task: Two(), method="fedper", **QUICK)
    one, two = (result.module(client=c).state_dict() for c in ("a", "b"))
    assert torch.equal(one["body.weight"], two["body.weight"])
    assert not torch.equal(one["head.weight"], two["head.weight"])


@pytest.mark.slow
def test_labels_of_images() -> None:
    """Bytes are scaled to [-1, 1], as for classes."""
    draws = np.random.default_rng(0)
    x = draws.integers(0, 256, (120, 1, 4, 4), dtype=np.uint8)
    y = np.stack([x[:, 0, 0, 0] > 127, x[:, 0, 1, 1] > 127], axis=1)
    client = np.arange(120) % 3
    task = fs.Task.from_arrays(x, y, client=client, target="2", kind="multilabel")
    assert task.input_shape == (1, 4, 4)
    result = fs.fit(task, "linear", rounds=40, lr=0.2, progress=False)
    assert result.accuracy > 0.6
    assert result.predict(x[:3]).probabilities.shape == (3, 2)
    images = task.build().encoding.apply(x)
    assert images.min() == -1
    assert images.max() == 1


def test_scores_of_classes_refuse() -> None:
    """Control: without a number of outputs the network is a classifier's."""
    model = plan(prices(), Net, "fedavg").prepared.model
    examples = Examples(torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(fs.InputError, match="predicts no classes"):
        score(model, *model.init(), examples, 1)
    assert score(replace(model, outputs=None), *model.init(), examples, 1).n == 2
