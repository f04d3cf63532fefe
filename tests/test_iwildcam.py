"""iWildCam in the benchmark's layout, clients of whole cameras, macro F1."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from dataset_fixtures import refuses
from image_fixtures import write_wildcam
from torch import Tensor

from fedshift import datasets, shifts
from fedshift.datasets import iwildcam
from fedshift.engine.macro import macro_f1, predictions
from fedshift.errors import DataError, InputError
from fedshift.experiments.config import Config
from fedshift.experiments.experiment import run_experiment
from fedshift.experiments.image_sets import iwildcam_roles
from fedshift.experiments.task import prepare
from fedshift.model import Model

CAMERAS = (9, 5, 4, 3, 2, 2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_wildcam(tmp_path / "iwildcam_v2.0", CAMERAS)


# ---------------------------------------------------------------------------------------- loading


def test_tables_give_labels_cameras_splits_and_names(folder: Path) -> None:
    found = iwildcam.scan(folder)
    assert np.bincount(found.camera).tolist() == list(CAMERAS)
    assert found.y.tolist() == [j % 4 for j in range(sum(CAMERAS))]
    assert found.classes == ("animal 0", "animal 1", "animal 2", "animal 3")
    assert found.camera[found.rows("test")].tolist() == [5, 5]
    assert len(found.rows("train", "val")) == sum(CAMERAS) - 2
    with pytest.raises(InputError, match='unknown split "ood".*allowed: id_test'):
        found.rows("ood")


def test_images_are_decoded_once_into_a_mapped_file(folder: Path, tmp_path: Path) -> None:
    found, cache = iwildcam.scan(folder), tmp_path / "cache"
    rows = found.rows("train")[[1, 4]]
    first = found.samples(rows, size=8, cache=cache)
    assert first.x.shape == (2, 3, 8, 8)
    wanted = torch.tensor([[1, 2, 3], [4, 8, 12]], dtype=torch.uint8)
    assert torch.equal(first.x, wanted.view(2, 3, 1, 1).expand(2, 3, 8, 8))
    (kept,) = cache.iterdir()
    assert kept.stat().st_size == 2 * 3 * 8 * 8
    for name in (folder / "train").iterdir():
        name.unlink()
    again = found.samples(rows, size=8, cache=cache)
    again.x[0] = 77  # A private copy of the page: the file stays as it is.
    assert torch.equal(found.samples(rows, size=8, cache=cache).x, first.x)
    for other, size in ((rows[:1], 8), (rows, 4)):
        with pytest.raises(DataError, match="cannot be read"):
            found.samples(other, size=size, cache=cache)
    assert list(cache.iterdir()) == [kept]


def test_an_incomplete_file_is_decoded_anew(folder: Path, tmp_path: Path) -> None:
    found = iwildcam.scan(folder)
    rows = found.rows("train")
    whole = found.samples(rows, 8, tmp_path / "cache").x.clone()
    (kept,) = (tmp_path / "cache").iterdir()
    kept.write_bytes(kept.read_bytes()[:100])
    assert torch.equal(found.samples(rows, 8, tmp_path / "cache").x, whole)
    assert len(found.samples(rows[:0], 8, tmp_path / "cache")) == 0


def test_a_vanished_image_is_named_with_its_row_and_leaves_nothing(
    folder: Path, tmp_path: Path
) -> None:
    (folder / "train" / "image3.png").unlink()
    found = iwildcam.scan(folder)
    with pytest.raises(DataError, match=r"train/image3.png: cannot be read .*row 4 of metadata"):
        found.samples(found.rows("train"), 8, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_cache_that_cannot_be_written_says_how_much_it_takes(
    folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    found = iwildcam.scan(folder)
    with pytest.raises(DataError, match="cannot be written .*It takes 384 bytes; free some space"):
        found.samples(found.rows("val"), 8, tmp_path / "file" / "cache")


GAPS = {
    "y goes up to 5 but is never 3; no gaps": (",3,30,", ",5,50,"),
    "location_remapped goes up to 9 but is never 5": (",5,105,", ",9,105,"),
    "sequence_remapped goes up to 99 but is never 24": (",24,s24,", ",99,s24,"),
    'row 1: location_remapped is "-1"': ("train,0,", "train,-1,"),
    'row 1: split is "training"; allowed: train, val': ("0,train,", "0,training,"),
    "has no column filename": ("filename", "file_name"),
}


@pytest.mark.parametrize("message", GAPS)
def test_damaged_tables_are_refused(folder: Path, message: str) -> None:
    old, new = GAPS[message]
    table = folder / "metadata.csv"
    text = table.read_text()
    assert old in text
    table.write_text(text.replace(old, new) if old != "0,train," else text.replace(old, new, 1))
    with refuses(table, message):
        iwildcam.scan(folder)


def test_labels_without_a_name_and_another_release_are_refused(folder: Path) -> None:
    with refuses(folder / "metadata.csv", "21 images are train, in WILDS v2.0 129,809"):
        iwildcam.read(folder)
    names = folder / "categories.csv"
    names.write_text(names.read_text().replace("2,20,", "99999,20,"))
    with refuses(names, "no row has y = 2, which metadata.csv uses"):
        iwildcam.scan(folder)
    names.unlink()
    with refuses(names, "cannot be read (No such file"):
        iwildcam.scan(folder)
    assert iwildcam.missing(folder) == ("categories.csv",)


def test_the_catalogue_knows_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(DataError, match='"iwildcam" was not found.*12 GB; download it with the'):
        datasets.load("iwildcam", folders=[tmp_path])
    write_wildcam(tmp_path / "iwildcam_v2.0")
    assert datasets.find("iwildcam", [tmp_path]) == tmp_path / "iwildcam_v2.0"
    with pytest.raises(InputError, match="no official file to fetch directly"):
        datasets.fetch("iwildcam")


# ------------------------------------------------------------------------------- cameras as clients


def test_whole_groups_go_largest_first_to_the_smallest_client() -> None:
    sizes = (3, 9, 1, 5, 4)
    groups = np.repeat(np.arange(5), sizes)
    parts = shifts.whole_groups(groups, 2)
    # 9 | 5, 9 | 5 + 4, tie: the first client takes 3, the second 1.
    assert [sorted(set(groups[p].tolist())) for p in parts] == [[0, 1], [2, 3, 4]]
    shifts.check_partition(parts, len(groups), 2, whole=True)


def test_whole_groups_follow_the_source_where_no_sizes_tie() -> None:
    """The source's table of group sizes by client, computed as it computes it."""
    rng = np.random.default_rng(0)
    sizes = rng.permutation(np.arange(1, 244))
    groups = rng.permutation(np.repeat(np.arange(243), sizes))
    table = np.zeros((100, 243))
    for group in np.argsort(np.bincount(groups))[::-1]:
        table[np.argmin(table.sum(axis=1)), group] = sizes[group]
    parts = shifts.whole_groups(groups, 100)
    shifts.check_partition(parts, len(groups), 100, whole=True)
    ours = np.array([np.bincount(groups[p], minlength=243) for p in parts])
    assert np.array_equal(ours, table)
    smallest_first = np.zeros((100, 243))
    for group in np.argsort(sizes):
        smallest_first[np.argmin(smallest_first.sum(axis=1)), group] = sizes[group]
    assert not np.array_equal(ours, smallest_first)


def test_group_numbers_may_have_gaps_and_one_client_takes_all() -> None:
    parts = shifts.whole_groups(np.array([7, 2, 7, 2, 2]), 2)
    assert [p.tolist() for p in parts] == [[1, 3, 4], [0, 2]]
    assert shifts.whole_groups([4, 4], 1)[0].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("groups", "clients", "message"),
    [
        ([0, 1], 3, "there are 2 groups, and groups stay whole; ask for at most 2 clients"),
        ([0.5], 1, "one whole number >= 0 for each sample"),
        ([-1, 0], 1, "one whole number >= 0 for each sample"),
        ([0], 0, "clients=0; allowed: a whole number"),
    ],
)
def test_whole_groups_refuses(groups: list[float], clients: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        shifts.whole_groups(groups, clients)


def test_roles_keep_cameras_whole(folder: Path) -> None:
    found = iwildcam.scan(folder)
    roles = iwildcam_roles(found, clients=2)
    seen = [set(found.camera[rows].tolist()) for rows in roles.clients]
    assert seen == [{0, 3}, {1, 2}] or seen == [{0}, {1, 2, 3}]
    assert np.array_equal(roles.validation, found.rows("val"))
    assert np.array_equal(roles.target, np.bincount(found.y[found.rows("test")], minlength=4) / 2)


def test_the_whole_path_on_a_small_set(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDSHIFT_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tables = {
        "data": {"name": "iwildcam", "validation": 0.0},
        "shift": {"kind": "natural", "clients": 2},
        "model": {"name": "linear"},
        "method": {"name": "fedpals", "lam": 1.0, "fidelity": "norm"},
        "training": {"rounds": 1, "lr": 0.01},
    }
    prepared = prepare(Config.model_validate(tables))
    assert [len(c.y) for c in prepared.task.clients] in ([12, 9], [9, 12])
    assert prepared.task.target_validation is not None
    assert len(prepared.task.target_validation) == 2
    done = run_experiment(Config.model_validate(tables), prepared=prepared)
    assert len(done.outcome.metrics) == 1
    with pytest.raises(InputError, match="shift.delta moves the target of gaussians; iwildcam has"):
        prepare(Config.model_validate({**tables, "shift": {**tables["shift"], "delta": 0.5}}))


# ---------------------------------------------------------------------------------------- macro F1


def test_macro_f1_by_hand() -> None:
    truth, predicted = torch.tensor([0, 0, 1, 1, 2]), torch.tensor([0, 1, 1, 3, 0])
    # Label 0: tp 1, n 2, p 2. Label 1: tp 1, n 2, p 2. Label 2: tp 0. Label 3 is never true.
    assert macro_f1(predicted, truth, 4) == pytest.approx((0.5 + 0.5 + 0) / 3)
    assert macro_f1(truth, truth, 9) == 1.0
    everywhere = torch.zeros(5, dtype=torch.int64)
    assert macro_f1(everywhere, truth, 4) == pytest.approx((2 * 2 / 7) / 3)


def test_macro_f1_is_precision_and_recall_and_ignores_the_order() -> None:
    source = np.random.default_rng(0)
    truth, predicted = (torch.from_numpy(source.integers(0, 6, 300)) for _ in range(2))
    terms = []
    for y in range(6):
        tp = int(((truth == y) & (predicted == y)).sum())
        precision, recall = tp / int((predicted == y).sum()), tp / int((truth == y).sum())
        terms.append(2 * precision * recall / (precision + recall))
    assert macro_f1(predicted, truth, 6) == pytest.approx(np.mean(terms), rel=1e-12)
    order = torch.from_numpy(source.permutation(300))
    assert macro_f1(predicted[order], truth[order], 6) == macro_f1(predicted, truth, 6)
    assert macro_f1(predicted, truth, 6) != pytest.approx(
        float((truth == predicted).double().mean())
    )


@pytest.mark.parametrize(
    ("predicted", "truth", "message"),
    [
        ([0, 1], [0], "must be two vectors of one length"),
        ([], [], "must be two vectors of one length, at least 1"),
        ([0], [4], r"labels 0\.\.4; allowed: 0\.\.3"),
        ([-1], [0], r"labels -1\.\.0; allowed: 0\.\.3"),
    ],
)
def test_macro_f1_refuses(predicted: list[int], truth: list[int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        macro_f1(*(torch.tensor(v, dtype=torch.int64) for v in (predicted, truth)), 4)


def test_predictions_do_not_depend_on_the_blocks(mlp: Model) -> None:
    params, buffers = mlp.init()
    x: Tensor = torch.randn(23, 8, generator=torch.Generator().manual_seed(0))
    wanted = mlp(params, buffers, x)["logits"].argmax(1)
    for batch in (1, 5, 23, 100):
        assert torch.equal(predictions(mlp, params, buffers, x, batch=batch), wanted)
