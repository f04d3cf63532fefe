"""`fedshift.Task.from_arrays`: targets, cuts, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import fedshift as fs
from fedshift.errors import InputError
from support.drawn_tasks import drawn_arrays, drawn_task


def test_a_client_that_is_held_out_gives_the_target_and_the_test_rows() -> None:
    x, y, client = drawn_arrays()
    task = fs.Task.from_arrays(x, y, client=client, target="north")
    built = task.build()
    assert task.clients == ("east", "south", "west")
    assert task.classes == ("ill", "well")
    assert task.input_shape == (3,)
    north = client == "north"
    assert len(built.task.test) == north.sum()
    assert built.task.target.tolist() == pytest.approx(
        [(y[north] == "ill").mean(), (y[north] == "well").mean()]
    )
    rows = [
        len(c.y) + len(v) for c, v in zip(built.task.clients, built.task.validation, strict=True)
    ]
    assert rows == [(client == name).sum() for name in task.clients]
    assert any("label counts of the client north" in note for note in built.notes)
    assert task.kind == "classification"


def test_the_target_takes_no_part_in_what_is_trained_on() -> None:
    """Control: a training client's rows do."""
    x, y, client = drawn_arrays()
    table = {"a": x[:, 0], "b": x[:, 1], "c": np.where(x[:, 2] > 0, "high", "low").astype(object)}

    def built(of: str, **moved: Any) -> Any:
        changed = {n: v.copy() for n, v in table.items()}
        for name, value in moved.items():
            changed[name][client == of] = value
        return fs.Task.from_arrays(changed, y, client=client, target="north").build()

    before, after = built("north"), built("north", a=1e6, b=np.nan, c="elsewhere")
    control = built("west", a=1e6)
    assert before.encoding == after.encoding
    for one, two in zip(before.task.clients, after.task.clients, strict=True):
        assert torch.equal(one.x, two.x)
        assert torch.equal(one.y, two.y)
    for one, two in zip(before.task.validation, after.task.validation, strict=True):
        assert torch.equal(one.x, two.x)
    assert not torch.equal(before.task.test.x, after.task.test.x)
    assert before.encoding != control.encoding
    assert any('count as "other"' in note for note in after.notes)


@pytest.mark.parametrize(
    ("target", "T"),
    [
        ({"ill": 0.25, "well": 0.75}, [0.25, 0.75]),
        ([0.5, 0.5], [0.5, 0.5]),
        (torch.tensor([0.5, 0.5]), [0.5, 0.5]),
        ({"ill": 30, "well": 10}, [0.75, 0.25]),
        (np.array([3, 1]), [0.75, 0.25]),
        (pd.Series({"well": 0.75, "ill": 0.25}), [0.25, 0.75]),
    ],
)
def test_test_rows_follow_given_shares_and_counts(target: Any, T: list[float]) -> None:
    built = drawn_task(target, test=0.4).build()
    assert built.task.target.tolist() == T
    shares = torch.bincount(built.task.test.y).double() / len(built.task.test)
    assert shares.tolist() == pytest.approx(T, abs=1 / len(built.task.test))
    assert built.task.tests == ()
    assert any("keeps 40% of its rows" in note for note in built.notes)


def test_pooled_follows_all_clients() -> None:
    x, y, client = drawn_arrays()
    built = fs.Task.from_arrays(x, y, client=client, target="pooled").build()
    assert built.task.target[0] == pytest.approx((y == "ill").mean())
    assert built.clients == ("east", "north", "south", "west")


def test_each_client_is_tested_on_its_own_rows() -> None:
    built = drawn_task("clients").build()
    assert len(built.task.tests) == len(built.clients) == 4
    assert len(built.task.test) == sum(map(len, built.task.tests)) > 0
    assert torch.equal(built.task.test.x, torch.cat([t.x for t in built.task.tests]))


def test_a_test_set_of_its_own() -> None:
    x, y, client = drawn_arrays()
    mine = client != "north"
    pair = (x[~mine], y[~mine])
    task = fs.Task.from_arrays(x[mine], y[mine], client=client[mine], target=pair)
    other = fs.Task.from_arrays(x, y, client=client, target="north")
    assert task.clients == other.clients
    for one, two in zip(task.build().task.clients, other.build().task.clients, strict=True):
        assert torch.equal(one.x, two.x)
    assert torch.equal(task.build().task.target, other.build().task.target)
    assert task.target.text == "the given test set"


def test_all_rows_are_used_once_and_the_pool_holds_no_validation() -> None:
    x, y, client = drawn_arrays()
    x[:, 0] = np.arange(len(x))
    built = fs.Task.from_arrays(x, y, client=client, target="clients").build()
    parts = [*built.task.clients, *built.task.validation, *built.task.tests]
    assert sorted(torch.cat([part.x[:, 0] for part in parts]).tolist()) == list(range(len(x)))
    pool = built.data.train.x[built.pool][:, 0]
    assert torch.equal(pool, torch.cat([c.x[:, 0] for c in built.task.clients]))


def test_the_cut_depends_on_the_seed_alone() -> None:
    assert drawn_task("north").build().digest == drawn_task("north").build().digest
    one, two = drawn_task("north", seed=1), drawn_task("north")
    assert one.build().digest == two.build(1).digest != two.build().digest


def test_classes_are_in_order_of_number_or_as_given() -> None:
    x = np.zeros((6, 1))
    client = ["a", "a", "a", "b", "b", "b"]
    task = fs.Task.from_arrays(x, [10, 9, 10, 9, 10, 9], client=client, target="b")
    assert task.classes == ("9", "10")
    turned = fs.Task.from_arrays(
        x, [10, 9, 10, 9, 10, 9], client=client, target="b", classes=[10, 9, 8]
    )
    assert turned.classes == ("10", "9", "8")
    assert turned.build().task.clients[0].y.tolist() in ([0, 1, 0], [0, 1], [0, 0, 1])


def test_rows_without_a_label_and_odd_clients_are_named() -> None:
    x, y, client = drawn_arrays()
    y, client = y.astype(object), client.astype(object)
    y[:3], client[10] = None, None
    y[client == "west"] = "well"
    client[20] = "lone"
    built = fs.Task.from_arrays(x, y, client=client, target="north").build()
    notes = " ".join(built.notes)
    assert "Left out without a label: 3 rows (east: 1, north: 1, south: 1)" in notes
    assert "they name no client: 1 row." in notes
    assert "less than 2 rows: lone" in notes


def test_classes_at_the_target_alone_are_named() -> None:
    x, y, client = drawn_arrays()
    y = y.astype(object)
    y[np.flatnonzero(client == "north")[:5]] = "unsure"
    task = fs.Task.from_arrays(x, y, client=client, target="north")
    assert any("At the target alone, at no client: unsure" in n for n in task.build().notes)
    assert not task.diagnose().covered
    assert drawn_task("north").diagnose().covered


def test_images_in_bytes_are_scaled_as_the_librarys_are() -> None:
    x = torch.arange(8 * 4 * 4 * 3).reshape(8, 4, 4, 3).to(torch.uint8)
    task = fs.Task.from_arrays(x, [0, 1] * 4, client=["a"] * 4 + ["b"] * 4, target="b")
    built = task.build()
    assert task.input_shape == (3, 4, 4)
    assert built.data.train.x.dtype == torch.uint8
    assert built.task.test.x[0].flatten()[0] == pytest.approx(48 * 4 % 256 / 127.5 - 1)
    assert torch.equal(built.encoding.apply(x[4:]), built.task.test.x)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": "nort"}, 'target="nort" is no client; .* Did you mean "north"?'),
        ({"target": {"ill": 0.5, "wel": 0.5}}, 'label "wel" is not among .* Did you mean "well"?'),
        ({"target": {"ill": 0.5}}, 'no entry for "well"'),
        ({"target": [0.2, 0.2]}, "sums to 0.4; give shares that sum to 1"),
        ({"target": [1.0]}, "1 entries for 2 classes"),
        (
            {"target": pd.DataFrame({"a": [1]})},
            "a table without a word on its label",
        ),
        ({"client": [None] * 120}, "client is empty in every row; nothing is left to train on"),
        ({"x": np.zeros((120, 0))}, "has shape .120, 0.: it holds no numbers"),
        ({"x": [], "y": [], "client": []}, "client has no rows, and neither has x"),
        ({"target": 3.5}, "target is 3.5; give a client's name"),
        ({"client": ["a"]}, "1 entries of client for 120 rows"),
        ({"client": "hospital"}, "one entry for each of the 120 rows"),
        ({"y": np.zeros((120, 2))}, 'kind="multilabel"'),
        ({"y": np.zeros(120)}, "y has 1 class"),
        ({"y": np.random.default_rng(0).normal(size=120)}, 'kind="regression"'),
        ({"validaton": 0.1}, 'option of a task "validaton".* Did you mean "validation"?'),
        ({"validation": 1.5}, "validation=1.5: give a share"),
        ({"kind": "ranking"}, 'unknown kind "ranking"'),
        ({"classes": ["ill"]}, 'the label "well" is not among classes=ill'),
        ({"missing": "drop"}, "unknown way with missing values"),
        ({"x": [["a"]] * 120}, "no tensor of numbers"),
        ({"x": [[np.nan]] * 120}, 'x holds NaN or infinity in row 0 .client "east".; fill it in'),
        ({"transform": 3}, "transform is 3; give a function"),
        ({"categories": ["age"]}, 'categories: there is no column "age"'),
        ({"target": {"ill": 1, "well": 0}, "test": 0.001}, 'no row with the label "ill"'),
    ],
)
def test_refused_in_one_sentence(change: dict[str, Any], message: str) -> None:
    x, y, client = drawn_arrays()
    given: dict[str, Any] = {"x": x, "y": y, "client": client, "target": "north"} | change
    with pytest.raises(InputError, match=message):
        fs.Task.from_arrays(given.pop("x"), given.pop("y"), **given).build()


def test_columns_of_very_different_scale_are_named() -> None:
    x, y, client = drawn_arrays()
    notes = fs.Task.from_arrays(x * [1, 1, 1e4], y, client=client, target="north").build().notes
    assert any("from_frame standardises them" in note for note in notes)
    assert not any("standardises" in note for note in drawn_task("north").build().notes)


def test_short_in_print_and_notebooks() -> None:
    task = drawn_task("north")
    assert str(task).startswith("yours: 3 clients (east, south, west), 90 rows, 2 classes (ill, ")
    assert "target: the client north, held out" in str(task)
    assert "<td>" in task._repr_html_()
    assert "the client north" in task._repr_html_()
    assert repr(task) == (
        "Task(yours: 120 rows of 3 clients, classification; target: the client north, held out)"
    )


def test_a_task_that_cannot_be_built_says_so_in_print() -> None:
    task = drawn_task({"ill": 1, "well": 0}, test=0.001)
    assert 'target: no row with the label "ill"' in str(task)
    assert repr(task).startswith("Task(yours: 120 rows")
