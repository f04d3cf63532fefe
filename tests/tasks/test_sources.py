"""Tasks from data sets of other libraries, partitions, splits, folders and the library's tables."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

import fedshift as fs
from fedshift.errors import InputError
from fedshift.shifts import Sparsity
from support.image_fixtures import png


class Hub:
    """Rows in the form of HuggingFace's `datasets`, with names of labels."""

    def __init__(self, rows: list[dict[str, Any]], names: list[str] | None = None) -> None:
        self.rows = rows
        self.features = {"label": SimpleNamespace(names=names)} if names else {}

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return self.rows[i]


X = torch.arange(24.0).reshape(12, 2)
Y = torch.tensor([0, 1] * 6)


def test_data_sets_of_all_kinds_side_by_side() -> None:
    hub = Hub([{"x": X[i].tolist(), "label": int(Y[i])} for i in range(4)], ["cat", "dog"])
    torchs = Subset(TensorDataset(X, Y), range(4, 8))
    torchs.dataset.classes = ["cat", "dog"]  # type: ignore[attr-defined]
    pair = (X[8:].numpy(), np.array(["cat", "dog"] * 2))
    task = fs.Task.from_datasets({"hub": hub, "torch": torchs, "pair": pair}, target="pair")
    assert task.clients == ("hub", "torch")
    assert task.classes == ("cat", "dog")
    built = task.build()
    assert torch.equal(built.task.test.x, X[8:])
    both = torch.cat([built.data.train.x[:, 0], built.data.test.x[:, 0]])
    assert sorted(both.tolist()) == X[:, 0].tolist()


def test_images_of_pillow_and_tokens() -> None:
    image = pytest.importorskip("PIL.Image")
    grey = [{"image": image.new("L", (4, 3), 10 * i), "label": i % 2} for i in range(6)]
    task = fs.Task.from_datasets({"a": Hub(grey), "b": Hub(grey)}, target="b")
    assert task.input_shape == (1, 3, 4)
    assert task.build().data.train.x.dtype == torch.uint8
    tokens = [
        {"input_ids": list(range(1, 2 + i)), "attention_mask": [1] * (i + 1), "label": i % 2}
        for i in range(4)
    ]
    task = fs.Task.from_datasets({"a": Hub(tokens), "b": Hub(tokens)}, target="b")
    built = task.build()
    assert built.encoding.layout is not None
    x = built.encoding.layout.unpack(built.task.test.x)
    assert x["input_ids"].tolist()[1] == [1, 2, 0, 0]
    assert x["input_ids"].dtype == torch.int64


def test_a_data_set_is_a_test_set() -> None:
    train = Hub([{"v": [float(i)], "label": i % 2} for i in range(8)], ["cat", "dog"])
    test = Hub([{"v": [10.0], "label": 1}, {"v": [11.0], "label": 0}], ["cat", "dog"])
    task = fs.Task.from_datasets({"a": train, "b": train}, target=test)
    assert task.clients == ("a", "b")
    assert task.build().task.test.x.tolist() == [[10.0], [11.0]]
    assert task.build().task.test.y.tolist() == [1, 0]
    parts = fs.Task.from_partition(train, [[0, 1, 2, 3], [4, 5, 6, 7]], target=test)
    assert parts.build().task.test.y.tolist() == [1, 0]
    tensors = TensorDataset(X[:2] + 100, Y[:2])
    task = fs.Task.from_datasets({"a": TensorDataset(X, Y)}, target=tensors)
    assert torch.equal(task.build().task.test.x, X[:2] + 100)
    with pytest.raises(InputError, match="the target is an empty data set"):
        fs.Task.from_datasets({"a": train}, target=Hub([]))
    with pytest.raises(InputError, match='rows have no "kind"'):
        fs.Task.from_datasets({"a": train}, target=test, y="kind")


def test_rows_without_a_label_are_left_out() -> None:
    """Where numbers have names, -1 stands for none; else it is a label as others are."""
    rows = [{"v": [float(i)], "label": i % 3 - 1} for i in range(12)]
    named = fs.Task.from_datasets({"a": Hub(rows, ["cat", "dog"]), "b": Hub(rows)}, target="a")
    assert fs.Task.from_datasets({"b": Hub(rows)}, target="pooled").classes == ("-1", "0", "1")
    assert "-1" in named.classes
    both = {"a": Hub(rows, ["cat", "dog"]), "b": Hub(rows, ["cat", "dog"])}
    task = fs.Task.from_datasets(both, target="b")
    assert task.classes == ("cat", "dog")
    assert len(task.build().task.test.y) == 8
    assert "Left out without a label: 8 rows (a: 4, b: 4)." in str(task)


def test_arrays_that_cannot_be_written_are_copied(recwarn: pytest.WarningsRecorder) -> None:
    x = X.numpy().copy()
    x.flags.writeable = False
    task = fs.Task.from_datasets({"a": (x, Y), "b": (x, Y)}, target="b")
    assert torch.equal(task.build().task.test.x, X)
    assert not [w for w in recwarn if "writable" in str(w.message)]


def test_what_becomes_a_dataframe_is_a_table() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"site": ["a", "b"] * 6, "v": range(12), "y": [0, 0, 1, 1] * 3})
    arrow = SimpleNamespace(to_pandas=lambda: frame)
    about = {"client": "site", "label": "y", "target": "b"}
    one, other = (fs.Task.from_frame(table, **about) for table in (frame, arrow))
    assert one.build().digest == other.build().digest


def test_rows_of_columns_are_a_table() -> None:
    rows = [{"age": i, "ward": "AB"[i % 2], "label": i % 2} for i in range(8)]
    built = fs.Task.from_datasets({"a": Hub(rows), "b": Hub(rows)}, target="b").build()
    assert [c.name for c in built.encoding.columns] == ["age", "ward"]


class Odd(Dataset[Any]):
    """Rows that are neither pairs nor dicts."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, i: int) -> Any:
        return X[i], X[i], Y[i]


GOOD = TensorDataset(X, Y)


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ([GOOD], "give a dict of them by client's name"),
        ({"a": GOOD, "b": DataLoader(GOOD)}, "b is a DataLoader, of batches; give its .dataset"),
        ({"a": GOOD, "b": iter(())}, "a data set has a length, and rows by number; give list"),
        ({"a": GOOD, "b": Odd()}, r"b: a row is a tuple; rows are pairs \(x, y\)"),
        ({"a": GOOD, "b": (X.byte().reshape(-1, 2, 1, 1), Y)}, 'examples of "b" are uint8 with'),
        ({"a": GOOD, "b": (X, Y[:3])}, "b: 12 inputs and 3 labels"),
        ({"a": Hub([{"q": [1.0], "z": 0}])}, 'rows hold q, z; name the label by y="..."'),
        ({"a": Hub([{"p": [1.0], "q": [1.0], "y": 0}])}, 'name what to learn from by x="..."'),
        ({"a": Hub([])}, "the data sets are empty"),
        ({"a": {"train": GOOD, "test": GOOD}}, r'a is a dict of train, test; .*\["train"\] of it'),
    ],
)
def test_what_is_no_data_set_is_refused(sources: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        fs.Task.from_datasets(sources, target="a")


def test_keys_are_given_where_they_are_not_clear() -> None:
    rows = Hub([{"p": [1.0], "q": [2.0, i], "kind": i % 2} for i in range(4)])
    task = fs.Task.from_datasets({"a": rows, "b": rows}, target="b", x="q", y="kind")
    assert task.input_shape == (2,)
    with pytest.raises(InputError, match='rows have no "kinds".* Did you mean "kind"?'):
        fs.Task.from_datasets({"a": rows, "b": rows}, target="b", x="q", y="kinds")


def test_a_partition_by_row_numbers() -> None:
    both = ConcatDataset([TensorDataset(X, Y), TensorDataset(X + 24, Y)])
    parts = {"a": [0, 1, 2, 3, 20], "b": np.arange(4, 12), "c": torch.arange(12, 16)}
    task = fs.Task.from_partition(both, parts, target="c")
    assert task.clients == ("a", "b")
    assert torch.equal(task.build().task.test.x, X[:4] + 24)
    assert fs.Task.from_partition((X, Y), [[2, 3, 4], [0, 1]], target="1").clients == ("0",)
    with pytest.raises(InputError, match="indices hold row 24; the data set's rows are 0 to 23"):
        fs.Task.from_partition(both, {"a": [24], "b": [0]}, target="a")
    with pytest.raises(InputError, match="row 3 is given to two clients"):
        fs.Task.from_partition(both, {"a": [3, 4], "b": [2, 3]}, target="a")


def test_a_shift_over_own_labels() -> None:
    y = np.array(["a", "b", "c", "d"] * 30)
    x = np.arange(120.0)[:, None]
    task = fs.Task.from_split(x, y, Sparsity(2), clients=4, target="3")
    assert task.clients == ("0", "1", "2")
    labels = task.build().task.table()["labels"]
    assert ((labels > 0).sum(1) == 2).all()
    again = fs.Task.from_split(x, y, Sparsity(2), clients=4, target="3")
    other = fs.Task.from_split(x, y, Sparsity(2), clients=4, target="3", seed=1)
    assert task.build().digest == again.build().digest != other.build().digest


def test_what_is_no_shift_is_refused() -> None:
    with pytest.raises(InputError, match='shift is the text "sparsity"; give one of fedshift.shi'):
        fs.Task.from_split(X, Y, "sparsity", clients=3, target="pooled")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="clients must be a whole number"):
        fs.Task.from_split(X, Y, Sparsity(2), clients="3", target="pooled")  # type: ignore[arg-type]


def pictures(folder: Path, odd: tuple[int, int] = (8, 8)) -> Path:
    for client in ("north", "south"):
        for k, label in enumerate(("cat", "dog")):
            place = folder / client / label
            place.mkdir(parents=True)
            for i in range(3):
                size = odd if (client, label, i) == ("south", "dog", 2) else (8, 8)
                (place / f"{i}.png").write_bytes(png((60 * k, 40 * i, 0), size))
    return folder


def test_images_in_folders_and_by_an_index(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    folder = pictures(tmp_path)
    task = fs.Task.from_folder(folder, target="south")
    assert task.clients == ("north",)
    assert task.classes == ("cat", "dog")
    assert task.input_shape == (3, 8, 8)
    assert fs.Task.from_folder(folder, target="south", size=(4, 6)).input_shape == (3, 4, 6)
    rows = [f"{p.relative_to(folder)},{p.parts[-3]},{p.parts[-2]}" for p in folder.rglob("*.png")]
    (folder / "all.csv").write_text("\n".join(["path,client,label", *sorted(rows)]))
    listed = fs.Task.from_folder(folder, target="south", index="all.csv")
    assert listed.build().digest == task.build().digest


def test_odd_folders_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    folder = pictures(tmp_path / "a", (8, 9))
    with pytest.raises(InputError, match=r"south/dog/2.png has 8 x 9 pixels .* 8 x 8; give size="):
        fs.Task.from_folder(folder, target="south")
    with pytest.raises(InputError, match="give pixels a side"):
        fs.Task.from_folder(folder, target="south", size="8")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="there is no folder"):
        fs.Task.from_folder(tmp_path / "b", target="south")
    (tmp_path / "c").mkdir()
    with pytest.raises(InputError, match="holds no JPEG or PNG images"):
        fs.Task.from_folder(tmp_path / "c", target="south")
    (folder / "flat.png").write_bytes(png((0, 0, 0)))
    with pytest.raises(InputError, match="flat.png: images lie in client/label/file"):
        fs.Task.from_folder(folder, target="south")


def test_a_table_of_the_librarys() -> None:
    pytest.importorskip("palmerpenguins")
    task = fs.Task.from_name("penguins", target="Dream")
    assert task.classes == ("Adelie", "Chinstrap", "Gentoo")
    assert task.clients == ("Biscoe", "Torgersen")
    assert task.name == "penguins"


def test_an_unknown_table() -> None:
    with pytest.raises(InputError, match='unknown table "penguin".* Did you mean "penguins"?'):
        fs.Task.from_name("penguin", target="Dream")
