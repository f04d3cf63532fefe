"""The result of `fit`: predictions, files, exports and personal models."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import fedshift as fs
from fedshift.client.objectives import CrossEntropy
from fedshift.errors import InputError
from fedshift.experiments.folder import progress
from fedshift.fitting.result import Result
from fedshift.record.folder import read_run
from support.custom_tasks import RATES, Net, hospitals, rows
from support.small_runs import config_of, record_until

QUICK: dict[str, Any] = {"rounds": 2, "steps": 2, "evaluate_every": 1, "progress": False}


@pytest.fixture(scope="module")
def result() -> Result:
    return fs.fit(hospitals(), Net, **QUICK)


def test_predictions_are_the_modules(result: Result) -> None:
    x, y, site = rows()
    given = result.predict(x)
    with torch.no_grad():
        expected = result.module()(torch.from_numpy(x)).softmax(1)
    assert np.allclose(given.probabilities, expected, atol=1e-6)
    assert set(given.names) == {"ill", "well"}
    assert (given.names == np.array(result.classes)[expected.argmax(1)]).all()
    north = np.array(site) == "north"
    assert (given.names == y)[north].mean() == pytest.approx(result.accuracy)
    assert repr(given).startswith("Prediction of 400 rows: ")
    assert list(given.frame().columns) == ["prediction", "ill", "well"]
    assert "<table" in given._repr_html_()
    with pytest.raises(fs.InputError, match=r"\(3,\)"):
        result.predict(x[:, :3])


def test_the_module_is_a_copy(result: Result) -> None:
    net = result.module()
    assert not net.training
    with torch.no_grad():
        next(net.parameters()).zero_()
    assert next(result.module().parameters()).abs().sum() > 0


def test_what_is_saved_is_loaded(result: Result, tmp_path: Path) -> None:
    """By the class's name, if a module defines it: the same numbers bit for bit."""
    x, _, _ = rows()
    folder = result.save(tmp_path / "north")
    assert {"encoding.json", "fit.json", "model.safetensors", "events.jsonl"} <= {
        path.name for path in folder.iterdir()
    }
    assert read_run(folder).summary == result.summary
    again = fs.load(folder)
    assert str(again) == str(result)
    assert np.array_equal(again.predict(x).probabilities, result.predict(x).probabilities)
    assert again.clients == ("east", "south", "west")
    with pytest.raises(fs.InputError, match="not an empty folder"):
        result.save(folder)


@pytest.mark.slow
def test_a_network_that_cannot_be_found_again_is_asked_for(tmp_path: Path) -> None:
    def net(task: fs.Task) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))

    x, _, _ = rows()
    result = fs.fit(hospitals(), net, **QUICK)
    folder = result.save(tmp_path / "a")
    with pytest.raises(fs.InputError, match="not how to make it; give fs.load"):
        fs.load(folder)
    for one in (net, net(hospitals())):
        again = fs.load(folder, net=one)
        assert np.array_equal(again.predict(x).probabilities, result.predict(x).probabilities)
    with pytest.raises(fs.InputError, match="give net= the network that was trained"):
        fs.load(folder, net=nn.Linear(4, 2))
    with pytest.raises(fs.InputError, match="not a run folder"):
        fs.load(tmp_path)


def test_named_networks_and_tables_load(tmp_path: Path) -> None:
    """Raw rows of a table: numbers, a category, one that training never saw, and a missing one."""
    x, y, site = rows()
    draws = np.random.default_rng(1)
    table = pd.DataFrame(x, columns=list("abcd"))
    table["ward"] = draws.choice(["blue", "red"], len(table))
    table.loc[::9, "b"] = np.nan
    task = fs.Task.from_arrays(table, y, client=site, target="north")
    result = fs.fit(task, "mlp", hidden=(6,), **QUICK)
    again = fs.load(result.save(tmp_path / "t"))
    new = table.head(5).assign(ward=["blue", "green", "red", None, "red"])
    assert np.array_equal(again.predict(new).probabilities, result.predict(new).probabilities)
    with pytest.raises(fs.InputError, match='"ward"'):
        again.predict(new.drop(columns="ward"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_run_of_a_shipped_set_loads_and_is_exported(tmp_path: Path) -> None:
    """Its folder has no fit.json: the shape of an input is looked up in the data set."""
    record_until(tmp_path / "run", config_of("fedavg"), None)
    loaded = fs.load(tmp_path / "run")
    images = torch.rand(3, 1, 28, 28)
    script = torch.jit.load(str(loaded.export(tmp_path / "m.ts")))  # type: ignore[no-untyped-call]
    assert torch.allclose(script(images), loaded.module()(images)["logits"], atol=1e-6)


def test_personal_models() -> None:
    """Where clients are the target, each serves its own model, by name."""
    x, _, _ = rows()
    result = fs.fit(hospitals("clients"), Net, method="ditto", **QUICK)
    assert result.clients == tuple(sorted(RATES))
    assert set(result.accuracies) == set(RATES)
    assert "worst client" in str(result)
    north, south = (result.predict(x, client=c).probabilities for c in ("north", "south"))
    assert not np.array_equal(north, south)
    with pytest.raises(fs.InputError, match='Did you mean "north"'):
        result.module(client="norht")
    assert 'Every client serves a model of its own: module(client="east")' in str(result)
    ends = (lambda **of: result.module(**of), lambda **of: result.export("a.pt", **of))
    for given in (*ends, lambda: result.predict(x)):
        with pytest.raises(fs.InputError, match="serves a model of its own; give client= one of e"):
            given()
    server = result.module(server=True).state_dict()
    assert all(torch.equal(v, server[k]) for k, v in result.models.shared[0].items())
    assert not torch.equal(
        server["head.weight"], result.module("north").state_dict()["head.weight"]
    )
    with pytest.raises(fs.InputError, match="give one of them"):
        result.module("north", server=True)
    one = fs.fit(hospitals("clients"), Net, **QUICK)  # control: FedAvg's model is that of all
    assert "serves a model of its own" not in str(one)
    assert len(one.module().state_dict()) == len(server)
    with pytest.raises(fs.InputError, match="leaves no model for all"):
        fs.fit(hospitals("clients"), Net, method="local_only", **QUICK).module()


@pytest.mark.slow
def test_accuracy_is_of_the_clients_own_models() -> None:
    """As `compare` and the estimate have it; control: FedAvg's vote is its one model."""
    x, y, site = rows()
    x[:, 0] += 3 * (y == "ill")
    y = np.where((np.array(site) == "north") ^ (y == "ill"), "ill", "well")  # north has it reversed
    task = fs.Task.from_arrays(x, y, client=site, target="clients")
    fit: dict[str, Any] = {"rounds": 4, "steps": 20, "lr": 0.3, "evaluate_every": 1}
    result = fs.fit(task, Net, method=(ditto := fs.method("ditto", lam=0.1)), **fit)
    cut = task.build().task
    right, total, whole = 0, 0, 0
    for client, test in zip(result.clients, cut.tests, strict=True):
        with torch.no_grad():
            right += int((result.module(client)(test.x).argmax(1) == test.y).sum())
            whole += int((result.module(server=True)(test.x).argmax(1) == test.y).sum())
        total += len(test)
    assert result.accuracy == pytest.approx(right / total)
    assert result.accuracy > whole / total + 0.05
    assert result.accuracy != result.summary.final.target_accuracy
    assert "accuracy of the clients' own models" in str(result)
    assert "by the vote of all models" in str(result)
    table = fs.compare(task, Net, {"ditto": ditto}, seeds=1, jobs=1, **fit)
    assert table.row("ditto").values(table.metric) == {0: result.accuracy}
    assert "Accuracy of the clients' own models, %" in str(table)
    with pytest.raises(fs.InputError, match="client= one of east, north, south, west"):
        result.predict(x)
    one = fs.fit(task, Net, **fit)
    assert one.accuracy == one.summary.final.target_accuracy
    assert "target accuracy" in str(one)
    assert len(one.predict(x)) == len(x)
    assert result.estimate[0] > one.estimate[0] + 0.05


def test_one_model_for_all_has_no_clients_models(result: Result) -> None:
    with pytest.raises(fs.InputError, match='target="clients"'):
        result.module(client="east")


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_exports(result: Result, tmp_path: Path) -> None:
    x, _, _ = rows(20)
    expected = result.module()(torch.from_numpy(x))
    weights = torch.load(result.export(tmp_path / "m.pt"), weights_only=True)
    net = Net(hospitals())
    net.load_state_dict(weights)
    assert torch.equal(net(torch.from_numpy(x)), expected)
    script = torch.jit.load(str(result.export(tmp_path / "m.ts")))  # type: ignore[no-untyped-call]
    assert torch.allclose(script(torch.from_numpy(x)), expected)
    with pytest.raises(fs.InputError, match="ends in .pt, .ts, .onnx"):
        result.export(tmp_path / "m.h5")


@pytest.mark.skipif(importlib.util.find_spec("onnx") is None, reason="onnx is not installed")
def test_onnx(result: Result, tmp_path: Path) -> None:
    from onnx.reference import ReferenceEvaluator

    x, _, _ = rows(20)
    expected = result.module()(torch.from_numpy(x)).detach().numpy()
    session = ReferenceEvaluator(str(result.export(tmp_path / "m.onnx")))
    assert np.allclose(session.run(["logits"], {"x": x})[0], expected, atol=1e-5)


def test_onnx_is_asked_for(result: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedshift.fitting.export.importlib.util.find_spec", lambda name: None)
    with pytest.raises(fs.InputError, match=r"fedshift\[onnx\]"):
        result.export(tmp_path / "m.onnx")


def test_a_temporary_folder_goes_with_the_result() -> None:
    one = fs.fit(hospitals(), Net, **QUICK)
    place = one.folder
    assert place.is_dir()
    del one
    assert not place.exists()


def test_a_run_folder_of_its_own_and_going_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that was stopped goes on to the same model; a complete one is returned."""
    monkeypatch.setattr(progress, "SECONDS", 0.0)  # a checkpoint after every round
    keys = QUICK | {"rounds": 3}
    whole = fs.fit(hospitals(), Net, folder=tmp_path / "whole", **keys)
    assert whole.folder == tmp_path / "whole"

    def stop(numbers: Any) -> None:
        if numbers["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        fs.fit(hospitals(), Net, folder=tmp_path / "b", callbacks=[stop], **keys)
    assert caught.value.__notes__ == [
        f'`fs.fit(..., folder="{tmp_path / "b"}", resume=True)` goes on from here'
    ]
    changes: tuple[dict[str, Any], ...] = (
        {"loss": CrossEntropy()},
        {"class_weights": "balanced"},
        {"metrics": {"first": lambda p, y: p[0, 0]}},
        {"schedule": lambda t: 0.1},
        {"seed": 1},
    )
    for other in changes:
        with pytest.raises(fs.InputError, match="another configuration"):
            fs.fit(hospitals(), Net, folder=tmp_path / "b", resume=True, **other, **keys)
    with pytest.raises(fs.InputError, match="another configuration"):
        fs.fit(hospitals(), Net(hospitals()), folder=tmp_path / "b", resume=True, **keys)
    again = fs.fit(hospitals(), Net, folder=tmp_path / "b", resume=True, **keys)
    a, b = whole.module().state_dict(), again.module().state_dict()
    assert all(torch.equal(v, b[k]) for k, v in a.items())
    third = fs.fit(hospitals(), Net, folder=tmp_path / "b", resume=True, **keys)
    assert third.summary == again.summary
    for other in changes:
        with pytest.raises(fs.InputError, match="a complete run of another configuration"):
            fs.fit(hospitals(), Net, folder=tmp_path / "b", resume=True, **other, **keys)
    longer = keys | {"rounds": keys["rounds"] + 4}
    with pytest.raises(fs.InputError, match=r"\(rounds: \d there, \d+ here\); it cannot go on: fs"):
        fs.fit(hospitals(), Net, folder=tmp_path / "b", resume=True, **longer)
    with pytest.raises(
        fs.InputError, match="go on with it by resume=True, or give another folder="
    ):
        fs.fit(hospitals(), Net, folder=tmp_path / "b", **keys)
    with pytest.raises(fs.InputError, match="not an empty folder; give another folder$"):
        again.save(tmp_path / "b")
    events = (tmp_path / "b" / "events.jsonl").read_text().splitlines()
    assert json.loads(events[0])["event"] == "start"


@pytest.mark.parametrize(
    ("file", "key", "value", "match"),
    [
        ("fit.json", None, "[]", "damaged"),
        ("fit.json", "net", "os:abort", "give fs.load"),
        ("fit.json", "net", "sys:exit", "give fs.load"),
        ("encoding.json", None, "{", "damaged"),
        ("encoding.json", "columns", "abc", "damaged"),
        ("encoding.json", "layout", "{}", "keys of a layout"),
    ],
)
def test_damaged_folders_say_so(
    result: Result, tmp_path: Path, file: str, key: str | None, value: str, match: str
) -> None:
    """A folder that names Python's own modules does not make them run."""
    place = result.save(tmp_path / "run")
    changed = (
        value if key is None else json.dumps(json.loads((place / file).read_text()) | {key: value})
    )
    (place / file).write_text(changed)
    with pytest.raises(InputError, match=match):
        fs.load(place)
