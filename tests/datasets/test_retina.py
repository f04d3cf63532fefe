"""RETINA in FedLGD's tree and in the three original layouts: what is listed, decoded, refused."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from fedshift import datasets
from fedshift.datasets.sites import pooled
from fedshift.errors import DataError
from fedshift_papers.datasets import retina
from support.dataset_fixtures import refuses
from support.image_fixtures import write_tar
from support.site_fixtures import (
    SMALL,
    put,
    shade,
    write_acrima,
    write_originals,
    write_refuge,
    write_rim,
    write_tree,
    write_xlsx,
)

VALIDATION = "REFUGE-Validation400-GT/Fovea_locations.xlsx"
TEST = "REFUGE-Test-GT/Glaucoma_label_and_Fovea_location.xlsx"
HEADER = ("ImgName", "Glaucoma Label")


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tree(tmp_path_factory.mktemp("retina") / "retina_balanced")


@pytest.fixture
def originals(tmp_path: Path) -> Path:
    return write_originals(tmp_path / "retina")


def counts(dataset: retina.Retina) -> dict[str, tuple[int, ...]]:
    return {
        site: tuple(np.bincount(dataset.y[dataset.site == i], minlength=2).tolist())
        for i, site in enumerate(retina.SITES)
    }


def colours(dataset: retina.Retina) -> set[tuple[int, int, tuple[int, ...]]]:
    """(site, label, colour) of every image; `shade` paints no two of the small set alike."""
    x = dataset.sites(4).x
    assert (x == x[:, :, :1, :1]).all()
    painted = [tuple(rgb) for rgb in x[:, :, 0, 0].tolist()]
    return set(zip(dataset.site.tolist(), dataset.y.tolist(), painted, strict=True))


def wanted() -> set[tuple[int, int, tuple[int, ...]]]:
    return {
        (i, glaucoma, shade(site, bool(glaucoma), k))
        for i, (site, both) in enumerate(SMALL.items())
        for glaucoma, count in enumerate(both)
        for k in range(count)
    }


# --------------------------------------------------------------------------------------- layouts


def test_the_tree_gives_sites_labels_and_pixels(tree: Path) -> None:
    dataset = retina.scan(tree)
    assert counts(dataset) == SMALL
    assert colours(dataset) == wanted()
    assert (dataset.classes, dataset.original) == (("normal", "glaucoma"), (False,) * 3)
    assert (np.diff(dataset.site) >= 0).all()
    whole = dataset.sites()
    assert whole.x.shape == (sum(map(sum, SMALL.values())), 3, 96, 96)
    assert (whole.x.dtype, whole.sites) == (torch.uint8, retina.SITES)


@pytest.mark.parametrize("top", [".", "retina_balanced"])
def test_an_archive_of_the_tree_is_read_in_place(tree: Path, tmp_path: Path, top: str) -> None:
    packed = retina.scan(write_tar(tmp_path / "retina.tar", tree, top))
    assert colours(packed) == wanted()


@pytest.mark.parametrize("sheet_of", ["xlsx", "csv"])
def test_the_three_original_layouts(tmp_path: Path, sheet_of: str) -> None:
    dataset = retina.scan(write_originals(tmp_path, sheet_of))
    assert counts(dataset) == SMALL
    assert dataset.original == (True,) * 3
    paints = [(i, y, rgb) for i, y, rgb in colours(dataset) if i < 2]
    assert set(paints) == {paint for paint in wanted() if paint[0] < 2}
    labelled = {Path(n).name: int(y) for n, y in zip(dataset.images.names, dataset.y, strict=True)}
    assert [labelled[f"V{k:04d}.jpg"] for k in range(1, 5)] == [0, 1, 0, 0]
    assert [labelled[f"T{k:04d}.jpg"] for k in range(1, 4)] == [1, 0, 0]
    rows = dict(zip(map(str, dataset.images.names), dataset.images.rows, strict=True))
    assert rows["Test400/T0002.jpg"] == f"row 2 of {Path(TEST).stem}.{sheet_of}"
    assert rows["Database/Images/Im001_ACRIMA.png"] == "ACRIMA's Im001_ACRIMA.png"


def test_layouts_may_be_mixed_between_sites(tmp_path: Path) -> None:
    write_tree(tmp_path / "tree")
    shutil.rmtree(tmp_path / "tree" / "RIM")
    write_rim(tmp_path / "RIM-ONE_DL_images")
    dataset = retina.scan(tmp_path)
    assert dataset.original == (False, True, False)
    assert colours(dataset) == wanted()


def test_of_rim_one_the_random_partition_goes_first(originals: Path) -> None:
    write_rim(originals / "RIM-ONE_DL_images", "partitioned_by_hospital")
    both = retina.scan(originals)
    assert counts(both) == SMALL
    assert any("partitioned_randomly" in name for name in both.images.names)
    shutil.rmtree(originals / "RIM-ONE_DL_images" / "partitioned_randomly")
    one = retina.scan(originals)
    assert counts(one) == SMALL
    assert any("partitioned_by_hospital" in name for name in one.images.names)


def test_what_is_not_an_image_of_the_three_sites_is_left_out(originals: Path) -> None:
    before = retina.scan(originals).images.names
    put(originals / "__MACOSX/Database/Images/._Im009_ACRIMA.png", (1, 1, 1))
    put(originals / "Database/Images/._Im009_ACRIMA.png", (1, 1, 1))
    put(originals / "Drishti/Training/Glaucoma/drishtiGS_001.png", (1, 1, 1))
    put(originals / "RIM-ONE_DL_reference_segmentations/glaucoma/r1_Im001-1-Disc-T.png", (1, 1, 1))
    masks = originals / "Annotation-Training400/Disc_Cup_Masks/Glaucoma"
    masks.mkdir(parents=True)
    (masks / "g0001.bmp").write_bytes(b"BM")
    assert retina.scan(originals).images.names == before


@pytest.mark.parametrize(
    ("names", "classes"),
    [(("nonGlaucoma", "GLAUCOMA"), ("normal", "glaucoma")),
     (("0", "1"), ("0", "1")), (("sound", "ill"), ("ill", "sound"))],
)  # fmt: skip
def test_class_folders_may_have_any_two_names(
    tmp_path: Path, names: tuple[str, str], classes: tuple[str, str]
) -> None:
    dataset = retina.scan(write_tree(tmp_path, names))
    assert dataset.classes == classes
    first = next(n for n in dataset.images.names if f"/{names[1]}/" in n)
    assert dataset.y[dataset.images.names.index(first)] == (names[1] != "ill")


# ------------------------------------------------------------------------------- the federation


def test_sites_are_clients_with_tests_of_their_own(tree: Path) -> None:
    everyone, split = retina.federated(retina.scan(tree), seed=2, size=4)
    assert [len(rows) for rows in split.train] == [7, 7, 9]
    assert [len(rows) for rows in split.test] == [3, 3, 4]
    train, test = pooled(everyone, split)
    assert (len(train), len(test)) == (23, 10)
    assert everyone.site[split.test[2]].tolist() == [2] * 4
    assert torch.equal(test.x[3:6], everyone.x[split.test[1]])
    again = retina.federated(retina.scan(tree), seed=3, size=4)[1]
    assert not all(np.array_equal(a, b) for a, b in zip(split.test, again.test, strict=True))


def test_one_picture_looks_alike_at_every_site(tmp_path: Path) -> None:
    """No normalisation per site, which would tell a router the site that it is to find."""
    write_tree(tmp_path)
    for folder in ("kaggle_arima", "RIM", "REFUGE"):
        put(tmp_path / folder / "Testing/Normal/same.png", (120, 60, 30))
    dataset = retina.scan(tmp_path)
    same = [j for j, name in enumerate(dataset.images.names) if name.endswith("same.png")]
    x = dataset.sites(8).x[same].float() / 255
    assert torch.equal(x[0], x[1])
    assert torch.equal(x[0], x[2])
    # The means and deviations of the authors' code, of ACRIMA and RIM-ONE.
    mean = torch.tensor([[0.7238, 0.3767, 0.1002], [0.5886, 0.2652, 0.1481]])
    sd = torch.tensor([[0.1001, 0.1057, 0.0503], [0.1147, 0.0937, 0.0461]])
    theirs = (x[:2] - mean[:, :, None, None]) / sd[:, :, None, None]
    assert (theirs[0] - theirs[1]).abs().min() > 0.3


# --------------------------------------------------------------------------------------- refusals

Change = Callable[[Path], object]


def rewrite(path: str, *rows: tuple[object, ...], header: tuple[str, ...] = HEADER) -> Change:
    return lambda folder: write_xlsx(folder / path, [header, *rows])


V = [(f"V{k:04d}.jpg", int(k == 2)) for k in range(1, 5)]
SHEETS: dict[str, Change] = {
    "has no column Glaucoma Label; it has ImgName, Label": rewrite(
        VALIDATION, *V, header=("ImgName", "Label")
    ),
    'row 2: Glaucoma Label is "2"; allowed: 0, 1': rewrite(VALIDATION, V[0], ("V0002.jpg", 2)),
    'row 1: Glaucoma Label is ""; allowed: 0, 1': rewrite(VALIDATION, ("V0001.jpg", "")),
    "row 5: V0009.jpg is not among the images": rewrite(VALIDATION, *V, ("V0009.jpg", 0)),
    "row 5: V0001.jpg is listed before as well": rewrite(VALIDATION, *V, V[0]),
    "has no row for V0003.jpg (2 images without a label)": rewrite(VALIDATION, *V[:2]),
    "has no rows": rewrite(VALIDATION),
}


@pytest.mark.parametrize("message", SHEETS)
def test_damaged_spreadsheets_are_refused_with_the_row(originals: Path, message: str) -> None:
    SHEETS[message](originals)
    with refuses(originals / VALIDATION, message):
        retina.scan(originals)


SCANS: dict[str, Change] = {
    "holds 3 images such as T0001.jpg, but not their labels, Glaucoma_label": lambda f: (
        f / TEST
    ).unlink(),
    "holds Im001_ACRIMA.png twice: Database/Images/Im001_ACRIMA.png and again/": lambda f: put(
        f / "again/Im001_ACRIMA.png", (1, 2, 3)
    ),
    "holds V0001.jpg twice": lambda f: put(f / "again/V0001.jpg", (1, 2, 3)),
    "holds n0001.jpg twice": lambda f: put(f / "a/Training400/Glaucoma/n0001.jpg", (1, 2, 3)),
    "holds RIM-ONE twice: RIM/Training/Normal/0.png and RIM-ONE_DL_images/": lambda f: put(
        f / "RIM/Training/Normal/0.png", (1, 2, 3)
    ),
    "RIM-ONE has the classes glaucoma, normal, suspect; two are expected": lambda f: put(
        f / "RIM-ONE_DL_images/partitioned_randomly/test_set/suspect/r1_Im900.png", (1, 2, 3)
    ),
    "RIM-ONE has the classes normal; two are expected": lambda f: [
        shutil.rmtree(f / "RIM-ONE_DL_images/partitioned_randomly" / part / "glaucoma")
        for part in ("training_set", "test_set")
    ],
}


@pytest.mark.parametrize("message", SCANS)
def test_unclear_folders_are_refused(originals: Path, message: str) -> None:
    SCANS[message](originals)
    with refuses(originals, message):
        retina.scan(originals)


def test_sites_whose_classes_differ_are_refused(tmp_path: Path) -> None:
    write_tree(tmp_path)
    for part in ("Training", "Testing"):
        (tmp_path / "REFUGE" / part / "Normal").rename(tmp_path / "REFUGE" / part / "Class 0")
    with refuses(
        tmp_path,
        "ACRIMA has the classes normal and glaucoma, but REFUGE has Class 0 and glaucoma",
    ):
        retina.scan(tmp_path)


def test_an_absent_site_is_named_with_its_layouts(tmp_path: Path) -> None:
    write_acrima(tmp_path)
    write_refuge(tmp_path)
    pattern = (
        r"no images of RIM-ONE: neither in FedLGD's tree, .* of kaggle_arima, .* all three sites"
    )
    with pytest.raises(DataError, match=pattern):
        retina.scan(tmp_path)


def test_incomplete_originals_are_refused_and_trees_are_not(originals: Path, tree: Path) -> None:
    message = "ACRIMA has 4 images without and 6 with glaucoma; the original has 309 and 396"
    with refuses(originals, message):
        retina.read(originals)
    assert [len(part) for part in retina.read(tree)] == [23, 10]


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_one_to_three_parts_of_refuge_are_complete(
    tree: Path, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = retina.scan(tree)
    sizes = {"ACRIMA": (309, 396), "RIM-ONE": (313, 172), "REFUGE": (360 * parts, 40 * parts)}
    site = np.repeat([0, 1, 2], [sum(n) for n in sizes.values()])
    y = np.concatenate([np.repeat([0, 1], n) for n in sizes.values()])
    retina.check_complete(retina.Retina(dataset.images, y, site, dataset.classes, (True,) * 3))
    y[-1] = 0
    with pytest.raises(DataError, match=r"REFUGE has .*original has 360 and 40 or 720 and 80 or 1"):
        retina.check_complete(retina.Retina(dataset.images, y, site, dataset.classes, (True,) * 3))


def test_a_damaged_image_is_named_with_its_place(originals: Path) -> None:
    dataset = retina.scan(originals)
    for name, place in (
        ("Test400/T0002.jpg", "row 2 of Glaucoma_label_and_Fovea_location.xlsx"),
        ("Database/Images/Im002_ACRIMA.png", "ACRIMA's Im002_ACRIMA.png"),
    ):
        path = originals / name
        path.write_bytes(path.read_bytes()[:40])
        pattern = (
            rf"^{re.escape(str(path))}: not a readable JPEG or PNG image .*\({re.escape(place)}\)$"
        )
        with pytest.raises(DataError, match=pattern):
            dataset.sites(8)


def test_without_pillow_labels_are_counted_and_pixels_refused(tree: Path, no_pillow: None) -> None:
    dataset = retina.scan(tree)
    assert counts(dataset) == SMALL
    with pytest.raises(DataError, match=r"Pillow, which is not installed. Run `pip install"):
        dataset.sites(8)


def test_known_folders_and_archives_are_found(tree: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match='"retina" was not found.*Get it: download ACRIMA'):
        datasets.find("retina", [tmp_path])
    (tmp_path / "retina" / "RIM-ONE_DL_images").mkdir(parents=True)
    with pytest.raises(DataError, match=r"retina is incomplete: it lacks ACRIMA/, REFUGE/\."):
        datasets.find("retina", [tmp_path])
    write_tar(tmp_path / "retina.tar", tree)
    assert datasets.find("retina", [tmp_path]) == tmp_path / "retina.tar"
    assert datasets.find("retina", [tree.parent]) == tree
    loaded = datasets.load("retina", [tree.parent])
    assert (len(loaded.train), loaded.classes) == (23, ("normal", "glaucoma"))
