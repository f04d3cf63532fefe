"""The server's rows of data sets with natural clients, and tuning on such sets."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from fedshift.cli.app import app
from fedshift.cli.ending import perform
from fedshift.datasets.natural.loading import find_table, natural_table
from fedshift.errors import DataError, InputError
from fedshift.evaluation.scores import score
from fedshift.experiments.config.load import dumps, load_config, validate
from fedshift.experiments.config.schema import Config, ServerData
from fedshift.experiments.experiment import run_experiment
from fedshift.experiments.measures.served import models
from fedshift.experiments.task.custom_source import task_of
from fedshift.experiments.task.preparing import Prepared, population, prepare
from fedshift.experiments.task.server_rows import set_apart
from fedshift.record.folder import ENCODING
from fedshift.shifts.base import largest_remainder
from fedshift.sweeps.execute import execute
from fedshift.sweeps.store import Store, run_of
from fedshift.tasks.cutting import client_rows
from fedshift.tasks.encoding import Encoding
from support.custom_files import files_in

UNLABELED = ServerData(unlabeled=50)


def config(folder: Path, *overrides: str) -> Config:
    given = ("data.target=clients", "model.name=linear", "metrics.extra=", *overrides)
    return load_config(files_in(folder), ["method.name=fedavg", "method.mu=", *given])


def rows_of(prepared: Prepared) -> Counter[tuple[float, ...]]:
    """All rows of the clients, also those held out, in the form that the network gets."""
    task = prepared.task
    sets = [*task.clients, *task.validation, *task.tests]
    return Counter(tuple(x) for one in sets for x in one.x.tolist())


def test_the_servers_rows_are_no_clients(tmp_path: Path) -> None:
    """Labels by their shares; the rest stays with clients. Controls: none, and another seed."""
    task = task_of(config(tmp_path).data, 0)
    left, (apart, *_) = set_apart(task, UNLABELED, 0)
    before = np.sort(np.concatenate(client_rows(task)))
    after = np.sort(np.concatenate(client_rows(left)))
    assert np.array_equal(np.setdiff1d(before, apart), after)
    assert len(after) == len(before) - 50
    shares = np.bincount(task.labels.codes[before]) / len(before)
    counts = np.bincount(task.labels.codes[apart])
    assert counts.tolist() == largest_remainder(50 * shares).tolist()
    assert set_apart(task, ServerData(), 0)[0] is task
    assert np.array_equal(set_apart(task, UNLABELED, 0)[1].unlabeled, apart)
    assert not np.array_equal(set_apart(task, UNLABELED, 1)[1].unlabeled, apart)


@pytest.mark.slow
def test_a_client_that_loses_a_label_is_named(tmp_path: Path) -> None:
    """The server may draw its only row of a label. Controls: another seed, and no such row."""
    lines = [f"{s},{i % 7},{'xy'[i % 2]}" for s in "ab" for i in range(40)]
    lines += ["a,3,z"] + [f"b,{i % 5},z" for i in range(20)]
    (tmp_path / "t.csv").write_text("\n".join(["site,v,y", *lines]))
    notes = {}
    for seed in range(12):
        ready = prepare(
            validate(
                {
                    "data": {"source": str(tmp_path / "t.csv"), "client": "site", "label": "y",
                             "target": "clients", "validation": 0.0},
                    "server": {"unlabeled": 40},
                    "model": {"name": "linear"},
                    "seeds": {"split": seed},
                }
            )
        )  # fmt: skip
        warnings = [note for note in ready.custom.notes if "has all rows" in note]
        assert len(warnings) == int(float(ready.task.table()["labels"][0, 2]) == 0)
        notes |= {seed: warnings}
    assert {len(warnings) for warnings in notes.values()} == {0, 1}
    (text,) = {warnings[0] for warnings in notes.values() if warnings}
    assert text == (
        'The server has all rows of client "a" with label "z"; lower server.unlabeled if the '
        "client is to have it."
    )


def test_a_held_out_target_gives_the_server_nothing(tmp_path: Path) -> None:
    task = task_of(config(tmp_path, "data.target=north").data, 0)
    _, (apart, *_) = set_apart(task, UNLABELED, 0)
    assert "north" not in {task.places.names[task.places.codes[i]] for i in apart}
    assert len({task.places.codes[i] for i in apart}) == 2


def test_the_network_gets_them_as_it_gets_clients_rows(tmp_path: Path) -> None:
    """The clients' rows and the server's inputs together are all rows, once each."""
    ready = prepare(config(tmp_path, "server.unlabeled=50"))
    inputs = ready.server_inputs
    assert inputs is not None
    assert inputs.shape == (50, *ready.task.clients[0].x.shape[1:])
    assert sum(rows_of(ready).values()) + len(inputs) == 240
    assert not rows_of(ready) & Counter(tuple(x) for x in inputs.tolist())
    plain = prepare(config(tmp_path))
    assert plain.server_inputs is None
    assert sum(rows_of(plain).values()) == 240
    assert plain.split_sha256 != ready.split_sha256
    shared = population(config(tmp_path, "server.unlabeled=50"))(
        config(tmp_path, "server.unlabeled=50", "training.lr=0.1")
    )
    assert torch.equal(shared.server_inputs, inputs)  # type: ignore[arg-type]
    assert any("50 of the clients' rows are the server's" in note for note in ready.custom.notes)


def test_labelled_rows_are_others_again(tmp_path: Path) -> None:
    """In the same shares, with or without unlabeled rows. Control: another seed has other rows."""
    task, both = task_of(config(tmp_path).data, 0), ServerData(unlabeled=50, validation=30)
    left, apart = set_apart(task, both, 0)
    sets = [apart.unlabeled, apart.validation, apart.others]
    before = np.sort(np.concatenate(client_rows(task)))
    assert [len(rows) for rows in sets] == [50, 30, len(before) - 80]
    assert np.array_equal(np.sort(np.concatenate(sets)), before)
    assert np.array_equal(np.sort(np.concatenate(client_rows(left))), apart.others)
    shares = task.labels.counts(before) / len(before)
    assert np.abs(task.labels.counts(apart.validation) - 30 * shares).max() < 1
    assert np.array_equal(set_apart(task, UNLABELED, 0)[1].unlabeled, apart.unlabeled)
    assert not np.array_equal(set_apart(task, both, 1)[1].validation, apart.validation)


def test_labelled_rows_validate(tmp_path: Path) -> None:
    """Each has its label and is no client's row. Control: none without the key."""
    ready = prepare(config(tmp_path, "server.unlabeled=50", "server.validation=30"))
    labelled, inputs = ready.task.target_validation, ready.server_inputs
    assert labelled is not None
    assert inputs is not None
    assert (len(labelled.y), len(inputs)) == (30, 50)
    rows = [Counter(tuple(x) for x in of.tolist()) for of in (labelled.x, inputs)]
    task = ready.custom.task
    assert task is not None
    everything = Encoding.from_json(ready.custom.texts[ENCODING]).encoded(
        task.inputs, np.arange(240)
    )
    assert rows_of(ready) + rows[0] + rows[1] == Counter(tuple(x) for x in everything.tolist())
    _, apart = set_apart(
        task_of(config(tmp_path).data, 0), ServerData(unlabeled=50, validation=30), 0
    )
    assert labelled.y.tolist() == task.labels.codes[apart.validation].tolist()
    assert [n for n in ready.custom.notes if "server's" in n] == [
        "50 of the clients' rows are the server's, without their labels.",
        "30 of the clients' rows are the server's, with their labels; they validate.",
    ]
    assert prepare(config(tmp_path, "server.unlabeled=50")).task.target_validation is None


def test_labelled_rows_follow_a_target_elsewhere(tmp_path: Path) -> None:
    """Of 60 rows as many as T allows, rounded. Control: all of them where clients use the model."""
    ready = prepare(config(tmp_path, "server.validation=60", "data.target={ill = 0.9, well = 0.1}"))
    labelled = ready.task.target_validation
    assert labelled is not None
    n = len(labelled.y)
    assert labelled.y.bincount().tolist() == largest_remainder(n * np.array([0.9, 0.1])).tolist()
    assert 0 < n < 60
    (note,) = (one for one in ready.custom.notes if "with their labels" in one)
    assert note.endswith(f"with their labels; {n} of them follow T and validate.")
    assert len(prepare(config(tmp_path, "server.validation=60")).task.target_validation.y) == 60  # type: ignore[union-attr]


def test_a_label_of_the_target_alone_cannot_validate(tmp_path: Path) -> None:
    """No client has the label. Control: without such rows the error is the small number."""
    rows = ["site,v,y", *(f"{'abc'[i % 3]},{i % 7},{'xy'[i % 2]}" for i in range(60))]
    (tmp_path / "t.csv").write_text("\n".join([*rows, *(f"c,{i},z" for i in range(9))]))
    for target, size, says in (
        ("c", 20, 'label "z" no client has; leave server.validation out'),
        ("b", 1, "Raise server.validation"),
    ):
        given = {"source": str(tmp_path / "t.csv"), "client": "site", "label": "y"}
        given |= {"target": target}
        with pytest.raises(InputError, match=f"server.validation = {size}: .*{says}"):
            prepare(
                validate(
                    {"data": given, "server": {"validation": size}, "model": {"name": "linear"}}
                )
            )


@pytest.mark.parametrize("method", ["fedavg", "ditto"])
def test_the_servers_model_is_validated(method: str, tmp_path: Path) -> None:
    """Also where clients serve their own models (Ditto). Control: client 0's has another loss."""
    made = config(tmp_path, "server.validation=40", f"method.name={method}", "training.rounds=2")
    ready = prepare(made)
    done, data = run_experiment(made, prepared=ready), ready.task.target_validation
    assert data is not None
    last = done.outcome.last
    served = models(done.algorithm, last, ready.federation())[0]
    right, other = (
        score(ready.model, *pair, data, len(ready.task.classes))
        for pair in ((last.server["params"], last.server["buffers"]), served)
    )
    assert done.outcome.final.validation_accuracy == pytest.approx(right.accuracy)
    assert done.outcome.final.validation_loss == pytest.approx(right.loss)
    assert (right.loss == pytest.approx(other.loss)) == (method == "fedavg")


def test_a_server_without_a_model_validates_none(tmp_path: Path) -> None:
    """FedPer's heads stay with the clients. Control: the clients' validation goes on."""
    given = ("server.validation=40", "method.name=fedper", "training.rounds=1")
    final = run_experiment(config(tmp_path, *given, "model.name=mlp")).outcome.final
    assert math.isnan(final.validation_accuracy)
    assert 0 <= final.source_accuracy <= 1


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (("server.unlabeled=240",), "server.unlabeled = 240, and 240 training examples are left"),
        (
            ("server.unlabeled=239",),
            'server.unlabeled = 239 takes every row of client ".*"; give f',
        ),
        (
            ("server.unlabeled=100", "server.validation=139"),
            'server.unlabeled = 100 and server.validation = 139 take every row of client ".*"; giv',
        ),
        (
            ("server.validation=20", "data.label=age", "data.kind=regression"),
            'server.validation = 20 is for classes, and data.kind is "regression"; leave server.v',
        ),
    ],
)
def test_what_cannot_be_the_servers(tmp_path: Path, overrides: tuple[str, ...], says: str) -> None:
    with pytest.raises(InputError, match=says):
        prepare(config(tmp_path, *overrides))


def test_rows_at_sites_are_not_the_servers() -> None:
    sites = {"source": "sites", "clients": ("a", "b"), "label": "y", "target": "clients"}
    sites |= {"classes": ("no", "yes"), "columns": ("v",)}
    with pytest.raises(InputError, match=r"\[server\] takes rows of clients, and these stay with"):
        validate({"data": sites, "server": {"unlabeled": 5}})
    assert validate({"data": sites}).data.at_sites


def test_a_run_that_clients_test_is_read_again(tmp_path: Path) -> None:
    """[shift] follows from data.target and is in no file. Control: a key that is required."""
    run = run_of(config(tmp_path, "training.rounds=1", "data.validation=0.1"))
    store = Store(tmp_path / "runs")
    execute({run.name: run}, store)
    assert store.read(run).summary["final"]["round"] == 1
    path = store.path(run) / "config.resolved.toml"
    assert "[shift]" not in path.read_text()
    path.write_text(path.read_text().replace("validation = 0.1\n", ""))
    with pytest.raises(DataError, match="data.validation is not there"):
        store.read(run)


# ------------------------------------------------------------------------ natural label sets


def natural(name: str, **tables: dict[str, object]) -> Config:
    one = natural_table(name)
    if find_table(one) is None:
        pytest.skip(f"{name} needs the package {one.package.name}: {one.package.how}")
    return validate(
        {
            "data": {"name": name, "target": "clients", "validation": 0.0},
            "server": {"unlabeled": 60},
            "model": {"name": "linear"},
            "method": {"name": "labelset_fedavg", "mode": "private", "tune": "mse"},
            "training": {"rounds": 2},
            **tables,
        }
    )


@pytest.mark.slow
def test_tuning_on_penguins(tmp_path: Path) -> None:
    """Each island has the species that live there; the loss falls. Control: no server rows."""
    made = natural("penguins")
    assert validate(json.loads(made.model_dump_json())) == made
    (tmp_path / "p.toml").write_text(dumps(made))
    assert load_config(tmp_path / "p.toml") == made
    assert perform(app, ["run", str(tmp_path / "p.toml"), "--out", str(tmp_path / "o")]) == 0
    summary = json.loads((tmp_path / "o" / "summary.json").read_text())
    assert summary["label_sets"]["holders"] == [3, 1, 1]
    last = summary["label_sets"]["rounds"][-1]
    assert last["loss_after"] < last["loss_before"]
    with pytest.raises(InputError, match="needs unlabeled inputs on the server; give server.unl"):
        natural("penguins", server={})


@pytest.mark.slow
def test_penguins_say_whether_tuning_will_pay(tmp_path: Path) -> None:
    """From the server's labelled rows, on which a temperature is fitted, too. Control: no rows."""
    method = {"name": "labelset_fedavg", "tune": "kl", "tune_part": "all"}
    fitted = {"method": method | {"tune_temperature": "fitted"}}
    made = natural("penguins", server={"unlabeled": 60, "validation": 40}, **fitted)
    (tmp_path / "p.toml").write_text(dumps(made))
    assert perform(app, ["run", str(tmp_path / "p.toml"), "--out", str(tmp_path / "o")]) == 0
    summary = json.loads((tmp_path / "o" / "summary.json").read_text())
    optima = summary["label_sets"]["rounds"][-1]["optima"]
    # Of 40 rows all: an accuracy of theirs is a multiple of 1/40.
    assert optima["aggregate"] * 40 == pytest.approx(round(optima["aggregate"] * 40))
    assert list(optima) == ["aggregate", "mse", "pairwise", "kl", "gain_se"]
    assert any(one.startswith("Will tuning pay?") for one in summary["why"])
    with pytest.raises(InputError, match="give server.validation = n, the number of examples"):
        natural("penguins", **fitted)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "fewest", "most"), [("flights", 1, 19), ("storms", 5, 9)])
def test_every_table_keeps_its_label_sets(name: str, fewest: int, most: int) -> None:
    """The server's and the tests' rows leave every client the labels that it has."""
    task = prepare(natural(name, server={"unlabeled": 60, "validation": 60})).task
    assert task.target_validation is not None
    assert len(task.target_validation.y) == 60
    sizes = [(one > 0).sum() for one in task.table()["labels"].numpy()]
    assert (min(sizes), max(sizes)) == (fewest, most)
