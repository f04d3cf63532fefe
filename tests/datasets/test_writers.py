"""Digits with their writers: the three layouts, generated, and the real MNIST where it is found."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.io import savemat

from fedshift import datasets
from fedshift.datasets import catalogue, idx, writers
from fedshift.errors import DataError
from support.dataset_fixtures import refuses, write_idx

WRITERS = {"train": [7, 7, 30, 7, 2, 30], "test": [900, 900, 41, 41]}


def integers(values: np.ndarray) -> bytes:
    head = bytes((0, 0, 12, values.ndim)) + np.array(values.shape, dtype=">u4").tobytes()
    return head + values.astype(">i4").tobytes()


def table(part: str, more: int = 0) -> np.ndarray:
    """QMNIST's eight columns for the digits of `write_idx`, and `more` rows that follow."""
    who = np.array(WRITERS[part] + [5] * more)
    out = np.zeros((len(who), 8), dtype=np.int64)
    out[:, 0], out[:, 2], out[:, 4] = np.arange(len(who)) % 10, who, 30
    return out


def write_mnist(folder: Path, packed: bool = True, **changed: np.ndarray) -> Path:
    write_idx(folder, packed=packed)
    for part in ("train", "test"):
        raw = integers(changed.get(part, table(part, 3 if part == "test" else 0)))
        name = f"qmnist-{part}-labels-idx2-int"
        (folder / (name + ".gz" if packed else name)).write_bytes(
            gzip.compress(raw) if packed else raw
        )
    return folder


# ---------------------------------------------------------------- MNIST


@pytest.mark.parametrize("packed", [True, False])
def test_mnist_has_the_writer_of_every_image(tmp_path: Path, packed: bool) -> None:
    train, test = writers.mnist(write_mnist(tmp_path, packed))
    plain = idx.read_pair(tmp_path, 10)
    for part, by_writer, samples in zip(("train", "test"), (train, test), plain, strict=True):
        assert torch.equal(by_writer.x, samples.x)
        assert torch.equal(by_writer.y, samples.y)
        assert [int(by_writer.sites[k]) for k in by_writer.site] == WRITERS[part]
    assert train.sites == ("2", "7", "30")  # by number, not as texts
    assert writers.missing_mnist(tmp_path) == ()


def test_a_missing_qmnist_file_is_named(tmp_path: Path) -> None:
    write_idx(tmp_path)
    stems = ("qmnist-train-labels-idx2-int[.gz]", "qmnist-test-labels-idx2-int[.gz]")
    assert writers.missing_mnist(tmp_path) == stems
    with refuses(tmp_path / "qmnist-train-labels-idx2-int.gz", "no such file"):
        writers.mnist(tmp_path)


def test_labels_of_other_images_are_refused(tmp_path: Path) -> None:
    other = table("train")
    other[4, 0] = 8
    path = write_mnist(tmp_path, train=other) / "qmnist-train-labels-idx2-int.gz"
    with refuses(path, "row 4 is of class 8, image 4 of train is labelled 4: these are not MNIST"):
        writers.mnist(tmp_path)
    short = table("train")[:5]
    with refuses(path, "holds 5 rows of 8 columns; expected 8 columns and a row for each of the 6"):
        writers.mnist(write_mnist(tmp_path, train=short))
    with refuses(path, "holds 6 rows of 7 columns"):
        writers.mnist(write_mnist(tmp_path, train=table("train")[:, :7]))


def test_integers_are_big_endian_and_of_their_own_type(tmp_path: Path) -> None:
    path = tmp_path / "a"
    values = np.array([[1, -2, 70000], [2**31 - 1, 0, -(2**31)]])
    path.write_bytes(integers(values))
    assert idx.read_integers(path, 2).tolist() == values.tolist()
    message = "expected 00 00 08 02 (idx, unsigned bytes, 2 axes)"
    with refuses(path, message):
        idx.read_array(path, 2)
    path.write_bytes(integers(values)[:-3])
    with refuses(path, "announces 2 x 3 = 6 values, the file holds only 5"):
        idx.read_integers(path, 2)


@pytest.mark.slow
def test_the_real_mnist_has_539_and_297_writers() -> None:
    entry = next(k for k in datasets.known() if k.name == "mnist-writers")
    if entry.found is None:
        pytest.skip(f"MNIST with writers is not on this machine (set $FEDSHIFT_DATA; {entry.how})")
    train, test = writers.mnist(entry.found)
    assert (len(train.sites), len(test.sites)) == (539, 297)
    assert not set(train.sites) & set(test.sites)
    counts = train.site.bincount()
    assert (int(counts.min()), int(counts.max())) == (19, 131)
    data = datasets.load("mnist-writers")
    assert torch.equal(data.train.x, train.x)
    assert data.sha256 == catalogue.entry("mnist").content


# ---------------------------------------------------------------- EMNIST


def emnist_part(part: str) -> dict[str, Any]:
    who = np.array(WRITERS[part], dtype=np.uint16)
    images = np.random.default_rng(1).integers(0, 256, (len(who), 28, 28)).astype(np.uint8)
    # As Matlab does: the pixels of an image column by column.
    flat = images.transpose(0, 2, 1).reshape(len(who), 784)
    labels = (np.arange(len(who)) % 10).astype(np.uint8)
    return {"images": flat, "labels": labels[:, None], "writers": who[:, None], "upright": images}


def write_emnist(folder: Path, sub: str = "", **changed: Any) -> Path:
    path = folder / sub / "emnist-digits.mat"
    path.parent.mkdir(parents=True, exist_ok=True)
    parts: dict[str, Any] = {p: emnist_part(p) | changed for p in ("train", "test")}
    for content in parts.values():
        content.pop("upright")
    mapping = np.array([[k, 48 + k] for k in range(10)])
    savemat(path, {"dataset": parts | {"mapping": mapping}}, do_compression=True)
    return path


@pytest.mark.parametrize("sub", ["", "matlab"])
def test_emnist_has_upright_images_and_writers(tmp_path: Path, sub: str) -> None:
    write_emnist(tmp_path, sub)
    assert writers.missing_emnist(tmp_path) == ()
    for part, by_writer in zip(("train", "test"), writers.emnist(tmp_path), strict=True):
        upright = emnist_part(part)["upright"]
        assert by_writer.x.dtype == torch.uint8
        assert np.array_equal(by_writer.x[:, 0].numpy(), upright)
        assert not np.array_equal(by_writer.x[:, 0].numpy(), upright.transpose(0, 2, 1))
        assert by_writer.y.tolist() == [k % 10 for k in range(len(upright))]
        assert [int(by_writer.sites[k]) for k in by_writer.site] == WRITERS[part]


def test_a_whole_emnist_file_beside_a_cut_one_is_read(tmp_path: Path) -> None:
    whole = write_emnist(tmp_path, "matlab")
    (tmp_path / whole.name).write_bytes(whole.read_bytes()[:300])
    assert len(writers.emnist(tmp_path)[0].y) == len(WRITERS["train"])


def test_a_single_image_has_one_axis_in_the_file(tmp_path: Path) -> None:
    one = {k: v[:1] for k, v in emnist_part("train").items()}
    write_emnist(tmp_path, **one)
    assert np.array_equal(writers.emnist(tmp_path)[0].x[:, 0].numpy(), one["upright"])


def test_emnists_whole_numbers_may_be_floats(tmp_path: Path) -> None:
    write_emnist(tmp_path)
    whole = writers.emnist(tmp_path)[0]
    part = emnist_part("train")
    floats = {k: part[k].astype(np.float64) for k in ("labels", "writers")}
    # Train and test have as many examples, so that one change fits both.
    path = write_emnist(tmp_path, **emnist_part("train") | floats)
    again = writers.emnist(tmp_path)[0]
    assert torch.equal(again.y, whole.y)
    assert torch.equal(again.site, whole.site)
    assert again.sites == whole.sites
    for bad in (2.5, np.nan, np.inf):
        floats["labels"][0] = bad
        write_emnist(tmp_path, **emnist_part("train") | floats)
        with refuses(path, "train has images uint8 [6, 784], labels float64 [6]"):
            writers.emnist(tmp_path)


def test_an_emnist_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    assert writers.missing_emnist(tmp_path) == ("emnist-digits.mat",)
    with refuses(tmp_path / "emnist-digits.mat", "no such file"):
        writers.emnist(tmp_path)
    path = write_emnist(tmp_path, writers=np.arange(3))
    message = "train has images uint8 [6, 784], labels uint8 [6] and writers int64 [3]; expected"
    with refuses(path, message):
        writers.emnist(tmp_path)
    write_emnist(tmp_path, images=np.zeros((6, 784)))
    with refuses(path, "train has images float64 [6, 784]"):
        writers.emnist(tmp_path)
    for turned in (emnist_part("train")["images"].T, np.zeros((6, 28, 28), np.uint8)):
        write_emnist(tmp_path, images=turned)
        with refuses(path, f"train has images uint8 {list(turned.shape)}") as caught:
            writers.emnist(tmp_path)
        columns = "here every column is an image: transpose them"
        assert (columns in str(caught.value)) == (turned.ndim == 2)
    write_emnist(tmp_path, labels=np.full((6, 1), 10))
    with refuses(path, "train.labels from 10 to 10; allowed: 0 to 9"):
        writers.emnist(tmp_path)
    savemat(path, {"dataset": {"train": {"images": np.zeros(3)}}})
    with refuses(path, "not EMNIST's dataset of train and test (KeyError"):
        writers.emnist(tmp_path)
    whole = write_emnist(tmp_path).read_bytes()
    for damaged in (whole[:400], b"MATLAB 7.3 file", b""):
        path.write_bytes(damaged)
        with refuses(path, "not EMNIST's dataset of train and test"):
            writers.emnist(tmp_path)


# ---------------------------------------------------------------- FEMNIST

LEAF = {"train": {"f0001_02": (3, 40, 0), "f0000_14": (7,)}, "test": {"f0000_14": (9, 9)}}


def leaf_user(labels: tuple[int, ...], seed: int) -> dict[str, Any]:
    ink = np.random.default_rng(seed).integers(0, 256, (len(labels), 784))
    return {"x": (1.0 - ink / 255).tolist(), "y": list(labels)}


def leaf_file(users: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    return {
        "users": list(users),
        "num_samples": [len(y) for y in users.values()],
        "user_data": {u: leaf_user(y, len(u + str(y))) for u, y in users.items()},
    }


def write_leaf(folder: Path) -> Path:
    for part, users in LEAF.items():
        for k, (user, labels) in enumerate(users.items()):
            path = folder / part / f"all_data_{k}_niid_0_keep_0_{part}_9.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(leaf_file({user: labels})))
    return folder


def test_femnist_keeps_digits_and_turns_the_ink_bright(tmp_path: Path) -> None:
    train, test = writers.leaf(write_leaf(tmp_path))
    assert writers.missing_leaf(tmp_path) == ()
    assert train.y.tolist() == [3, 0, 7]  # 40 is a letter
    assert [train.sites[k] for k in train.site] == ["f0001_02", "f0001_02", "f0000_14"]
    assert test.y.tolist() == [9, 9]
    given = leaf_file({"f0001_02": LEAF["train"]["f0001_02"]})["user_data"]["f0001_02"]["x"]
    expected = np.rint(255 * (1 - np.array(given)))[[0, 2]].reshape(2, 28, 28)
    assert np.array_equal(train.x[:2, 0].numpy(), expected)
    assert (test.x.shape, test.x.dtype) == ((2, 1, 28, 28), torch.uint8)


def test_a_femnist_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    assert writers.missing_leaf(tmp_path) == ("train/*.json", "test/*.json")
    with refuses(tmp_path / "train", "has no .json file"):
        writers.leaf(tmp_path)
    write_leaf(tmp_path)
    path = sorted((tmp_path / "train").iterdir())[0]
    good = json.loads(path.read_text())
    user = good["users"][0]

    def other(**changed: Any) -> dict[str, Any]:
        return good | {"user_data": {user: good["user_data"][user] | changed}}

    for content, message in (
        (
            {"users": [user]},
            "has no num_samples, user_data; LEAF writes users, num_samples, user_d",
        ),
        ({**good, "users": [], "num_samples": []}, "lists no users"),
        (good | {"users": [user] * 2, "num_samples": [3, 3]}, f'lists user "{user}" twice'),
        (good | {"users": ["f9"]}, '"f9" is among users, but not in user_data'),
        (
            good | {"user_data": {**good["user_data"], "f9": {}}},
            '"f9" is in user_data, but not amo',
        ),
        (good | {"user_data": {user: {"y": [1]}}}, f"user {user} has no x; LEAF writes x, y"),
        (other(x=np.full((784, 3), 0.5).tolist()), "x is not 3 times 784 numbers, but 784 x 3"),
        (other(x=[0.5] * 3 * 784), "x is not 3 times 784 numbers, but 2352"),
        (good | {"num_samples": [1]}, f"user {user} has 3 images; num_samples says 1"),
        (good | {"num_samples": []}, "num_samples has 0 entries for 1 users"),
        (other(x=[[0.5] * 783] * 3), f"user {user}: x is not 3 times 784 numbers"),
        (other(x=[[1.5] * 784] * 3), f"user {user}: values of x outside 0 to 1"),
        (other(y=[1, 2, 62]), f"user {user}: y from 1 to 62; allowed: 0 to 61"),
        (other(y=[1.0, 2.5, 3.0]), f"user {user}: y holds float64 [3]; expected whole numbers"),
        ([1, 2], "has no users, num_samples, user_data; LEAF writes"),
        (3, "not in LEAF's layout (TypeError"),
    ):
        path.write_text(json.dumps(content))
        with refuses(path, message):
            writers.leaf(tmp_path)
    text = json.dumps(good)
    users = text[text.index('"user_data": {') + len('"user_data": {') : -2]
    path.write_text(text.replace(users, f"{users}, {users}"))
    with refuses(path, f'not a complete JSON file ("{user}" is there twice)'):
        writers.leaf(tmp_path)
    path.write_bytes(b'{"users": ["a"')
    with refuses(path, "not a complete JSON file"):
        writers.leaf(tmp_path)
    for k, file in enumerate((tmp_path / "train").iterdir()):
        file.write_text(json.dumps(leaf_file({f"a{k}": (61,)})))
    with refuses(tmp_path / "train", "has no digit (labels 0 to 9)"):
        writers.leaf(tmp_path)


@pytest.mark.parametrize("ending", [".gz", ".part"])
def test_a_packed_or_partial_leaf_file_is_not_passed_over(tmp_path: Path, ending: str) -> None:
    write_leaf(tmp_path)
    (tmp_path / "train" / "README").write_text("")
    assert len(writers.leaf(tmp_path)[0].y) == 3
    path = sorted((tmp_path / "train").glob("*.json"))[1]
    path.rename(path.with_suffix(".JSON"))
    assert len(writers.leaf(tmp_path)[0].y) == 3
    other = path.with_name(path.name + ending)
    path.with_suffix(".JSON").rename(other)
    with refuses(other, "not a .json file: unpack it, or remove it if it is not whole"):
        writers.leaf(tmp_path)


def test_a_writer_in_the_files_of_two_runs_is_refused(tmp_path: Path) -> None:
    write_leaf(tmp_path)
    path = sorted((tmp_path / "train").iterdir())[0]
    again = path.with_name("all_data_7_niid_05_keep_0_train_9.json")
    again.write_bytes(path.read_bytes())
    message = (
        f'user "f0001_02" is in {path.name} as well; keep the files of one run of preprocess.sh'
    )
    with refuses(again, message):
        writers.leaf(tmp_path)


# ---------------------------------------------------------------- in the catalogue


def test_the_three_sets_are_found_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSHIFT_DATA", str(tmp_path))
    write_mnist(tmp_path / "mnist-writers")
    write_emnist(tmp_path / "emnist")
    write_leaf(tmp_path / "femnist")
    for name, n in (("mnist-writers", 6), ("emnist-digits", 6), ("femnist-digits", 3)):
        one = datasets.entry(name)
        assert one.read is not None
        train, test = one.read(datasets.find(name))
        assert one.writers is not None
        assert torch.equal(train.x, one.writers(datasets.find(name))[0].x)
        assert len(train) == n
        assert len(test)
        assert tuple(catalogue.entry(name).classes) == writers.DIGITS
    assert len(datasets.load("femnist-digits").train) == 3
    with pytest.raises(DataError, match="6 training examples; emnist-digits has 240,000"):
        datasets.load("emnist-digits")
    remotes = catalogue.entry("mnist-writers").remotes
    assert [r.name for r in remotes][-2:] == [
        "qmnist-train-labels-idx2-int.gz",
        "qmnist-test-labels-idx2-int.gz",
    ]
