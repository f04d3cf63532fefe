"""`classes=` as names for labels that are whole numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import fedshift as fs
from fedshift.errors import InputError
from fedshift.shifts import Iid

NAMES = ("cat", "dog", "owl")
N = 90
X = np.random.default_rng(0).normal(size=(N, 2)).astype(np.float32)
Y = np.arange(N) % 3
SITE = np.where(np.arange(N) % 2, "a", "b")


def made_by(way: str, folder: Path, **options: Any) -> fs.Task:
    dataset = TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
    parts = {name: np.flatnonzero(name == SITE) for name in "ab"}
    if way == "from_split":
        return fs.Task.from_split(X, Y, Iid(), clients=2, target="pooled", **options)
    if way == "from_datasets":
        sets = {n: torch.utils.data.Subset(dataset, rows.tolist()) for n, rows in parts.items()}
        return fs.Task.from_datasets(sets, target="pooled", **options)
    if way == "from_partition":
        return fs.Task.from_partition(dataset, parts, target="pooled", **options)
    if way == "from_csv":
        lines = [f"{a},{b},{y},{s}" for (a, b), y, s in zip(X, Y, SITE, strict=True)]
        (folder / "t.csv").write_text("\n".join(["u,v,y,site", *lines]))
        place = folder / "t.csv"
        return fs.Task.from_csv(place, client="site", label="y", target="pooled", **options)
    return fs.Task.from_arrays(X, Y, client=SITE, target="pooled", **options)


WAYS = ("from_arrays", "from_split", "from_datasets", "from_partition", "from_csv")


@pytest.mark.parametrize("way", WAYS)
def test_names_for_whole_numbers(way: str, tmp_path: Path) -> None:
    """The task is that of the numbers, by other names."""
    task, plain = made_by(way, tmp_path, classes=NAMES), made_by(way, tmp_path)
    assert (task.classes, plain.classes) == (NAMES, ("0", "1", "2"))
    pairs = zip(task.build().task.clients, plain.build().task.clients, strict=True)
    assert all(torch.equal(a.y, b.y) and torch.equal(a.x, b.x) for a, b in pairs)


def test_labels_in_another_order_are_still_ordered() -> None:
    task = fs.Task.from_arrays(X, Y, client=SITE, target="pooled", classes=[2, 0, 1])
    assert task.classes == ("2", "0", "1")
    some = fs.Task.from_arrays(X, 2 * (Y > 0), client=SITE, target={"cat": 1, "dog": 0, "owl": 1},
                               classes=NAMES)  # fmt: skip
    assert some.classes == NAMES
    assert some.build().task.target.tolist() == [0.5, 0.0, 0.5]


@pytest.mark.parametrize(
    ("y", "classes", "message"),
    [
        (Y, ["cat", "dog"], r"2 names for labels .* up to 2 \(0, 1, 2\); give 3, in the order"),
        (Y, [*NAMES, "eel"], r"4 names for labels .* up to 2 .*; give 3"),
        (Y + 1, NAMES, r"3 names for labels .* up to 3 \(1, 2, 3\); give 4"),
        (Y, ["cat", "cat", "owl"], '"cat" is given twice'),
        (Y, ["0", "dog", "owl"], 'the label "1" is not among classes=0, dog, owl'),
        (Y - 1, NAMES, 'the label "-1" is not among classes'),
        (Y, "cat", "give a list of names"),
    ],
)
def test_others_are_refused(y: Any, classes: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        fs.Task.from_arrays(X, y, client=SITE, target="pooled", classes=classes)
