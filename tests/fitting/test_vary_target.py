"""`vary="target"`: each client in turn is the target, as `task.held_out` and `fit` make it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedshift as fs
from fedshift.errors import InputError

SETTINGS: dict[str, Any] = {"rounds": 3, "steps": 5, "lr": 0.1, "progress": False}


@pytest.fixture(scope="module")
def task() -> fs.Task:
    draws = np.random.default_rng(0)
    sites = np.repeat(["north", "south", "east", "west"], 60)
    ill = draws.random(240) < np.repeat([0.9, 0.2, 0.3, 0.5], 60)
    x = draws.standard_normal((240, 2)) + 1.5 * ill[:, None]
    y = np.where(ill, "ill", "well")
    return fs.Task.from_arrays(x.astype(np.float32), y, client=sites, target="pooled")


def test_each_run_is_fit_of_the_task_with_that_target(task: fs.Task, tmp_path: Path) -> None:
    table = fs.compare(
        task, "linear", ["fedavg", "fedpals"], vary="target", ess=0.5, jobs=1,
        folder=tmp_path / "c", **SETTINGS,
    )  # fmt: skip
    names = ("north", "south", "east", "west")
    assert table.row("fedpals").targets == tuple(sorted(names, key=task.places.names.index))
    values = {}
    for method in ("fedavg", "fedpals"):
        options = {"ess": 0.5} if method == "fedpals" else {}
        for m in table.row(method).runs:
            alone = fs.fit(task.held_out(m.target), "linear", method=method, **options, **SETTINGS)
            assert m.number("target_accuracy") == alone.summary.final.target_accuracy
            assert m.number("target_loss") == alone.summary.final.target_loss
            values[method, m.target] = float(alone.summary.final.target_accuracy or 0)
    assert len({values["fedavg", name] for name in names}) > 1  # the targets do differ
    row = table.row("fedpals")
    gains = [values["fedpals", n] - values["fedavg", n] for n in names]
    assert row.difference is not None
    assert row.difference.mean == pytest.approx(math.fsum(gains) / 4)
    assert row.worst("target_accuracy") == min(values["fedpals", n] for n in names)
    assert "Worst tenth" in str(table)
    assert "4 targets" in str(table)
    assert table.frame(runs=True)["target"].tolist()[:4] == list(row.targets)
    again = fs.compare(
        task, "linear", ["fedavg", "fedpals"], vary="target", ess=0.5, jobs=1,
        folder=tmp_path / "c", **SETTINGS,
    )  # fmt: skip
    assert again.csv() == table.csv()


def test_the_held_out_client_trains_nothing(task: fs.Task) -> None:
    one = task.held_out("north")
    assert "north" not in one.clients
    assert set(one.clients) | {"north"} == set(task.clients)
    built = one.build().task
    assert len(built.test) == 60
    assert built.target.numpy() == pytest.approx(
        np.bincount(built.test.y.numpy(), minlength=2) / 60
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"seeds": [0, 1]}, 'seeds = [0, 1]: with vary="target" differences are paired by target'),
        ({"targets": ["nroth"]}, 'target="nroth" is no client'),
        ({"targets": []}, "targets is empty; give at least one client"),
        ({"targets": "north"}, 'targets = "north": give a list of clients'),
        ({"targets": ["north", "north"]}, "targets: a client is there twice"),
        ({"targets": ["pooled"]}, '"pooled" is no client to hold out'),
        (
            {"vary": "training", "targets": ["north"]},
            'targets are for vary="target", and vary is "training"',
        ),
    ],
    ids=["seeds", "unknown", "none", "text", "twice", "pooled", "training"],
)
def test_what_cannot_vary(task: fs.Task, given: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as refused:
        fs.compare(task, "linear", ["fedavg"], **{"vary": "target", **SETTINGS, **given})
    assert message in str(refused.value)


def test_a_test_set_is_no_client() -> None:
    x, y = [[0.0], [1.0], [0.2], [0.9]], ["no", "yes", "no", "yes"]
    with_test = fs.Task.from_arrays(x, y, client=list("aabb"), target=([[0.5]], ["yes"]))
    with pytest.raises(InputError, match="the target of this task is a test set"):
        with_test.held_out("a")
