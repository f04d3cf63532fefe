"""iWildCam in the benchmark's layout, clients of whole cameras."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedshift import datasets, shifts
from fedshift.datasets.images import check_not_enlarged
from fedshift.errors import DataError, InputError
from fedshift.evaluation.scores import score
from fedshift.experiments.config.schema import Config
from fedshift.experiments.experiment import run_experiment
from fedshift.experiments.folder.outcome import Outcome
from fedshift.experiments.folder.run_folder import lock
from fedshift.experiments.task.preparing import oracle_clients, prepare, scaled
from fedshift_papers.datasets import iwildcam
from fedshift_papers.datasets.fedpals_clients import iwildcam_roles
from support.dataset_fixtures import refuses
from support.image_fixtures import count_as_whole, write_wildcam

CAMERAS = (9, 5, 4, 3, 2, 2)


@pytest.fixture
def complete(monkeypatch: pytest.MonkeyPatch) -> None:
    count_as_whole(monkeypatch, CAMERAS)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_wildcam(tmp_path / "iwildcam_v2.0", CAMERAS)


# ---------------------------------------------------------------------------------------- loading


def test_tables_give_labels_cameras_splits_and_names(folder: Path) -> None:
    wildcam = iwildcam.scan(folder)
    assert np.bincount(wildcam.camera).tolist() == list(CAMERAS)
    assert wildcam.y.tolist() == [j % 4 for j in range(sum(CAMERAS))]
    assert wildcam.classes == ("animal 0", "animal 1", "animal 2", "animal 3")
    assert wildcam.camera[wildcam.rows("test")].tolist() == [5, 5]
    assert len(wildcam.rows("train", "val")) == sum(CAMERAS) - 2
    with pytest.raises(InputError, match='unknown split "ood".*allowed: id_test'):
        wildcam.rows("ood")


def test_images_are_decoded_once_into_a_mapped_file(folder: Path, tmp_path: Path) -> None:
    wildcam, cache = iwildcam.scan(folder), tmp_path / "cache"
    rows = wildcam.rows("train")[[1, 4]]
    first = wildcam.samples(rows, size=8, cache=cache)
    assert first.x.shape == (2, 3, 8, 8)
    wanted = torch.tensor([[1, 2, 3], [4, 8, 12]], dtype=torch.uint8)
    assert torch.equal(first.x, wanted.view(2, 3, 1, 1).expand(2, 3, 8, 8))
    (cache_file,) = cache.iterdir()
    assert cache_file.stat().st_size == 2 * 3 * 8 * 8
    for name in (folder / "train").iterdir():
        name.unlink()
    again = wildcam.samples(rows, size=8, cache=cache)
    again.x[0] = 77  # A private copy of the page: the file stays as it is.
    assert torch.equal(wildcam.samples(rows, size=8, cache=cache).x, first.x)
    for other, size in ((rows[:1], 8), (rows, 4)):
        with pytest.raises(DataError, match="cannot be read"):
            wildcam.samples(other, size=size, cache=cache)
    assert list(cache.iterdir()) == [cache_file]


def test_an_incomplete_file_is_decoded_anew(folder: Path, tmp_path: Path) -> None:
    wildcam = iwildcam.scan(folder)
    rows = wildcam.rows("train")
    whole = wildcam.samples(rows, 8, tmp_path / "cache").x.clone()
    (cache_file,) = (tmp_path / "cache").iterdir()
    cache_file.write_bytes(cache_file.read_bytes()[:100])
    assert torch.equal(wildcam.samples(rows, 8, tmp_path / "cache").x, whole)
    assert len(wildcam.samples(rows[:0], 8, tmp_path / "cache")) == 0


def test_a_vanished_image_is_named_with_its_row_and_leaves_nothing(
    folder: Path, tmp_path: Path
) -> None:
    (folder / "train" / "image3.png").unlink()
    wildcam = iwildcam.scan(folder)
    with pytest.raises(DataError, match=r"train/image3.png: cannot be read .*row 4 of metadata"):
        wildcam.samples(wildcam.rows("train"), 8, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_cache_that_cannot_be_written_says_how_much_it_takes(
    folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    wildcam = iwildcam.scan(folder)
    with pytest.raises(DataError, match="cannot be written .*It takes 384 bytes; free some space"):
        wildcam.samples(wildcam.rows("val"), 8, tmp_path / "file" / "cache")


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
    wildcam = iwildcam.scan(folder)
    roles = iwildcam_roles(wildcam, clients=2)
    seen = [set(wildcam.camera[rows].tolist()) for rows in roles.clients]
    assert seen == [{0, 3}, {1, 2}] or seen == [{0}, {1, 2, 3}]
    assert np.array_equal(roles.validation, wildcam.rows("val"))
    assert np.array_equal(
        roles.target, np.bincount(wildcam.y[wildcam.rows("test")], minlength=4) / 2
    )


def test_a_run_on_an_incomplete_set_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDSHIFT_DATA", str(tmp_path))
    with refuses(folder / "metadata.csv", "21 images are train, in WILDS v2.0 129,809"):
        prepare(config())


def test_the_whole_path_on_a_small_set(
    folder: Path, complete: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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


# ---------------------------------------------------------------------- sizes, bytes, augmentation


@pytest.fixture
def wildcam(
    folder: Path, complete: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> iwildcam.Wildcam:
    """The small set where experiments look for it."""
    monkeypatch.setenv("FEDSHIFT_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return iwildcam.scan(folder)


def config(size: int | None = 8, model: str = "resnet18-gn", **data: Any) -> Config:
    return Config.model_validate(
        {
            "data": {"name": "iwildcam", "validation": 0.0, "size": size, **data},
            "shift": {"kind": "natural", "clients": 2},
            "model": {"name": model},
            "training": {"rounds": 1, "lr": 0.01, "batch": 8},
        }
    )


@pytest.mark.slow
def test_photographs_of_a_given_size_stay_bytes_on_disk(wildcam: iwildcam.Wildcam) -> None:
    """Clients, validation and test are views of the mapped files, in the roles' order."""
    prepared, roles = prepare(config()), iwildcam_roles(wildcam, 2)
    task, data = prepared.task, prepared.data
    assert task.target_validation is not None
    for x, rows, whole in (
        *((c.x, rows, data.train) for c, rows in zip(task.clients, roles.clients, strict=True)),
        (task.target_validation.x, roles.validation, data.train),
        (task.test.x, roles.test, data.test),
    ):
        assert x.dtype == torch.uint8
        assert x[:, 0, 0, 0].tolist() == rows.tolist()  # image j is painted (j, 2j, 3j)
        assert x.untyped_storage().data_ptr() == whole.x.untyped_storage().data_ptr()
    for client, rows in zip(task.clients, roles.clients, strict=True):
        assert client.y.tolist() == wildcam.y[rows].tolist()
    even = replace(prepared, task=replace(task, target=torch.full((4,), 0.25).double()))
    assert {c.x.dtype for c in oracle_clients(even)} == {torch.uint8}
    for other in (config(None), config(model="linear")):
        assert {c.x.dtype for c in prepare(other).task.clients} == {torch.float32}


@pytest.mark.slow
def test_bytes_train_and_score_as_scaled_values(wildcam: iwildcam.Wildcam) -> None:
    prepared = prepare(config())
    task = prepared.task
    floats = replace(
        task,
        clients=tuple(c._replace(x=scaled(c.x)) for c in task.clients),
        test=replace(task.test, x=scaled(task.test.x)),
        target_validation=replace(task.target_validation, x=scaled(task.target_validation.x)),
    )
    done = [
        run_experiment(config(), prepared=p).outcome
        for p in (prepared, replace(prepared, task=floats))
    ]
    assert all(torch.equal(v, done[1].params[k]) for k, v in done[0].params.items())
    for name in ("train_loss", "target_loss", "target_macro_f1", "validation_loss"):
        assert getattr(done[0].final, name) == getattr(done[1].final, name)


def test_images_are_not_enlarged_and_other_sets_have_one_size(
    wildcam: iwildcam.Wildcam, folder: Path
) -> None:
    with pytest.raises(DataError, match="12 x 8 pixels, and enlarging images to 9 adds nothing"):
        prepare(config(9))
    with pytest.raises(DataError, match="enlarging images to 9 adds nothing"):
        datasets.load("iwildcam", size=9)
    with pytest.raises(InputError, match='size=9 is for pacs, iwildcam, not for "mnist"'):
        datasets.load("mnist", size=9)
    for name in (folder / "train").iterdir():
        name.unlink()
    check_not_enlarged(folder, 9)  # nothing to say without images


@pytest.mark.slow
def test_augmentation_repeats_and_changes_training_alone(wildcam: iwildcam.Wildcam) -> None:
    pytest.importorskip("kornia", reason='needs kornia: pip install "fedshift[vision]"')

    def trained(augment: str) -> Outcome:
        return run_experiment(config(model="linear", augment=augment)).outcome

    changed, again, plain = trained("photos"), trained("photos"), trained("none")
    assert all(torch.equal(v, again.params[k]) for k, v in changed.params.items())
    assert not torch.equal(changed.params["head.weight"], plain.params["head.weight"])
    model = prepare(config(model="linear", augment="photos")).model
    test = prepare(config(model="linear")).task.test
    assert score(model, plain.params, plain.buffers, test, 4).loss == plain.test.loss


@pytest.mark.slow
def test_what_a_run_took_is_locked(wildcam: iwildcam.Wildcam) -> None:
    prepared = prepare(config())
    packages = lock(config(augment="photos"), prepared)["packages"]
    assert {"pillow", "kornia"} <= packages.keys()
    assert "torchvision" not in packages
    assert "kornia" not in lock(config(), prepared)["packages"]
    assert "pillow" not in lock(Config(), prepared)["packages"]
