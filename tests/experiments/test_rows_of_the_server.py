"""Rows that the server has of data whose clients come with them, and tuning on natural sets."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from fedshift.cli.app import app
from fedshift.cli.ending import perform
from fedshift.datasets.natural.loading import find_table, natural_table
from fedshift.errors import DataError, InputError
from fedshift.experiments.config import Config
from fedshift.experiments.from_files import source_of
from fedshift.experiments.load import dumps, load_config, validate
from fedshift.experiments.server_rows import set_apart
from fedshift.experiments.task import Prepared, population, prepare
from fedshift.shifts.base import largest_remainder
from fedshift.sweeps.execute import execute
from fedshift.sweeps.store import Store, run_of
from fedshift.tasks.cutting import client_rows
from support.custom_files import files_in


def config(folder: Path, *overrides: str) -> Config:
    given = ("data.target=clients", "model.name=linear", "metrics.extra=", *overrides)
    return load_config(files_in(folder), ["method.name=fedavg", "method.mu=", *given])


def rows_of(prepared: Prepared) -> Counter[tuple[float, ...]]:
    """Every row of the clients, held out or not, as the network gets it."""
    task = prepared.task
    sets = [*task.clients, *task.validation, *task.tests]
    return Counter(tuple(x) for one in sets for x in one.x.tolist())


def test_the_servers_rows_are_no_clients(tmp_path: Path) -> None:
    """As many of each label as its share; the rest stays. Controls: none, and another seed."""
    task = source_of(config(tmp_path))
    left, apart = set_apart(task, 50, 0)
    before = np.sort(np.concatenate(client_rows(task)))
    after = np.sort(np.concatenate(client_rows(left)))
    assert np.array_equal(np.setdiff1d(before, apart), after)
    assert len(after) == len(before) - 50
    shares = np.bincount(task.labels.codes[before]) / len(before)
    counts = np.bincount(task.labels.codes[apart])
    assert counts.tolist() == largest_remainder(50 * shares).tolist()
    assert set_apart(task, 0, 0)[0] is task
    assert np.array_equal(set_apart(task, 50, 0)[1], apart)
    assert not np.array_equal(set_apart(task, 50, 1)[1], apart)


@pytest.mark.slow
def test_a_client_that_loses_a_label_is_named(tmp_path: Path) -> None:
    """Its one row of a label may be the server's. Controls: another seed, and no such row."""
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
        found = [note for note in ready.custom.notes if "has all rows" in note]
        assert len(found) == int(float(ready.task.table()["labels"][0, 2]) == 0)
        notes |= {seed: found}
    assert {len(found) for found in notes.values()} == {0, 1}
    (text,) = {found[0] for found in notes.values() if found}
    assert text == (
        'The server has all rows of client "a" with label "z"; lower server.unlabeled if the '
        "client is to have it."
    )


def test_a_held_out_target_gives_the_server_nothing(tmp_path: Path) -> None:
    task = source_of(config(tmp_path, "data.target=north"))
    _, apart = set_apart(task, 50, 0)
    assert "north" not in {task.places.names[task.places.codes[i]] for i in apart}
    assert len({task.places.codes[i] for i in apart}) == 2


def test_the_network_gets_them_as_it_gets_clients_rows(tmp_path: Path) -> None:
    """Rows and the server's inputs together are all rows, once each."""
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


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (("server.unlabeled=240",), "server.unlabeled = 240, and 240 training examples are left"),
        (
            ("server.unlabeled=239",),
            'server.unlabeled = 239 takes every row of client ".*"; give f',
        ),
        (
            ("server.validation=20",),
            "server.validation is for the sets of `fedshift datasets` that",
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
    """[shift] follows from data.target, and no file has it. Control: a key that is due."""
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
    """Each island has the species that live there; the loss falls. Control: without rows."""
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
@pytest.mark.parametrize(("name", "fewest", "most"), [("flights", 1, 19), ("storms", 5, 9)])
def test_every_table_keeps_its_label_sets(name: str, fewest: int, most: int) -> None:
    """What the server and the tests take leaves every client the labels that it has."""
    task = prepare(natural(name)).task
    sizes = [(one > 0).sum() for one in task.table()["labels"].numpy()]
    assert (min(sizes), max(sizes)) == (fewest, most)
