"""Several inputs, sequences, numbers to predict and several labels per row, as packed rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import fedshift as fs
from fedshift.errors import InputError
from fedshift.tasks.encoding import Encoding
from fedshift.tasks.layout import Layout, Part
from support.drawn_tasks import drawn_arrays

CLIENT = ["a"] * 6 + ["b"] * 6
Y = [0, 1] * 6


def test_a_tuple_of_ids_and_mask_comes_back_as_it_was() -> None:
    ids, mask = torch.arange(36).reshape(12, 3), torch.arange(36).reshape(12, 3) % 2 == 0
    built = fs.Task.from_arrays((ids, mask), Y, client=CLIENT, target="b").build()
    layout = built.encoding.layout
    assert layout is not None
    assert built.task.clients[0].x.dtype == torch.float32
    one, two = layout.unpack(built.task.test.x)
    assert torch.equal(one, ids[6:])
    assert torch.equal(two, mask[6:])
    assert torch.equal(built.encoding.apply((ids[6:], mask[6:])), built.task.test.x)
    assert built.input_shape == (3,)


def test_a_dict_of_inputs_of_other_shapes() -> None:
    x = {"image": torch.rand(12, 1, 4, 4), "age": torch.rand(12, 1)}
    built = fs.Task.from_arrays(x, Y, client=CLIENT, target="b").build()
    layout = built.encoding.layout
    assert layout is not None
    got = layout.unpack(built.task.test.x)
    assert torch.equal(got["image"], x["image"][6:])
    assert torch.equal(got["age"], x["age"][6:])
    per_example = torch.vmap(lambda row: layout.unpack(row[None])["image"][0])(built.task.test.x)
    assert torch.equal(per_example, x["image"][6:])
    assert Encoding.from_json(built.encoding.to_json()) == built.encoding


def test_sequences_of_unequal_length_get_a_mask() -> None:
    rows = [torch.arange(1, 2 + i % 4) for i in range(12)]
    built = fs.Task.from_arrays(rows, Y, client=CLIENT, target="b").build()
    assert built.encoding.layout is not None
    x, mask = built.encoding.layout.unpack(built.task.test.x)
    assert x.shape == mask.shape == (6, 4)
    assert mask.sum(1).tolist() == [len(row) for row in rows[6:]]
    assert x[mask].tolist() == torch.cat(rows[6:]).tolist()
    assert (x[~mask] == 0).all()


@pytest.mark.filterwarnings("error")
def test_arrays_of_one_length_need_no_mask() -> None:
    rows = [np.full((4, 3), i, "float32") for i in range(12)]
    built = fs.Task.from_arrays(rows, Y, client=CLIENT, target="b").build()
    assert torch.equal(built.task.test.x, torch.tensor(np.array(rows[6:])))


@pytest.mark.parametrize("long", [4, 5])
def test_rows_may_differ_in_their_length_alone(long: int) -> None:
    rows = [np.zeros((4, 3)) if i != 7 else np.zeros((long, 2)) for i in range(12)]
    message = (
        rf'"x": row 7 has shape \({long}, 2\), row 0 \(4, 3\); rows may differ in their length'
    )
    with pytest.raises(InputError, match=message):
        fs.Task.from_arrays(rows, Y, client=CLIENT, target="b")


def test_whole_numbers_that_float32_would_change_are_refused() -> None:
    ids = torch.full((12, 2), 2**24 + 1)
    with pytest.raises(InputError, match='"input 0" holds a whole number beyond 2\\^24'):
        fs.Task.from_arrays((ids, ids), Y, client=CLIENT, target="b").build()
    with pytest.raises(InputError, match="numbers that 32-bit numbers change"):
        fs.Task.from_arrays(ids, Y, client=CLIENT, target="b")
    exact = fs.Task.from_arrays((ids - 1, ids - 1), Y, client=CLIENT, target="b").build()
    assert exact.encoding.layout is not None
    assert torch.equal(exact.encoding.layout.unpack(exact.task.test.x)[0], ids[6:] - 1)


@pytest.mark.parametrize("table", [False, True])
def test_numbers_to_predict_ride_behind_the_inputs(table: bool) -> None:
    x, _, client = drawn_arrays()
    y = x @ [1.0, 2.0, 3.0]
    given: Any = {"a": x[:, 0], "b": x[:, 1]} if table else x
    task = fs.Task.from_arrays(given, y, client=client, target="north", kind="regression")
    built = task.build()
    layout, test = built.encoding.layout, built.task.test
    assert layout is not None
    north = y[client == "north"].astype(np.float32)
    assert layout.target(test.x)[:, 0].tolist() == north.tolist()
    assert torch.equal(layout.unpack(test.x), built.encoding.apply(given)[client == "north"])
    assert task.input_shape == (2,) if table else (3,)
    assert len(task.classes) == 10
    train = torch.cat([c.y for c in built.task.clients])
    assert torch.bincount(train).float().std() < 1.0
    values = torch.cat([layout.target(c.x) for c in built.task.clients])[:, 0]
    assert all(values[train == k].max() <= values[train == k + 1].min() for k in range(9))


def test_bins_come_of_training_rows_alone() -> None:
    x, _, client = drawn_arrays()
    y = x @ [1.0, 2.0, 3.0]
    moved = np.where(client == "north", y + 1000, y)
    options: dict[str, Any] = {"client": client, "target": "north", "kind": "regression"}
    one, two = (fs.Task.from_arrays(x, v, **options) for v in (y, moved))
    assert one.classes == two.classes
    for a, b in zip(one.build().task.clients, two.build().task.clients, strict=True):
        assert torch.equal(a.x, b.x)
        assert torch.equal(a.y, b.y)
    assert two.build().task.target[-1] == 1
    with pytest.raises(InputError, match="label shares have no meaning where y is numbers"):
        fs.Task.from_arrays(x, y, **options | {"target": [1.0]})
    with pytest.raises(InputError, match="y holds what is no number"):
        fs.Task.from_arrays(x, ["a"] * 120, **options)


def test_several_labels_per_row() -> None:
    x, _, client = drawn_arrays()
    y = (x > 0).astype(int)
    task = fs.Task.from_arrays(
        x, y, client=client, target="north", kind="multilabel", classes=["one", "two", "three"]
    )
    built = task.build()
    assert built.encoding.layout is not None
    assert torch.equal(
        built.encoding.layout.target(built.task.test.x), torch.tensor(y[client == "north"]).float()
    )
    assert built.encoding.classes == ("one", "two", "three")
    assert "one+three" in task.classes
    assert "none" in task.classes
    with pytest.raises(InputError, match="y holds 2; several labels per row are 0 or 1 each"):
        fs.Task.from_arrays(x, y * 2, client=client, target="north", kind="multilabel")


def test_layouts_are_json_and_refuse_other_shapes() -> None:
    layout = Layout((Part("a", (2, 2)), Part("b", (), "int64")), "dict")
    assert Layout.from_json(layout.to_json()) == layout
    assert layout.width == 5
    row = layout.pack({"a": torch.ones(3, 2, 2), "b": torch.arange(3)})
    assert layout.unpack(row)["b"].tolist() == [0, 1, 2]
    with pytest.raises(InputError, match=r'"a" has examples of shape \(3,\); the task\'s have'):
        layout.pack((torch.ones(3, 3), torch.arange(3)))
    with pytest.raises(InputError, match="no part to predict"):
        layout.target(row)


def test_several_label_columns_of_a_table_give_their_names() -> None:
    x, _, client = drawn_arrays()
    columns = {"a": x[:, 0], "fever": 1 * (x[:, 1] > 0), "cough": 1 * (x[:, 2] > 0), "at": client}
    task = fs.Task.from_frame(
        columns, client="at", label=["fever", "cough"], target="north", kind="multilabel"
    )
    assert task.build().encoding.classes == ("fever", "cough")
    assert task.classes == ("cough", "fever", "fever+cough", "none")
