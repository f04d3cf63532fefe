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


@pytest.mark.slow
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


@pytest.mark.slow
def test_losses_are_worst_where_they_are_large(task: fs.Task) -> None:
    """Corrected models are in the table, too; control: of accuracies the smallest is the worst."""
    keys: dict[str, Any] = {"vary": "target", "jobs": 1, "backend": "dense", **SETTINGS}
    methods = ["fedavg", "fedpals"]
    table = fs.compare(task, "linear", methods, metric="target_loss", ess=0.5, **keys)
    row, base = table.row("fedpals"), table.row("fedavg")
    losses = row.values("target_loss")
    assert row.worst("target_loss") == max(losses.values()) > min(losses.values())
    moved = row.values("target_loss_corrected")
    assert row.worst("target_loss_corrected") == max(moved.values())
    assert row.worst("target_accuracy") == min(row.values("target_accuracy").values())
    assert row.corrected is not None
    assert row.corrected_difference is not None
    before = base.values("target_loss_corrected")
    gains = [moved[i] - before[i] for i in moved]
    assert row.corrected.mean == pytest.approx(math.fsum(moved.values()) / 4)
    assert row.corrected_difference.mean == pytest.approx(math.fsum(gains) / 4)
    assert [h for h in table.shown().header if "orrected" in h] == ["Corrected"]
    runs = table.frame(runs=True)
    assert runs["target_loss_corrected"].tolist()[4:] == list(moved.values())


@pytest.mark.slow
def test_a_corrected_metric_is_shown_as_its_own_kind(task: fs.Task) -> None:
    keys: dict[str, Any] = {"vary": "target", "jobs": 1, "backend": "dense", **SETTINGS}
    shares, losses = (
        fs.compare(task, "linear", ["fedavg"], metric=f"target_{kind}_corrected", **keys)
        for kind in ("accuracy", "loss")
    )
    assert shares.percent
    assert not losses.percent
    assert "smaller is better" in losses.notes[0]
    assert "smaller is better" not in shares.notes[0]


@pytest.mark.slow
def test_a_table_over_targets_speaks_of_targets(task: fs.Task) -> None:
    """Control: a table over seeds speaks of seeds."""
    same: dict[str, Any] = {"one": "fedavg", "same": "fedavg"}
    over = fs.compare(task, "linear", same, vary="target", jobs=1, backend="dense", **SETTINGS)
    assert "+0.0 on every target" in str(over)
    assert list(over.frame().columns)[2] == "targets"
    assert "paired_targets" in over.frame()
    assert all("mean over targets" in caption for caption in over.plots())
    assert "seed" not in str(over)
    plain = fs.compare(task, "linear", same, seeds=3, jobs=1, backend="dense", **SETTINGS)
    assert "+0.0 on every seed" in str(plain)
    assert {"seeds", "paired_seeds"} < set(plain.frame())
    assert all("mean over seeds" in caption for caption in plain.plots())


@pytest.mark.slow
def test_the_notes_say_how_many_rows_test_and_which_labels_are_one_clients() -> None:
    """Control: without the label that only "c" has, there is no such note."""
    draws = np.random.default_rng(0)
    sites = ["a"] * 30 + ["b"] * 40 + ["c"] * 20
    y = draws.integers(2, size=90)
    y[-5:] = 2
    x = draws.standard_normal((90, 2)).astype(np.float32)
    keys: dict[str, Any] = {"vary": "target", "jobs": 1, "backend": "dense", **SETTINGS}
    for labels, end in ((y, True), (np.minimum(y, 1), False)):
        task = fs.Task.from_arrays(x, labels, client=sites, target="pooled")
        text = str(fs.compare(task, "linear", ["fedavg"], **keys))
        assert "Each target is tested on 20 to 40 rows." in text
        assert ("Of these, c has a label that no other client has" in text) == end
    named = fs.compare(task, "linear", ["fedavg"], targets=["b"], **keys)
    assert "Each target is tested on 40 rows." in str(named)
