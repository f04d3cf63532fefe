"""Tasks whose label is a number: trained, measured and shown in the units of y."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import fedshift as fs
from fedshift.cli.app import app
from fedshift.cli.ending import perform
from fedshift.client.objectives import CrossEntropy, Proximal
from fedshift.fitting.planning import plan
from support.number_tasks import Line, Net, prices, shifted

QUICK: dict[str, Any] = {"rounds": 3, "lr": 0.05, "evaluate_every": 1, "progress": False}


@pytest.fixture(scope="module")
def task() -> fs.Task:
    return prices()


def same(a: fs.Result, b: fs.Result) -> bool:
    one, two = a.module().state_dict(), b.module().state_dict()
    return all(torch.equal(v, two[k]) for k, v in one.items())


def least_squares(task: fs.Task, weights: list[float]) -> np.ndarray[Any, Any]:
    """(w, b) that minimise sum_i a_i mean_j (w . x_ij + b - y_ij)^2."""
    clients = plan(task, "linear", "fedavg").prepared.task.clients
    rows = np.concatenate([c.x.double().numpy() for c in clients])
    each = np.concatenate(
        [np.full(len(c.y), a / len(c.y)) for a, c in zip(weights, clients, strict=True)]
    )
    x = np.hstack([rows[:, :-1], np.ones((len(rows), 1))]) * np.sqrt(each)[:, None]
    return np.linalg.lstsq(x, rows[:, -1] * np.sqrt(each), rcond=None)[0]


@pytest.mark.slow
def test_full_batches_reach_weighted_least_squares(task: fs.Task) -> None:
    """Control: the answer for FedAvg's weights is another one than for FedPALS'."""
    full = {"rounds": 120, "batch": 1000, "epochs": 1, "lr": 0.15, "progress": False}
    answers = []
    for method in ("fedavg", fs.method("fedpals", lam=0.0)):
        result = fs.fit(task, Line, method=method, **full)
        layer = result.module().layer
        got = torch.cat([layer.weight[0], layer.bias]).detach().numpy()
        answers.append(least_squares(task, list(result.summary.weights)))
        np.testing.assert_allclose(got, answers[-1], atol=2e-4)
    assert abs(answers[0] - answers[1]).max() > 5e-3


@pytest.mark.slow
def test_fedpals_beats_fedavg_under_shift_of_the_numbers() -> None:
    keys = {"rounds": 20, "lr": 0.02, "batch": 32, "progress": False}
    plain = fs.fit(shifted(), "linear", method="fedavg", **keys)
    aware = fs.fit(shifted(), "linear", method="fedpals", lam=0.0, **keys)
    assert aware.metrics["rmse"] < 0.8 * plain.metrics["rmse"]
    for result in (plain, aware):  # without any example of the target
        estimate, error = result.estimate
        assert abs(estimate - result.metrics["rmse"] ** 2) < 4 * error


def test_numbers_of_the_target_by_hand(task: fs.Task) -> None:
    def worst(predicted: np.ndarray[Any, Any], true: np.ndarray[Any, Any]) -> float:
        assert predicted.shape == true.shape
        return float(abs(predicted - true).max())

    result = fs.fit(task, Line, metrics={"worst": worst}, **QUICK)
    test = plan(task, Line, "fedavg").prepared.task.test.x.double().numpy()
    off = result.predict(test[:, :-1].astype(np.float32)).values - test[:, -1]
    metrics = result.metrics
    assert metrics["rmse"] == pytest.approx(math.sqrt((off**2).mean()), rel=1e-5)
    assert metrics["mae"] == pytest.approx(abs(off).mean(), rel=1e-5)
    assert metrics["r2"] == pytest.approx(1 - (off**2).mean() / test[:, -1].var(), rel=1e-5)
    assert metrics["worst"] == pytest.approx(abs(off).max(), rel=1e-5)
    assert result.summary.final.target_loss == pytest.approx(metrics["rmse"] ** 2)
    assert math.isnan(result.accuracy)
    assert set(result.client_metrics["rmse"]) == {"south", "east", "west"}


def test_results_are_shown_in_units_of_y(task: fs.Task, tmp_path: Path) -> None:
    result = fs.fit(task, Line, method="fedpals", ess="auto", **QUICK)
    rmse = f"{result.metrics['rmse']:.4g}"
    assert "accuracy" not in str(result)
    for text in (str(result), repr(result), result._repr_html_()):
        assert rmse in text
    page = result.report(tmp_path / "report.html").read_text()
    assert rmse in page
    assert "Target RMSE" in page
    assert "Accuracy per" not in page
    assert page.count("squared error") > 3  # the candidates that ess="auto" chose from
    chosen = result.summary.selection
    assert chosen is not None
    assert chosen.picks is not None
    best = min(chosen.candidates, key=lambda c: c.losses["estimated_loss"])
    assert chosen.picks["estimate"] == best.label == chosen.chosen


def test_early_stopping_goes_by_the_smallest_estimate(task: fs.Task) -> None:
    """A rate that rises makes later rounds worse."""
    keys = QUICK | {"rounds": 12, "schedule": lambda t: 0.05 if t < 5 else 0.3}
    del keys["lr"]
    result = fs.fit(task, Line, keep="best", patience=3, **keys)
    estimates = {r["round"]: r["estimated_loss"] for r in result.rounds}
    best = min(estimates, key=lambda t: estimates[t])
    assert result.summary.final.round == best < max(estimates)
    assert max(estimates) == best + 3


@pytest.mark.slow
def test_own_losses_get_outputs_and_numbers(task: fs.Task) -> None:
    def squared(outputs: Tensor, y: Tensor) -> Tensor:
        return (outputs - y) ** 2

    def huber(outputs: Tensor, y: Tensor) -> Tensor:
        return F.huber_loss(outputs, y, reduction="none")

    usual = fs.fit(task, Line, **QUICK)
    assert same(usual, fs.fit(task, Line, loss=squared, **QUICK))
    assert not same(usual, fs.fit(task, Line, loss=huber, **QUICK))
    pulled = fs.fit(task, Line, loss=CrossEntropy() + Proximal(0.5), **QUICK)
    assert same(pulled, fs.fit(task, Line, method="fedprox", mu=0.5, **QUICK))
    assert not same(pulled, usual)


@pytest.mark.slow
def test_saved_and_loaded(task: fs.Task, tmp_path: Path) -> None:
    rows = np.zeros((2, 3), np.float32)
    for net in (Net, "mlp"):
        result = fs.fit(task, net, **QUICK | {"lr": 0.01})
        folder = result.save(tmp_path / str(net)[-4:-2])
        again = fs.load(folder, net=None if net == "mlp" else net)
        np.testing.assert_array_equal(result.predict(rows).values, again.predict(rows).values)
    result.export(tmp_path / "net.ts")
    script = torch.jit.load(str(tmp_path / "net.ts"))
    np.testing.assert_allclose(script(torch.zeros(2, 3))[:, 0].detach(), again.predict(rows).values)


@pytest.mark.slow
def test_no_network_sees_the_number() -> None:
    """By name, too, and with several inputs: a perfect answer would be x's last column."""
    draws = np.random.default_rng(0)
    x, y = draws.normal(size=(200, 2)).astype(np.float32), draws.normal(size=200)
    client = np.arange(200) % 4
    for given in (x, {"one": x, "two": x[:, :1]}):
        task = fs.Task.from_arrays(given, y, client=client, target="3", kind="regression")
        result = fs.fit(task, "linear", rounds=20, lr=0.1, progress=False)
        assert result.metrics["r2"] < 0.1


def test_every_client_on_its_own_rows(task: fs.Task) -> None:
    everywhere = prices(target="clients")
    fitted = fs.fit(everywhere, Net, method="ditto", **QUICK)
    assert len(fitted.client_metrics["rmse"]) == 4
    rows = np.ones((1, 3), np.float32)
    values = {float(fitted.predict(rows, client=c).values[0]) for c in fitted.clients}
    assert len(values) == 4
    tests = plan(everywhere, Net, "fedavg").prepared.task.tests
    errors = zip(tests, fitted.client_metrics["rmse"].values(), strict=True)
    mean = sum(len(t) * error**2 for t, error in errors) / sum(map(len, tests))
    assert fitted.metrics["rmse"] == pytest.approx(math.sqrt(mean))


@pytest.mark.slow
def test_tables_say_which_way_is_better(task: fs.Task, tmp_path: Path) -> None:
    """Of two rates, one of which hardly trains, validation chooses the other."""
    table = fs.compare(
        task, Line, ["fedavg"], seeds=1, jobs=1, rounds=3, lr=[0.0001, 0.05], progress=False
    )
    assert table.metric == "rmse"
    assert table.row("fedavg").setting == "lr=0.05"
    text = repr(table)
    assert "rmse: smaller is better" in text
    assert "squared error" in text
    assert "is lowest" in text
    assert "estimated_rmse" in table.frame().columns
    assert "Estimated RMSE" in table.report(tmp_path / "t.html").read_text()


def test_tables_of_large_and_of_tiny_numbers() -> None:
    def still(task: fs.Task) -> torch.nn.Module:
        net = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(net.weight)
        return net

    draws = np.random.default_rng(0)
    x, client = draws.normal(size=(90, 1)).astype(np.float32), np.array(list("abc") * 30)
    for scale, match in ((1e6, r" \d{7} "), (1e-5, r" 0\.0000\d{4} ")):
        task = fs.Task.from_arrays(
            x, scale * (1 + x[:, 0]), client=client, target="c", kind="regression"
        )
        table = fs.compare(
            task, still, ["fedavg"], seeds=1, jobs=1, rounds=1, lr=1e-3, progress=False
        )
        assert re.search(match, repr(table)), repr(table)


def test_a_file_trains_what_fit_trains(tmp_path: Path) -> None:
    """From a table and a network of [model], in this process and in two. Control: another seed."""
    x = np.random.default_rng(0).normal(size=(120, 2)).round(3)
    rows = [f"{'abc'[i % 3]},{u},{v},{u - 2 * v:.3f}" for i, (u, v) in enumerate(x)]
    table = tmp_path / "t.csv"
    table.write_text("\n".join(["site,u,v,dose", *rows]))
    (tmp_path / "e.toml").write_text(
        f'[data]\nsource = "{table}"\nkind = "regression"\nclient = "site"\nlabel = "dose"\n'
        'target = "c"\n[model]\nname = "linear"\n[training]\nrounds = 2\nlr = 0.05\n'
    )
    task = fs.Task.from_csv(table, client="site", label="dose", target="c", kind="regression")
    fitted = fs.fit(task, "linear", rounds=2, lr=0.05, progress=False)
    weights = []
    for name, options in (("a", ()), ("b", ("--workers", "2")), ("c", ("-c", "seeds.run=1"))):
        out = str(tmp_path / name)
        assert perform(app, ["run", str(tmp_path / "e.toml"), "--out", out, *options]) == 0
        weights.append((tmp_path / name / "model.safetensors").read_bytes())
    assert weights[0] == weights[1] == (fitted.folder / "model.safetensors").read_bytes()
    assert weights[2] != weights[0]
    assert fs.load(tmp_path / "a").metrics == fitted.metrics


def test_what_does_not_go_together(task: fs.Task) -> None:
    with pytest.raises(fs.InputError, match="predicts 1 per row, no class"):
        fs.fit(task, lambda task: torch.nn.Linear(3, len(task.classes)), **QUICK)
    with pytest.raises(fs.InputError, match="another number"):
        fs.fit(task, Line, metrics={"rmse": lambda p, y: 0.0}, **QUICK)
