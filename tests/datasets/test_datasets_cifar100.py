"""CIFAR-100 and its 20 groups: labels, the table between them, and files that are wrong."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedshift.datasets import catalogue, cifar100, known, load
from fedshift.errors import DataError, InputError
from support.dataset_fixtures import Touch, refuses, write_batch, write_cifar_100

IMAGES = np.random.default_rng(5).integers(0, 256, (8, 3, 32, 32)).astype(np.uint8)

# The table as it goes around in other people's code: the coarse label of each fine label.
TO_COARSE = (
    "4 1 14 8 0 6 7 7 18 3 3 14 9 18 7 11 3 9 7 11 6 11 5 10 7 6 13 15 3 15 0 11 1 10 12 14 16 9 "
    "11 5 5 19 8 8 15 13 14 17 18 10 16 4 17 4 2 0 17 4 18 17 10 3 2 12 12 16 12 1 9 19 2 10 0 1 "
    "16 12 9 13 15 13 16 19 2 4 6 19 5 5 8 19 18 1 2 15 6 0 17 8 14 13"
)


def test_fine_and_coarse_names_and_their_table() -> None:
    assert [*map(int, TO_COARSE.split())] == [*cifar100.COARSE_OF]
    assert [cifar100.FINE[k] for k in (0, 1, 13, 74, 99)] == [
        "apple",
        "aquarium_fish",
        "bus",
        "shrew",
        "worm",
    ]
    assert len(set(cifar100.FINE)) == 100
    assert [*cifar100.COARSE] == sorted(cifar100.COARSE)
    assert [cifar100.COARSE_OF.count(c) for c in range(20)] == [5] * 20
    assert cifar100.COARSE[cifar100.COARSE_OF[13]] == "vehicles_1"


def test_both_levels_of_labels(tmp_path: Path) -> None:
    fine = [0, 1, 2, 13, 58, 85, 99, 85]
    folder = write_cifar_100(tmp_path, IMAGES, fine)
    train, test = cifar100.read_fine(folder)
    assert torch.equal(test.x, torch.from_numpy(IMAGES))
    assert train.y.tolist() == test.y.tolist() == fine
    groups = cifar100.read_coarse(folder)[0]
    assert groups.y.tolist() == [4, 1, 14, 18, 18, 19, 13, 19]
    assert torch.equal(groups.x, train.x)
    assert torch.equal(cifar100.coarse(train.y), groups.y)
    assert cifar100.coarse(train.y[:0]).tolist() == []
    for wrong in (-1, 100):
        with pytest.raises(InputError, match=f"fine labels from .*{wrong}.*allowed: 0 to 99"):
            cifar100.coarse(torch.tensor([wrong, 5]))


def changed(path: Path, key: bytes, value: Any) -> None:
    content = pickle.loads(path.read_bytes(), encoding="bytes")  # noqa: S301
    path.write_bytes(pickle.dumps(content | {key: value}, protocol=2))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (b"coarse_labels", [4, 1, 14, 8, 0, 6, 7, 6], "image 7 has the fine label 7 (beetle) and"),
        (b"coarse_labels", [20] * 8, "label 20; allowed: 0 to 19"),
        (b"fine_labels", [100] * 8, "label 100; allowed: 0 to 99"),
        (b"fine_labels", [0] * 7, "7 labels for 8 images"),
        (b"fine_labels", 7, "b'fine_labels' is a int, expected a list of integers"),
        (b"data", IMAGES.reshape(8, -1)[:, 1:], "b'data' is [8, 3071], expected"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, key: bytes, value: Any, message: str) -> None:
    path = write_cifar_100(tmp_path, IMAGES, list(range(8))) / "train"
    cifar100.read_fine(tmp_path)
    changed(path, key, value)
    with refuses(path, message):
        cifar100.read_fine(tmp_path)


def test_a_batch_of_cifar_10_and_a_forged_pickle_are_refused(tmp_path: Path) -> None:
    path = write_cifar_100(tmp_path, IMAGES, list(range(8))) / "test"
    write_batch(path, IMAGES, [0] * 8)
    with refuses(path, "expected a dict with b'data', b'fine_labels', b'coarse_labels'"):
        cifar100.read_fine(tmp_path)
    witness = tmp_path / "witness"
    path.write_bytes(pickle.dumps({b"data": Touch(witness)}, protocol=2))
    with refuses(path, "Nothing was run"):
        cifar100.read_coarse(tmp_path)
    assert not witness.exists()


@pytest.mark.parametrize("name", ["cifar-100", "cifar-20"])
def test_loading_checks_that_the_set_is_whole(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for sub in catalogue.entry(name).folders:
        folder = write_cifar_100(tmp_path / sub / sub, IMAGES, list(range(8)))
        assert {one.name: one.found for one in known([tmp_path / sub])}[name] == folder
    with pytest.raises(DataError, match=rf"8 training examples; {name} has 50,000\. Replace"):
        load(name, folders=[folder.parent])
    (folder / "test").unlink()
    with pytest.raises(DataError, match="is incomplete: it lacks test"):
        load(name, folders=[folder.parent])


@pytest.mark.slow
def test_load_takes_a_full_cifar_100_and_checks_both_levels(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-100-python"
    images = np.zeros((50_000, 3, 32, 32), dtype=np.uint8)
    fine = [j % 100 for j in range(50_000)]
    train = write_cifar_100(folder, images, fine) / "train"
    content = train.read_bytes()
    write_cifar_100(folder, images[:10_000], fine[:10_000])
    train.write_bytes(content)
    assert load("cifar-100", folders=[tmp_path]).train.y.bincount().tolist() == [500] * 100
    groups = load("cifar-20", folders=[tmp_path])
    assert groups.test.y.bincount().tolist() == [500] * 20
    assert groups.classes == cifar100.COARSE
    write_cifar_100(folder, images[:10_000], [j % 99 for j in range(10_000)])
    train.write_bytes(content)
    with pytest.raises(DataError, match="100 test examples of every class, but not here of apple"):
        load("cifar-100", folders=[tmp_path])
