"""Mistakes that `fit` refuses before training, in one sentence with the cure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from torch import nn
from torch.nn.functional import cross_entropy

import fedshift as fs
from fedshift.algorithms.fedavg import FedAvg
from fedshift.errors import DivergedError, InputError
from fedshift.experiments import experiment
from fedshift.fitting.class_weights import weights_of
from fedshift.fitting.planning import plan
from fedshift.fitting.predicting import label_sets, prediction
from fedshift.recipes import Setting
from fedshift.shifts import Sparsity
from support.custom_tasks import Net, hospitals
from support.number_tasks import Net as OfNumbers
from support.number_tasks import prices, symptoms

QUICK: dict[str, Any] = {"rounds": 2, "steps": 2, "progress": False}


@pytest.fixture(scope="module")
def task() -> fs.Task:
    return hospitals()


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"ill": 3.0}, 'no weight for well; give each class one, or "balanced"'),
        (
            {"ills": 3.0, "well": 1},
            'no class "ills". Did you mean "ill"? The classes are ill, well',
        ),
        ({}, "no weight for ill, well"),
        ([1.0], "2 numbers above 0, one per class, got [1.0]"),
        (["a", "b"], "2 numbers above 0, one per class, got a list: ['a', 'b']"),
        ({"ill": None, "well": 1}, "2 numbers above 0"),
        ({1.0, 2.0}, "2 numbers above 0"),
        (True, "2 numbers above 0"),
        ("even", 'give "balanced", a dict by class'),
    ],
)
def test_class_weights_are_of_every_class(task: fs.Task, given: Any, match: str) -> None:
    with pytest.raises(fs.InputError) as refused:
        fs.fit(task, Net, class_weights=given, **QUICK)
    assert match in str(refused.value)


def test_class_weights_by_name_are_in_the_order_of_the_classes(task: fs.Task) -> None:
    for given in ({"well": 1, "ill": 3.0}, pd.Series({"well": 1.0, "ill": 3.0}), [3.0, 1.0]):
        weights = weights_of(given, task.build())
        assert weights is not None
        assert weights.tolist() == [3.0, 1.0]


@pytest.mark.parametrize(
    ("key", "value", "cure"),
    [
        ("learning_rate", 0.05, "write lr=0.05"),
        ("batch_size", 7, "write batch=7"),
        ("weight_decay", 0.1, "write decay=0.1"),
        ("clients_per_round", 2, "write cohort=2"),
        ("fraction_fit", 0.5, "write cohort=n"),
        ("num_clients", 3, "write cohort=n"),
    ],
)
def test_names_of_other_libraries_keep_their_value(
    task: fs.Task, key: str, value: Any, cure: str
) -> None:
    with pytest.raises(fs.InputError) as refused:
        fs.fit(task, Net, **{key: value})
    assert cure in str(refused.value)


@pytest.mark.parametrize("made", [prices, symptoms])
def test_class_weights_are_refused_where_there_are_no_classes(made: Any) -> None:
    with pytest.raises(fs.InputError, match="class_weights are of classes, and this task is"):
        weights_of("balanced", made(n=100).build())


def fails(p: Any, y: Any) -> float:
    return float(p.nothing)


@pytest.mark.parametrize(
    ("metric", "match"),
    [
        (fails, "test_refused.py, line [0-9]+: AttributeError: .* no attribute 'nothing'"),
        (lambda p, y: "many", 'gave the text "many"'),
        (lambda p, y: None, "gave None"),
        (lambda p, y: p, "gave a ndarray"),
        (lambda p, y: np.inf, "gave inf; .* or NaN where it has none"),
        (lambda p: 1.0, "takes 1 positional argument"),
    ],
)
def test_metrics_are_tried_before_anything_is_trained(
    task: fs.Task, metric: Any, match: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("trained")

    monkeypatch.setattr(experiment, "train", never)
    pattern = r".*metric auc \(.*test_refused.py, line [0-9]+\).*"
    pattern += r"function of \(probabilities \[n, K\], labels \[n\]\) that returns one number"
    keys: dict[str, Any] = {"metrics": {"auc": metric}, **QUICK}
    folder = tmp_path / "run"
    for run in (
        lambda: fs.fit(task, Net, folder=folder, **keys),
        lambda: fs.compare(task, Net, ["fedavg"], seeds=1, **keys),
    ):
        with pytest.raises(fs.InputError, match=match) as refused:
            run()
        refused.match(pattern)
    assert not (folder / "config.resolved.toml").exists()
    with pytest.raises(AssertionError, match="trained"):  # control: a metric that is one
        fs.fit(task, Net, metrics={"auc": lambda p, y: np.nan}, **QUICK)


def test_metrics_get_what_the_kind_of_task_has(task: fs.Task) -> None:
    with pytest.raises(fs.InputError, match=r"\(predicted \[n\], true \[n\]\)"):
        fs.fit(prices(n=100), OfNumbers, metrics={"mine": fails}, **QUICK)
    with pytest.raises(fs.InputError, match=r"\(probabilities \[n, L\], labels \[n, L\]\)"):
        fs.fit(symptoms(n=100), OfNumbers, metrics={"mine": fails}, **QUICK)


def test_trying_a_metric_that_draws_changes_no_number(task: fs.Task) -> None:
    """A metric of bootstrap draws: once at the door, once after round 2, each from one state."""
    seen: list[float] = []

    def drawn(p: Any, y: Any) -> float:
        seen.append(float(np.random.random()))
        return seen[-1]

    np.random.seed(3)
    expected = np.random.random()
    np.random.seed(3)
    fs.fit(task, Net, metrics={"drawn": drawn}, **QUICK)
    assert seen == [expected, expected]
    assert np.random.random() == expected  # control: the program's own draw is still to come


def broken(setting: Setting) -> FedAvg:
    return FedAvg(setting.nothing)  # type: ignore[attr-defined]


def misused(setting: Setting) -> FedAvg:
    return FedAvg(setting.model, 3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("method", "match"),
    [
        (broken, "line [0-9]+: AttributeError: .* no attribute 'nothing'; it must return an Algor"),
        (misused, "FedAvg objective must be a Term, got 3; .*CrossEntropy.*method=misused"),
        (lambda setting: 3, "returned 3; it must return an Algorithm, such as FedAvg"),
        (lambda setting: None, "returned None; it must return an Algorithm"),
        (lambda setting: FedAvg, "returned the class FedAvg; it must return an Algorithm"),
        (lambda setting, mu: 3, "whose options are keyword-only"),
    ],
)
def test_methods_of_ones_own_that_make_none(task: fs.Task, method: Any, match: str) -> None:
    for run in (fs.fit, lambda *given, method, **keys: fs.compare(*given, [method], **keys)):
        with pytest.raises(fs.InputError, match=match) as refused:
            run(task, Net, method=method, **QUICK)
        refused.match("test_refused.py, line|keyword-only")


@pytest.mark.parametrize("answers", [prediction, label_sets])
def test_rows_without_probabilities_get_no_class(answers: Any) -> None:
    with pytest.raises(fs.InputError, match="NaN for 1 of 2 rows, the first of them row 1 "):
        answers(np.array([[0.3, 0.7], [np.nan, np.nan]]), ["ill", "well"])


@pytest.mark.parametrize("hook", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_gradients_are_refused(task: fs.Task, hook: str) -> None:
    net = nn.Linear(*task.input_shape, 2)
    getattr(net.weight, hook)(lambda v: None)
    with pytest.raises(fs.InputError, match='"weight" has a hook'):
        fs.fit(task, net, **QUICK)
    with pytest.raises(fs.InputError, match='"weight" has a hook'):
        fs.Model(net)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("method", "keys", "match"),
    [
        ("moon", {}, r'"features".*returns \[\'logits\'\]; let its forward return .*as "mlp"'),
        ("moon_uniform", {}, '"features"'),
        ("fedpac", {"head": ("2.",)}, '"features"'),
        ("fedas", {"head": ("2.",)}, '"features"'),
        ("feddrm", {"head": ("2.",)}, '"client_logits"'),
        ("fedper", {}, r"^head=\('head.',\) must match .* Name the last by head=.*\"2.\""),
        (
            "labelset_fedavg",
            {},
            r"^head=\('head.',\) matches no .*last linear layer by head=\(...\)",
        ),
    ],
)
def test_networks_without_what_a_method_looks_at(
    method: str, keys: Any, match: str, tmp_path: Path
) -> None:
    """Nothing is written; control: a network that gives it trains."""
    net, folder = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), tmp_path / "run"
    task = hospitals("clients", n=100)
    with pytest.raises(fs.InputError, match=match):
        fs.fit(task, net, method=method, folder=folder, **keys, **QUICK)
    assert not (folder / "config.resolved.toml").exists()
    if method in ("moon", "fedpac", "fedper"):
        fs.fit(task, "mlp", method=method, hidden=(4,), folder=folder, **QUICK)
        assert (folder / "config.resolved.toml").exists()


X, SITE = np.random.default_rng(0).normal(size=(60, 3)).astype(np.float32), ["a", "b", "c"] * 20


@pytest.mark.parametrize(
    ("kind", "keys", "match"),
    [
        ("regression", {"classes": ["low", "high"]}, "classes name labels, and y is numbers"),
        ("regression", {"target": {"low": 0.5, "high": 0.5}}, "label shares have no meaning where"),
        ("regression", {"target": [0.5, 0.5]}, "label shares have no meaning where y is numbers"),
        (
            "multilabel",
            {"bins": 4},
            'bins are of numbers to predict, and this task is "multilabel"',
        ),
        ("classification", {"bins": 4}, "bins are of numbers to predict"),
    ],
)
def test_what_has_no_meaning_for_a_kind_of_task(kind: str, keys: Any, match: str) -> None:
    y = {"regression": X[:, 0], "multilabel": X[:, :2] > 0}.get(kind, X[:, 0] > 0)
    given: dict[str, Any] = {"client": SITE, "target": "a", "kind": kind}
    with pytest.raises(fs.InputError, match=match):
        fs.Task.from_arrays(X, y, **given | keys)
    fs.Task.from_arrays(X, y, **given).build()  # control


@pytest.mark.parametrize("kind", ["regression", "multilabel"])
def test_shifts_deal_labels_alone(kind: Any) -> None:
    """Before, they took each number for a class, and most rows went to no client."""
    y = X[:, 0] if kind == "regression" else X[:, :2] > 0
    with pytest.raises(fs.InputError, match=f'a shift deals rows by their labels, .* "{kind}"'):
        fs.Task.from_split(X, y, Sparsity(2), clients=3, target="pooled", kind=kind)
    fs.Task.from_split(X, X[:, 0] > 0, Sparsity(2), clients=3, target="pooled")


def test_device_points_to_the_backend_and_a_missing_column_is_named(task: fs.Task) -> None:
    with pytest.raises(fs.InputError, match='fit has no "device": write backend="cuda"'):
        fs.fit(task, Net, device="cuda", **QUICK)
    x, y, site = (np.arange(40.0), ["a", "b"] * 20, ["s", "t"] * 20)
    made = fs.Task.from_arrays({"x": x % 7}, y, client=site, target="pooled")
    result = fs.fit(made, "linear", **QUICK)
    with pytest.raises(fs.InputError, match='^these rows have no column "x"; the columns are z'):
        result.predict({"z": [1.0]})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tune": "kl"}, "fit gives the server none: train from an experiment file with [server]"),
        ({"tune": "kl", "unlabeled": 5}, 'fit has no "unlabeled": write [server] unlabeled = n in'),
    ],
)
def test_central_tuning_is_for_files(task: fs.Task, given: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as refused:
        fs.fit(task, Net, method="labelset_fedavg", mode="private", **given, **QUICK)
    assert message in str(refused.value)
    assert "server.unlabeled" not in str(refused.value)


@pytest.mark.parametrize(
    "loss",
    [
        lambda logits, labels: cross_entropy(logits.detach(), labels, reduction="none"),
        lambda logits, labels: (logits.argmax(1) != labels).float(),
    ],
)
def test_a_loss_without_a_gradient_teaches_nothing(task: fs.Task, loss: Any) -> None:
    with pytest.raises(InputError, match="loss has no gradient by its logits"):
        fs.fit(task, Net, loss=loss, **QUICK)


@pytest.mark.slow
def test_rows_with_nan_are_not_answered() -> None:
    x, y = np.random.default_rng(0).normal(size=(80, 3)).astype("float32"), np.arange(80) % 2
    task = fs.Task.from_arrays(x, y, client=np.arange(80) // 20, target="3")
    result = fs.fit(task, "linear", **QUICK)
    rows = x[:4].copy()
    rows[2, 1] = np.nan
    with pytest.raises(InputError, match=r"x\[2\] holds NaN or infinity"):
        result.predict(rows)
    assert len(result.predict(x[:4])) == 4


@pytest.mark.slow
def test_a_model_that_has_diverged_cannot_be_calibrated() -> None:
    x = 1e30 * np.random.default_rng(0).normal(size=(80, 3)).astype("float32")
    task = fs.Task.from_arrays(x, np.arange(80) % 2, client=np.arange(80) // 20, target="3")
    with pytest.raises(DivergedError):
        fs.fit(task, "linear", lr=1e9, **QUICK)


@pytest.mark.parametrize("kind", [np.int64, np.int32])
def test_numbers_of_numpy_are_numbers(task: fs.Task, kind: Any) -> None:
    method = fs.method("fedprox", mu=np.float32(0.5))
    made = plan(task, Net, method, seed=kind(3), rounds=kind(2), cohort=kind(1))
    assert made.config.training.rounds == 2
    assert made.config.seeds.run == 3
    assert method.label == "fedprox(mu=0.5)"
