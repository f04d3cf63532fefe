"""The data sets: those in the package, those looked for or refused, the synthetic task."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from fedshift import datasets
from fedshift.datasets import Samples, catalogue, idx, registry
from fedshift.errors import DataError, InputError
from fedshift_papers.datasets.gaussians import CLIENT_COUNTS, MEANS, gaussians, target_marginal
from support.dataset_fixtures import write_idx

BALANCED_10 = [1000] * 10
OFFICIAL_MD5 = {
    "t10k-images-idx3-ubyte": "bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte": "bb300cfdad3c16e7a12a480ee83cd310",
}
CONTENT_SHA256 = {
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}


def on_this_machine(name: str) -> datasets.Dataset:
    one = next(k for k in datasets.known() if k.name == name)
    if not one.available:
        pytest.skip(f"{name} is not on this machine (set $FEDSHIFT_DATA; {one.how})")
    return datasets.load(name)


# ---------------------------------------------------------------- shipped and official contents


def test_shipped_files_are_the_official_ones() -> None:
    for stem, md5 in OFFICIAL_MD5.items():
        packed = (catalogue.SHIPPED / f"{stem}.gz").read_bytes()
        assert hashlib.md5(packed).hexdigest() == md5
        assert hashlib.sha256(gzip.decompress(packed)).hexdigest() == CONTENT_SHA256[stem]
    notice = (catalogue.SHIPPED / "LICENSE-fashion-mnist.txt").read_text(encoding="utf-8")
    assert "Zalando SE" in notice
    assert "Permission is hereby granted, free of charge" in notice


def test_mini_takes_the_first_700_of_each_class_to_train(tmp_path: Path) -> None:
    mini = datasets.load("fashion-mnist-mini", folders=[tmp_path])
    everything = idx.read_samples(catalogue.SHIPPED, "t10k", 10)
    assert everything.y.bincount().tolist() == BALANCED_10
    assert mini.train.x.shape == (7000, 1, 28, 28)
    assert mini.train.y.bincount().tolist() == [700] * 10
    assert mini.test.y.bincount().tolist() == [300] * 10
    assert mini.train.x.dtype == torch.uint8
    for k in range(10):
        images = everything.x[everything.y == k]
        assert torch.equal(mini.train.x[mini.train.y == k], images[:700])
        assert torch.equal(mini.test.x[mini.test.y == k], images[700:])
    assert len(mini.classes) == 10
    assert mini.classes[9] == "Ankle boot"


def test_a_change_of_the_shipped_images_stays_in_its_load() -> None:
    """The files are read once for a process, and no load shares its tensors."""
    changed = datasets.load("fashion-mnist-mini")
    for part in (changed.train, changed.test):
        part.x.zero_()
        part.y.zero_()
    assert datasets.load("fashion-mnist-mini").sha256 == changed.sha256


@pytest.mark.slow
def test_full_fashion_mnist_where_found() -> None:
    full, mini = on_this_machine("fashion-mnist"), datasets.load("fashion-mnist-mini")
    assert full.train.y.bincount().tolist() == [6000] * 10
    assert full.test.y.bincount().tolist() == BALANCED_10
    assert torch.equal(full.test.x[0], mini.train.x[0])
    assert full.sha256 == catalogue.entry("fashion-mnist").content


@pytest.mark.slow
def test_mnist_where_found() -> None:
    mnist = on_this_machine("mnist")
    counts = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert mnist.train.y.bincount().tolist() == counts
    # md5 of the four official files' contents, unpacked: independent of how they are compressed.
    pixels = bytes((0, 0, 8, 3, 0, 0, 0xEA, 0x60, 0, 0, 0, 28, 0, 0, 0, 28))
    digest = hashlib.md5(pixels + mnist.train.x.numpy().tobytes()).hexdigest()
    assert digest == "6bbc9ace898e44ae57da46a324031adb"


@pytest.mark.slow
def test_whole_cifar_10_where_found() -> None:
    cifar = on_this_machine("cifar-10")
    assert cifar.train.y.bincount().tolist() == [5000] * 10
    assert cifar.test.y.bincount().tolist() == BALANCED_10
    # The constants that everyone normalises by; any lost, doubled or swapped channel moves them.
    pixels = cifar.train.x / 255
    assert [f"{v:.4f}" for v in pixels.mean((0, 2, 3))] == ["0.4914", "0.4822", "0.4465"]
    assert [f"{v:.4f}" for v in pixels.std((0, 2, 3))] == ["0.2470", "0.2435", "0.2616"]


# ---------------------------------------------------------------------------- samples and digest


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (torch.zeros(3, 2), torch.zeros(4).long(), "one label for each of the 3 examples"),
        (torch.zeros(3, 2), torch.zeros(3), "y is torch.float32 with shape [3]; it must be int64"),
        (torch.zeros(3, 28, 28).byte(), torch.zeros(3).long(), "allowed: uint8 images [n, chann"),
        (torch.zeros(3, 2).double(), torch.zeros(3).long(), "x is torch.float64 with shape [3, 2]"),
    ],
)
def test_samples_refuse_other_shapes(x: torch.Tensor, y: torch.Tensor, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        Samples(x, y)


def test_digest_is_of_content_and_order_not_of_files(tmp_path: Path) -> None:
    packed = idx.read_pair(write_idx(tmp_path / "gz"), 10)
    raw = idx.read_pair(write_idx(tmp_path / "raw", packed=False), 10)
    assert datasets.content_sha256(*packed) == datasets.content_sha256(*raw)
    turned = packed[0].take(torch.arange(5, -1, -1))
    assert datasets.content_sha256(turned, packed[1]) != datasets.content_sha256(*packed)
    dark = Samples(packed[0].x ^ 1, packed[0].y)
    assert datasets.content_sha256(dark, packed[1]) != datasets.content_sha256(*packed)


# ------------------------------------------------------------------------------ finding and loading


def test_search_folders_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSHIFT_DATA", os.pathsep.join(["a", "", "~/b"]))
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    debian = Path("/usr/share/datasets")
    expected = (Path("a"), Path.home() / "b", Path("/cache/fedshift"), debian)
    assert datasets.search_folders() == expected
    monkeypatch.delenv("FEDSHIFT_DATA")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert datasets.search_folders() == (Path.home() / ".cache/fedshift", debian)


def test_load_through_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_idx(tmp_path / "second" / "MNIST" / "raw", packed=False)
    small(monkeypatch, tmp_path / "second" / "MNIST" / "raw")
    monkeypatch.setenv(
        "FEDSHIFT_DATA", os.pathsep.join(map(str, (tmp_path / "1", tmp_path / "second")))
    )
    dataset = datasets.load("mnist")
    assert dataset.source == str(tmp_path / "second" / "MNIST" / "raw")
    assert (len(dataset.train), len(dataset.test)) == (6, 4)
    assert dataset.train.x.shape == (6, 1, 28, 28)


def small(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Make the 6 + 4 images in `folder` the official content of "mnist"."""
    digest = datasets.content_sha256(*idx.read_pair(folder, 10))
    one = dataclasses.replace(catalogue.entry("mnist"), examples=(6, 4), content=digest)
    monkeypatch.setattr(registry, "entry", lambda name: one)


def test_every_usual_sub_folder_is_tried(tmp_path: Path) -> None:
    for name in ("fashion-mnist", "mnist", "cifar-10"):
        for k, sub in enumerate(catalogue.entry(name).folders):
            root = tmp_path / name / str(k)
            if name == "cifar-10":
                (root / sub).mkdir(parents=True)
                for batch in (*catalogue.cifar.BATCHES, catalogue.cifar.TEST_BATCH):
                    (root / sub / batch).touch()
            else:
                write_idx(root / sub)
            folders = {one.name: one.found for one in datasets.known([root])}
            assert folders[name] == root / sub


def test_known_lists_every_set_and_how_to_get_it(tmp_path: Path) -> None:
    entries = datasets.known([tmp_path])
    tables = [one.name for one in datasets.TABLES]
    assert [one.name for one in entries[-len(tables) :]] == tables
    lines = {one.name: one for one in entries[: -len(tables)]}
    digits = ["mnist", "mnist-writers", "emnist-digits", "femnist-digits"]
    names = ["fashion-mnist-mini", "fashion-mnist", *digits, "cifar-10", "cifar-100", "cifar-20"]
    worlds = ["binary-world", "gaussian-world", "looks-world"]
    of_papers = ["pacs", "iwildcam", "retina", "heart-disease", "gaussians"]
    assert list(lines) == [*names, *of_papers, *worlds]
    assert lines["femnist-digits"].size == "as many examples as were prepared, 1 x 28 x 28"
    assert lines["fashion-mnist-mini"].found == catalogue.SHIPPED
    assert [name for name, one in lines.items() if one.available] == [
        "fashion-mnist-mini",
        "gaussians",
        *worlds,
    ]
    assert "apt-get install dataset-fashion-mnist" in lines["fashion-mnist"].how
    assert lines["cifar-10"].how == "fedshift datasets fetch cifar-10"
    assert lines["mnist"].size == "60,000 + 10,000 examples, 1 x 28 x 28"


def test_unknown_name_gives_the_nearest() -> None:
    with pytest.raises(InputError, match=r'unknown data set "fashion_mnist".*mean "fashion-mnist"'):
        datasets.load("fashion_mnist")


def test_a_set_that_is_not_there_says_where_it_was_sought(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        datasets.load("fashion-mnist", folders=[tmp_path / "a", tmp_path / "b"])
    message = str(caught.value)
    for part in (
        'data set "fashion-mnist" was not found',
        f"{tmp_path / 'a'}, {tmp_path / 'b'}",
        "fashion-mnist or FashionMNIST/raw or fashion",
        "apt-get install dataset-fashion-mnist",
        "fedshift datasets fetch fashion-mnist",
        "$FEDSHIFT_DATA",
    ):
        assert part in message


def test_an_incomplete_folder_is_named_with_what_it_lacks(tmp_path: Path) -> None:
    folder = write_idx(tmp_path / "mnist")
    (folder / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(DataError, match=r"mnist is incomplete: it lacks t10k-labels-idx1-ubyte"):
        datasets.load("mnist", folders=[tmp_path])


def test_a_packed_set_and_a_second_copy_are_named(tmp_path: Path) -> None:
    (tmp_path / "cifar-10-python.tar.gz").write_bytes(b"")
    (tmp_path / "cifar-10-batches-py").mkdir()
    packed = f"{tmp_path / 'cifar-10-python.tar.gz'} is packed: unpack it beside itself"
    with pytest.raises(DataError, match=packed):
        datasets.load("cifar-10", folders=[tmp_path])
    for name in ("mnist", "MNIST/raw"):
        write_idx(tmp_path / name)
    cut = tmp_path / "mnist" / "train-images-idx3-ubyte.gz"
    cut.write_bytes(cut.read_bytes()[:30])
    other = f"Or move {tmp_path / 'mnist'} away: {tmp_path / 'MNIST/raw'} is read then"
    with pytest.raises(DataError, match=other):
        datasets.load("mnist", folders=[tmp_path])


def test_other_content_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_idx(tmp_path / "mnist")
    with pytest.raises(DataError, match=r"6 training examples; mnist has 60,000. Replace"):
        datasets.load("mnist", folders=[tmp_path])
    small(monkeypatch, folder)
    assert len(datasets.load("mnist", folders=[tmp_path]).train) == 6
    raw = bytearray(gzip.decompress((folder / "train-images-idx3-ubyte.gz").read_bytes()))
    raw[-1] ^= 1
    (folder / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(raw))
    with pytest.raises(DataError, match=r"not mnist \(content SHA-256 [0-9a-f]{64}, expected"):
        datasets.load("mnist", folders=[tmp_path])


# ---------------------------------------------------------------------------- the synthetic task


def hull_distance(target: np.ndarray) -> float:
    """Squared distance to the segment between the clients' marginals, by its own formula."""
    first, second = (np.array(c) / sum(c) for c in CLIENT_COUNTS)
    along = second - first
    position = np.clip((target - first) @ along / (along @ along), 0, 1)
    return float(((target - first - position * along) ** 2).sum())


@pytest.mark.parametrize("delta", np.linspace(0, 1, 11))
def test_target_moves_straight_away_from_the_hull(delta: float) -> None:
    target = target_marginal(delta)
    assert target.sum() == pytest.approx(1, abs=1e-15)
    assert target.min() >= 0
    assert hull_distance(target) == pytest.approx(0.375 * delta**2, abs=1e-15)
    # (1/2, 1/2) is optimal for lambda = 0: the residual is orthogonal to the hull.
    first, second = (np.array(c) / sum(c) for c in CLIENT_COUNTS)
    assert (target - (first + second) / 2) @ (first - second) == pytest.approx(0, abs=1e-15)


@pytest.mark.parametrize("delta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("lam", [0.0, 1.0, 58.0, 1e6])
def test_weights_of_the_target_follow_the_closed_form(delta: float, lam: float) -> None:
    # a_1 = 1/2 + 11 lam / (360 + 58 lam) for every delta: minimise the objective along a_1.
    S, n = np.array([[0.5, 0.5, 0], [0.5, 0, 0.5]]), np.array([40.0, 18.0])
    H, T = S @ S.T + lam * np.diag(1 / n), target_marginal(delta)
    kkt = np.block([[2 * H, np.ones((2, 1))], [np.ones((1, 2)), np.zeros((1, 1))]])
    a = np.linalg.solve(kkt, np.append(2 * S @ T, 1.0))
    assert a[0] == pytest.approx(0.5 + 11 * lam / (360 + 58 * lam), abs=1e-12)


def test_other_end_points_would_break_the_distance() -> None:
    wrong = 0.5 * np.array([0.5, 0.25, 0.25]) + 0.5 * np.array([0.25, 0.5, 0.25])
    assert abs(hull_distance(wrong) - 0.375 * 0.25) > 0.05


def test_gaussians_have_the_counts_and_means_of_the_paper() -> None:
    task = gaussians(seed=3, delta=0.4, n_test=200_000)
    assert [tuple(c.y.bincount(minlength=3).tolist()) for c in task.clients] == [*CLIENT_COUNTS]
    assert task.clients[0].x.dtype == torch.float32
    assert task.test.y.bincount().tolist() == [60_000, 70_000, 70_000]
    for label, mean in enumerate(MEANS):
        x = task.test.x[task.test.y == label].double()
        # Four standard errors of a mean of 60,000 draws.
        assert (x.mean(0) - torch.tensor(mean)).abs().max() < 4 / 60_000**0.5
        assert (x.T.cov() - torch.eye(2)).abs().max() < 0.03


def test_means_are_those_of_the_authors_notebook() -> None:
    # numpy's legacy stream of seed 92: for each class a mean, uniform on (-8, 8), and 3,000 points.
    stream = np.random.RandomState(92)
    for mean in MEANS:
        assert np.abs(stream.uniform(-8, 8, 2) - np.array(mean)).max() < 5e-9
        stream.standard_normal((3000, 2))


def test_gaussians_are_keyed_by_seed_and_share_draws_along_delta() -> None:
    first, again, other = gaussians(1, 0.2), gaussians(1, 0.2), gaussians(2, 0.2)
    assert torch.equal(first.test.x, again.test.x)
    assert not torch.equal(first.test.x, other.test.x)
    assert not torch.equal(first.clients[0].x[:9], first.clients[1].x[:9])
    far = gaussians(1, 0.9)
    assert torch.equal(first.clients[0].x, far.clients[0].x)
    near, away = (task.test.x[task.test.y == 1] for task in (first, far))
    assert torch.equal(near, away[: len(near)])
    pooled = datasets.load("gaussians")
    assert (len(pooled.train), len(pooled.test), pooled.source) == (58, 2000, "generated")


@pytest.mark.parametrize("delta", [-0.1, 1.1, float("nan")])
def test_delta_outside_is_refused(delta: float) -> None:
    with pytest.raises(InputError, match=rf"delta = {delta}; allowed: 0 .* to 1"):
        gaussians(delta=delta)


def test_empty_test_set_is_refused() -> None:
    with pytest.raises(InputError, match="n_test = 0; it must be at least 1"):
        gaussians(n_test=0)
