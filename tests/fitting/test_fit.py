"""`fit`: its arguments, its refusals, and that it is an ordinary experiment."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fedshift as fs
from fedshift.algorithms.fedavg import FedAvg
from fedshift.client.objectives import CrossEntropy, Proximal
from fedshift.engine.run import Federation, run
from fedshift.experiments.experiment import run_experiment
from fedshift.fitting.planning import plan
from fedshift.fitting.result import Result
from fedshift.randomness import states
from fedshift.recipes import Setting
from support.custom_tasks import Net, hospitals, rows

QUICK: dict[str, Any] = {"rounds": 3, "steps": 2, "evaluate_every": 1, "progress": False}


@pytest.fixture(scope="module")
def task() -> fs.Task:
    return hospitals()


def weights(result: Result) -> dict[str, torch.Tensor]:
    """The weights as trained."""
    params, buffers = result.models.uncorrected
    return params | buffers


def same(a: Result, b: Result) -> bool:
    return all(torch.equal(v, weights(b)[k]) for k, v in weights(a).items())


def test_the_issue_in_ten_lines(task: fs.Task, tmp_path: Path) -> None:
    result = fs.fit(task, Net, method="fedpals", ess="auto", **QUICK)
    assert "target accuracy" in str(result)
    assert "± " in str(result)
    assert len(repr(result)) < 160
    assert "<table>" in result._repr_html_()
    page = result.report(tmp_path / "report.html").read_text()
    for name in ("east", "south", "west", "ill", "well"):
        assert name in page
    assert result.clients == ("east", "south", "west")
    assert result.summary.selection is not None


@pytest.mark.slow
def test_it_is_the_experiment_that_its_parts_make(task: fs.Task) -> None:
    """Bit for bit what `run` gives for the same federation, and `run_experiment` for its plan."""
    result = fs.fit(task, Net, lr=0.05, **QUICK)
    keys = {k: v for k, v in QUICK.items() if k != "progress"}
    planned = plan(task, Net, "fedavg", lr=0.05, **keys)
    experiment = run_experiment(planned.config, prepared=planned.prepared)
    for name, v in experiment.outcome.params.items():
        assert torch.equal(weights(result)[name], v)
    faster = plan(task, Net, "fedavg", lr=0.06, **keys)
    other = run_experiment(faster.config, prepared=faster.prepared)
    assert not torch.equal(weights(result)["head.bias"], other.outcome.params["head.bias"])
    prepared = planned.prepared
    federation: Federation = prepared.federation()
    local = fs.Local(lr=0.05, steps=2, epochs=None, batch=32)
    *_, last = run(FedAvg(prepared.model, local=local), federation, 3)
    for name, v in last.server["params"].items():
        assert torch.equal(weights(result)[name], v)


def test_networks_of_all_kinds(task: fs.Task) -> None:
    """A module is copied and never changed; a function is called per seed, under that seed."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)).eval()
    before = copy.deepcopy(net.state_dict())
    result = fs.fit(task, net, **QUICK)
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    assert not net.training
    assert any("Every seed starts from the weights" in note for note in result.notes)
    made = fs.fit(task, Net, **QUICK)
    assert not any("Every seed" in note for note in made.notes)
    assert same(made, fs.fit(task, Net, **QUICK))
    assert not same(made, fs.fit(task, Net, seed=1, **QUICK))
    fs.fit(task, "linear", **QUICK)
    small = fs.fit(task, "mlp", hidden=(5,), **QUICK)
    assert weights(small)["head.weight"].shape == (2, 5)
    with pytest.raises(fs.InputError, match="square images"):
        fs.fit(task, "lenet", **QUICK)


@pytest.mark.slow
def test_the_head_is_named() -> None:
    """Control: another head gives other models, and the default is none of this network's."""
    task = hospitals("clients")
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2))
    with pytest.raises(fs.InputError, match="head"):
        fs.fit(task, net, method="fedper", **QUICK)
    results = [fs.fit(task, net, method="fedper", head=h, **QUICK) for h in (("4.",), ("2.", "4."))]
    for result, apart in zip(results, ({"4"}, {"2", "4"}), strict=True):
        a, b = (result.module(c).state_dict() for c in ("north", "south"))
        assert {k[0] for k, v in a.items() if not torch.equal(v, b[k])} == apart
    with pytest.raises(fs.InputError, match="head is "):
        fs.fit(task, net, method="fedper", head=4, **QUICK)


@pytest.mark.slow
def test_generators_of_the_process_stay(task: fs.Task) -> None:
    """Also where the net's function seeds them; control: a draw of the user's changes them."""

    def net(task: fs.Task) -> nn.Module:
        torch.manual_seed(7)
        np.random.seed(7)
        return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))

    assert callable(fs.compare)  # imported now: other packages draw while they are imported
    before = states()
    one = fs.fit(task, net, **QUICK)
    fs.fit(task, Net, **QUICK)
    fs.compare(task, net, ["fedavg"], seeds=1, jobs=1, rounds=1, steps=1)
    fs.load(one.folder, net=net)
    assert not before.moved(states())
    torch.rand(1)
    assert before.moved(states()) == {"torch"}


def test_frozen_layers_stay(task: fs.Task) -> None:
    net = Net(task)
    net.body.requires_grad_(False)
    after = weights(fs.fit(task, net, **QUICK))
    assert torch.equal(after["body.weight"], net.body.weight)
    assert not torch.equal(after["head.weight"], net.head.weight)


@pytest.mark.slow
def test_the_statistics_of_a_frozen_norm_stay(task: fs.Task) -> None:
    """Control: those of one that is trained in part move."""
    body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
    net = nn.Sequential(body, nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    body.requires_grad_(False)
    net[1].weight.requires_grad_(False)
    before = copy.deepcopy(net.state_dict())
    for backend in ("loop", "stacked"):
        after = weights(fs.fit(task, net, backend=backend, **QUICK))
        for name, v in before.items():
            stays = name.startswith("0.") or name == "1.weight"
            assert torch.equal(after[name], v) == stays, name


def mine(setting: Setting, *, mu: float = 0.5) -> FedAvg:
    """FedProx by hand."""
    return FedAvg(setting.model, CrossEntropy() + Proximal(mu), local=setting.local)


@pytest.mark.slow
def test_methods_of_all_kinds(task: fs.Task) -> None:
    """A recipe, the same as a function of Setting, and as an Algorithm; names in the summary."""
    by_name = fs.fit(task, Net, method=fs.method("fedprox", mu=0.5), **QUICK)
    also = fs.fit(task, Net, method="fedprox", mu=0.5, **QUICK)
    function = fs.fit(task, Net, method=mine, **QUICK)
    assert same(by_name, also)
    assert same(by_name, function)
    assert function.summary.method == "mine"
    assert not same(by_name, fs.fit(task, Net, method=fs.method(mine, mu=0.1), **QUICK))
    assert same(
        fs.fit(task, Net, method=mine, mu=0.1, **QUICK),
        fs.fit(task, Net, method=fs.method(mine, mu=0.1), **QUICK),
    )
    with pytest.raises(fs.InputError, match=r"mu: an option of mine.*fs.method\(..., mu="):
        fs.fit(task, Net, method=fs.method(mine), mu=0.1, **QUICK)
    net = by_name.module()
    algorithm = FedAvg(fs.Model(net), local=fs.Local(lr=0.1, steps=2, epochs=None))
    result = fs.fit(task, method=algorithm, **QUICK)
    assert result.summary.method == "FedAvg"
    with pytest.raises(fs.InputError, match="brings its own network"):
        fs.fit(task, Net, method=algorithm, **QUICK)


def accuracy(p: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> float:
    return float((p.argmax(1) == y).mean())


def test_own_metrics(task: fs.Task, tmp_path: Path) -> None:
    """Measured on the target's test rows: in result, evaluated rounds, summary and report."""
    result = fs.fit(task, Net, metrics={"hits": accuracy}, **QUICK)
    trained = result.summary.final.target_accuracy
    assert result.metrics == {"hits": pytest.approx(trained)}
    assert "as trained" in str(result)
    assert [r["hits"] for r in result.rounds] == [r["target_accuracy"] for r in result.rounds]
    assert result.summary.final.others["hits"] == pytest.approx(trained)
    assert "hits" in result.report(tmp_path / "r.html").read_text()
    for odd, match in (
        ({"target_loss": accuracy}, "another number"),
        ({"estimated_loss": accuracy}, "another number"),  # of numbers, runs are chosen by it
        ({"hits": 3}, "give a function"),
    ):
        with pytest.raises(fs.InputError, match=match):
            fs.fit(task, Net, metrics=odd, **QUICK)


@pytest.mark.slow
def test_own_loss(task: fs.Task) -> None:
    """Cross-entropy by hand is the library's; another one is not; FedProx's term stays."""
    usual = fs.fit(task, Net, **QUICK)

    def cross_entropy(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits, y, reduction="none")

    hand = fs.fit(task, Net, loss=cross_entropy, **QUICK)
    assert torch.allclose(weights(usual)["head.bias"], weights(hand)["head.bias"], atol=1e-6)
    focal = fs.fit(task, Net, loss=lambda z, y: cross_entropy(z, y) ** 2, **QUICK)
    assert not torch.allclose(weights(usual)["head.bias"], weights(focal)["head.bias"], atol=1e-3)
    with_term = fs.fit(task, Net, method="fedprox", mu=0.5, loss=CrossEntropy(), **QUICK)
    assert same(with_term, fs.fit(task, Net, method="fedprox", mu=0.5, **QUICK))
    with pytest.raises(fs.InputError, match='reduction="none"'):
        fs.fit(task, Net, loss=F.cross_entropy, **QUICK)
    with pytest.raises(fs.InputError, match="a local loss of its own"):
        fs.fit(task, Net, method="fedrs", loss=cross_entropy, **QUICK)


@pytest.mark.slow
def test_class_weights(task: fs.Task) -> None:
    """Those of 1 change nothing; by name, in order and "balanced" are the same where they agree."""
    usual = fs.fit(task, Net, **QUICK)
    assert same(usual, fs.fit(task, Net, class_weights=[1.0, 1.0], **QUICK))
    by_name = fs.fit(task, Net, class_weights={"ill": 3.0, "well": 1}, **QUICK)
    assert same(by_name, fs.fit(task, Net, class_weights=[3.0, 1.0], **QUICK))
    assert not same(usual, by_name)
    counts = np.array(by_name.summary.label_counts).sum(0)
    balanced = list(counts.sum() / (2 * counts))
    assert same(
        fs.fit(task, Net, class_weights="balanced", **QUICK),
        fs.fit(task, Net, class_weights=balanced, **QUICK),
    )


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"rouns": 5}, 'no keyword "rouns". Did you mean "rounds"'),
        ({"mu": 0.1}, r'fedavg has no option "mu".*fedprox'),
        ({"method": "fedadam", "lr": 0.1}, r'fs.method\("fedadam"\), lr='),
        ({"validation": 0.1}, "the task is cut there"),
        ({"rounds": 0}, "^rounds=0: must be at least 1"),
        ({"lr": "high"}, '^lr="high": must be a number'),
        ({"method": "fedprx"}, 'Did you mean "fedprox"'),
        ({"method": 3}, "method is 3; give a name"),
        ({"resume": True}, "resume=True needs folder="),
        ({"seed": -1}, "seed must be 0 or more"),
        ({"callbacks": [3]}, "callbacks has 3"),
        ({"loggers": ["x"]}, "fs.TensorBoard"),
        ({"patience": 0}, "^patience=0: must be at least 1"),
        ({"method": "local_only"}, 'Make the task with target="clients"'),
    ],
)
def test_what_is_refused(task: fs.Task, given: dict[str, Any], match: str) -> None:
    with pytest.raises(fs.InputError, match=match):
        fs.fit(task, Net, **{"progress": False, **given})


def test_networks_that_are_refused(task: fs.Task) -> None:
    for net, match in (
        (None, "fit needs a network"),
        (3, "net is 3"),
        ("mpl", 'Did you mean "mlp"'),
        (lambda task: 3, "returned 3"),
        (nn.Linear, "needs 2 arguments"),
        (nn.Linear(4, 5), "5 outputs|2 classes"),
    ):
        with pytest.raises(fs.InputError, match=match):
            fs.fit(task, net, **QUICK)
    with pytest.raises(fs.InputError, match="task is the text"):
        fs.fit("patients.csv", Net)  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_targets_rows_change_nothing_in_the_model() -> None:
    """Other rows of the held-out hospital, equal counts: the same model, other scores."""
    x, y, site = rows()
    north = np.array(site) == "north"
    changed = x.copy()
    changed[north] = -changed[north]
    a, b = (
        fs.fit(
            fs.Task.from_arrays(v, y, client=site, target="north"), Net,
            method="fedpals", ess="auto", patience=1, keep="best", **QUICK,
        )
        for v in (x, changed)
    )  # fmt: skip
    assert same(a, b)
    assert a.estimate == b.estimate
    assert a.accuracy != b.accuracy


def test_errors_name_clients(task: fs.Task) -> None:
    def fails(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return logits[:, 0] * float("nan")

    with pytest.raises(fs.TrainingError, match='client "east"'):
        fs.fit(task, Net, loss=fails, **QUICK)


@pytest.mark.slow
def test_schedules(task: fs.Task) -> None:
    """A function of the round; a constant one is lr itself, and half of the rate is not."""
    usual = fs.fit(task, Net, lr=0.2, **QUICK)
    assert same(usual, fs.fit(task, Net, schedule=lambda t: 0.2, **QUICK))
    assert not same(usual, fs.fit(task, Net, schedule=lambda t: 0.2 / t, **QUICK))
    assert not same(usual, fs.fit(task, Net, lr=0.2, schedule="cosine", **QUICK))
    with pytest.raises(fs.InputError, match="leave out lr"):
        fs.fit(task, Net, lr=0.2, schedule=lambda t: 0.2, **QUICK)


def test_cohorts_and_backends(task: fs.Task) -> None:
    """The backend changes no bit where it says so; rounds of two of the three clients run."""
    usual = fs.fit(task, Net, backend="loop", **QUICK)
    assert same(usual, fs.fit(task, Net, **QUICK))
    assert same(usual, fs.fit(task, Net, workers=2, **QUICK))
    drawn = fs.fit(task, Net, cohort=2, **QUICK)
    assert drawn.summary.cohorts is not None
    assert not same(usual, drawn)
    with pytest.raises(fs.InputError, match='unknown backend "lop"'):
        fs.fit(task, Net, backend="lop", **QUICK)


def test_torchs_threads_stay_the_users(task: fs.Task) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        fs.fit(task, Net, **QUICK)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_several_inputs() -> None:
    """A dict of numbers and a mask reaches the network as it was given."""
    draws = np.random.default_rng(0)
    ids, site = draws.integers(1, 9, (200, 5)), draws.choice(list("abc"), 200)
    mask = np.arange(5) < draws.integers(1, 6, (200, 1))
    y = ((ids == 3) & mask).any(1).astype(int)
    both = {"ids": ids, "mask": mask}
    result = fs.fit(fs.Task.from_arrays(both, y, client=site, target="c"), Words, **QUICK)
    with torch.no_grad():
        expected = result.module()({k: torch.from_numpy(v) for k, v in both.items()}).softmax(1)
    assert np.allclose(result.predict(both).probabilities, expected, atol=1e-6)


class Words(nn.Module):
    """The mean of embeddings that a mask lets through."""

    def __init__(self, task: fs.Task) -> None:
        super().__init__()
        self.body = nn.Embedding(9, 4)
        self.head = nn.Linear(4, len(task.classes))

    def forward(self, given: dict[str, torch.Tensor]) -> torch.Tensor:
        assert given["mask"].dtype == torch.bool
        mask = given["mask"][..., None]
        return self.head((self.body(given["ids"]) * mask).sum(1) / mask.sum(1))
