"""PACS in every known layout: listing, decoding and refusals."""

from __future__ import annotations

import re
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedshift import datasets
from fedshift.datasets import images, store
from fedshift.errors import DataError, InputError
from fedshift_papers.datasets import pacs
from support.dataset_fixtures import refuses
from support.image_fixtures import (
    IMAGES,
    PER_CLASS,
    colour,
    keys,
    png,
    write_lists,
    write_metadata,
    write_tar,
    write_tree,
)


def sizes(dataset: pacs.Pacs) -> dict[str, int]:
    return {name: len(dataset.rows(name)) for name in pacs.SPLITS}


def by_rule(j: int, domain: str) -> str:
    """A split that no other layout gives: every fifth cartoon or sketch is id_val."""
    fixed = {"photo": "test", "art_painting": "val"}
    return fixed.get(domain) or ("id_val" if j % 5 == 0 else "train")


# --------------------------------------------------------------------------------------- layouts


def test_a_tree_gives_labels_domains_and_pixels_without_a_table(tree: Path) -> None:
    dataset = pacs.scan(tree)
    assert len(dataset.y) == IMAGES
    assert dataset.origin == "derived"
    assert dataset.images.names == tuple(key for _, _, key in keys())
    assert [(d, y) for d, y, _ in keys()] == list(
        zip(dataset.domain.tolist(), dataset.y.tolist(), strict=True)
    )
    which = np.array([0, 17, IMAGES - 1])
    taken = dataset.samples(which, size=8)
    assert taken.x.shape == (3, 3, 8, 8)
    for j, k in enumerate(which):
        d, y, key = keys()[k]
        wanted = torch.tensor(colour(d, y, int(key[-5])), dtype=torch.uint8)
        assert torch.equal(taken.x[j], wanted.view(3, 1, 1).expand(3, 8, 8))
        assert taken.y[j] == y


@pytest.mark.parametrize("top", [".", "pacs96", "PACS/kfold"])
def test_an_archive_is_read_in_place_and_agrees_with_the_tree(
    tree: Path, tmp_path: Path, top: str
) -> None:
    packed = pacs.scan(write_tar(tmp_path / "pacs.tar", tree, top))
    plain = pacs.scan(tree)
    for field in ("y", "domain", "split"):
        assert np.array_equal(getattr(packed, field), getattr(plain, field))
    which = packed.rows("test")
    assert torch.equal(packed.samples(which, 8).x, plain.samples(which, 8).x)
    assert list(tmp_path.iterdir()) == [tmp_path / "pacs.tar"]


def test_images_are_resized_with_bicubic_interpolation(tree: Path, tmp_path: Path) -> None:
    from PIL import Image

    ramp = np.arange(20 * 30 * 3, dtype=np.uint8).reshape(20, 30, 3)
    place = tmp_path / "photo" / "dog" / "a.png"
    place.parent.mkdir(parents=True)
    Image.fromarray(ramp).save(place)
    here = pacs.scan(tmp_path).samples(np.array([0]), size=12).x[0].permute(1, 2, 0).numpy()
    cubic, linear = (
        np.asarray(Image.fromarray(ramp).resize((12, 12), how))
        for how in (Image.Resampling.BICUBIC, Image.Resampling.BILINEAR)
    )
    assert np.array_equal(here, cubic)
    assert not np.array_equal(here, linear)


def test_the_benchmarks_table_gives_split_and_order(tree: Path, tmp_path: Path) -> None:
    table = write_metadata(tmp_path / "metadata.csv", by_rule, reverse=True)
    packed = write_tar(tmp_path / "pacs.tar", tree)
    dataset = pacs.scan(packed, metadata=table)
    assert dataset.origin == "metadata.csv"
    assert [n.split("/", 1)[1] for n in dataset.images.names] == [k for _, _, k in keys()][::-1]
    wanted = [by_rule(j, pacs.DOMAINS[d]) for j, (d, _, _) in enumerate(keys())][::-1]
    assert [pacs.SPLITS[s] for s in dataset.split] == wanted
    assert dataset.images.rows[3] == "row 4 of metadata.csv"


def test_a_table_among_the_files_is_found(tmp_path: Path) -> None:
    folder = write_tree(tmp_path / "pacs_v1.0")
    assert pacs.scan(folder).origin == "derived"
    write_metadata(folder / "metadata.csv", by_rule)
    assert pacs.scan(folder).origin == "metadata.csv"


@pytest.mark.parametrize(
    ("sub", "ending", "first", "prefix"),
    [
        ("splits", "_kfold.txt", 1, ""),
        ("data/txt_lists", ".txt", 0, "/home/someone/PACS/kfold/"),
    ],
)
def test_lists_of_both_kinds_give_the_split(
    tmp_path: Path, sub: str, ending: str, first: int, prefix: str
) -> None:
    write_tree(tmp_path / "images")
    lists = write_lists(tmp_path / sub, ending, first, prefix)
    dataset = pacs.scan(tmp_path)
    assert dataset.origin == "lists"
    whole = len(pacs.CLASSES) * PER_CLASS
    held_out = 2 * len(pacs.CLASSES)
    assert sizes(dataset) == {
        "train": 2 * whole - held_out,
        "val": whole,
        "test": whole,
        "id_val": held_out,
        "id_test": 0,
    }
    assert all(dataset.images.names[k].endswith("_003.png") for k in dataset.rows("id_val"))
    assert dataset.images.rows[dataset.rows("test")[1]] == f"row 2 of photo_test{ending}"
    wrong = lists / f"sketch_train{ending}"
    wrong.write_text(wrong.read_text().replace(f"dog/pic_001.png {first}", "dog/pic_001.png 9"))
    with refuses(wrong, f'row 2: sketch/dog/pic_001.png has the label "9", expected {first}'):
        pacs.scan(tmp_path)


def test_the_image_that_some_copies_lack_may_be_listed(tmp_path: Path) -> None:
    write_tree(tmp_path)
    lists = write_lists(tmp_path, "_kfold.txt", 1, "")
    for part in ("train", "test"):
        with (lists / f"sketch_{part}_kfold.txt").open("a") as stream:
            stream.write("sketch/dog/n02103406_4068-1.png 1\n")
    assert len(pacs.scan(tmp_path).y) == IMAGES
    (tmp_path / "sketch" / "dog" / "n02103406_4068-1.png").write_bytes(png((1, 2, 3)))
    assert len(pacs.scan(tmp_path).y) == IMAGES + 1


def test_the_derived_split_is_proportional_and_fixed(tree: Path) -> None:
    dataset = pacs.scan(tree)
    assert np.array_equal(dataset.split, pacs.scan(tree).split)
    for name, role in (("photo", "test"), ("art_painting", "val")):
        assert np.array_equal(
            np.flatnonzero(dataset.domain == pacs.DOMAINS.index(name)), dataset.rows(role)
        )
    # 28 images of cartoon times 105 / 2,344 and 113 / 2,344, rounded; of sketch likewise.
    assert sizes(dataset)["id_val"] == round(28 * 105 / 2344) + round(28 * 179 / 3929) == 2
    assert sizes(dataset)["id_test"] == round(28 * 113 / 2344) + round(28 * 193 / 3929) == 2


# --------------------------------------------------------------------------------------- refusals

TABLE_CASES = {
    "has no column path": lambda t: t.replace(",path", ",file"),
    'row 2: split is "trane"; allowed: train, val': lambda t: t.replace("1,val", "1,trane"),
    'row 1: y is "x", expected a whole number': lambda t: t.replace("dog,0", "dog,x", 1),
    "row 1: art_painting/dog/pic_000.png is listed as art_painting/horse": lambda t: t.replace(
        "dog,0", "dog,4", 1
    ),
    "row 1: art_painting/dog/pic_000.png is listed as art_painting/7": lambda t: t.replace(
        "dog,0", "dog,7", 1
    ),
    "row 1: art_painting/dog/pic_900.png is not among the images": lambda t: t.replace(
        "pic_000", "pic_900", 1
    ),
    "row 2: art_painting/dog/pic_000.png is listed before as well": lambda t: t.replace(
        "dog/pic_001", "dog/pic_000", 1
    ),
    "row 113 is too short": lambda t: t + "1,train\n",
    "has no rows": lambda t: t.splitlines()[0] + "\n",
}


@pytest.mark.parametrize("message", TABLE_CASES)
def test_damaged_tables_are_refused_with_the_row(tree: Path, tmp_path: Path, message: str) -> None:
    table = write_metadata(tmp_path / "metadata.csv", by_rule)
    table.write_text(TABLE_CASES[message](table.read_text()))
    with refuses(table, message):
        pacs.scan(tree, metadata=table)


def test_a_binary_table_is_refused(tree: Path, tmp_path: Path) -> None:
    table = tmp_path / "metadata.csv"
    table.write_bytes(b"\xff\xfe\x00")
    with refuses(table, "not a CSV file"):
        pacs.scan(tree, metadata=table)


def test_damaged_and_vanished_images_are_named_with_their_row(tmp_path: Path) -> None:
    folder = write_tree(tmp_path / "PACS")
    dataset = pacs.scan(folder, metadata=write_metadata(tmp_path / "metadata.csv", by_rule))
    broken = folder / keys()[5][2]
    broken.write_bytes(broken.read_bytes()[:40])
    with refuses_row(broken, "not a readable JPEG or PNG image", "row 6 of metadata.csv"):
        dataset.samples(np.arange(10), 8)
    broken.unlink()
    with refuses_row(broken, "cannot be read (No such file", "row 6 of metadata.csv"):
        dataset.samples(np.arange(10), 8)
    assert len(dataset.samples(np.arange(5), 8)) == 5


def refuses_row(path: Path, message: str, row: str) -> Any:
    pattern = rf"^{re.escape(f'{path}: {message}')}.*\({row}\)$"
    return pytest.raises(DataError, match=pattern)


def test_an_oversized_image_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = pacs.scan(write_tree(tmp_path))
    monkeypatch.setattr(images, "MOST_PIXELS", 63)
    with pytest.raises(DataError, match=r"not a readable JPEG or PNG image \(8 x 8 pixels\)"):
        dataset.samples(np.array([0]), 8)


def test_archives_that_cannot_be_indexed_are_refused(tree: Path, tmp_path: Path) -> None:
    packed = write_tar(tmp_path / "pacs.tar", tree, mode="w:gz")
    with pytest.raises(DataError, match="not a complete, uncompressed tar archive .*; unpack a"):
        pacs.scan(packed)
    whole = write_tar(tmp_path / "whole.tar", tree)
    dataset = pacs.scan(whole)
    whole.write_bytes(whole.read_bytes()[:3000])
    with pytest.raises(DataError, match=r"the archive ends after \d+ of \d+ bytes"):
        dataset.samples(np.arange(IMAGES), 8)
    with pytest.raises(DataError, match=r"no such folder or archive. Name a folder or a .tar"):
        pacs.scan(tmp_path / "nothing.tar")


@pytest.mark.parametrize("size", [10**6, 2**62, 2**70])
def test_archives_that_promise_too_much_are_refused(tmp_path: Path, size: int) -> None:
    """The sizes of members in binary, as archives of large files have them."""
    header = bytearray(tarfile.TarInfo("dog/a.png").tobuf(tarfile.GNU_FORMAT))
    header[124:136] = b"\x80" + size.to_bytes(11, "big")
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    path = tmp_path / "pacs.tar"
    path.write_bytes(bytes(header) + bytes(3 * 512))
    with refuses(path, "not a complete, uncompressed tar archive"):
        store.archive(path)


def test_links_are_followed_in_a_folder_and_not_out_of_an_archive(tmp_path: Path) -> None:
    folder = write_tree(tmp_path / "PACS")
    (folder / "photo").rename(tmp_path / "photographs")
    (folder / "photo").symlink_to(tmp_path / "photographs")
    assert len(pacs.scan(folder).y) == IMAGES
    packed = write_tar(tmp_path / "pacs.tar", folder)
    with refuses(packed, f"pacs96/photo is a link to {tmp_path / 'photographs'}, which"):
        pacs.scan(packed)


def test_two_tables_that_differ_are_refused(tmp_path: Path) -> None:
    folder = write_tree(tmp_path)
    table = write_metadata(folder / "metadata.csv", by_rule)
    (folder / "copy").mkdir()
    (folder / "copy" / "metadata.csv").write_bytes(table.read_bytes())
    assert pacs.scan(folder).origin == "metadata.csv"
    write_metadata(folder / "copy" / "metadata.csv", lambda j, domain: "train")
    with refuses(folder, "holds metadata.csv twice: copy/metadata.csv and metadata.csv; keep one"):
        pacs.scan(folder)


def test_no_images_and_two_trees_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no images DOMAIN/CLASS/name.jpg .* Replace the path by"):
        pacs.scan(tmp_path)
    write_tree(tmp_path / "a")
    write_tree(tmp_path / "b")
    with refuses(tmp_path, "holds art_painting/dog/pic_000.png twice: a/art_painting"):
        pacs.scan(tmp_path)


def test_an_incomplete_set_and_wrong_requests_are_refused(tree: Path) -> None:
    with refuses(tree, "photo/dog has 4 images, PACS has 189"):
        pacs.read(tree)
    dataset = pacs.scan(tree)
    with pytest.raises(InputError, match='unknown split "id-val".*Did you mean "id_val"'):
        dataset.rows("id-val")
    for size in (0, -3, 2.0, True):
        with pytest.raises(InputError, match="allowed: a whole number of pixels, 1 or more"):
            dataset.samples(np.array([0]), size)  # type: ignore[arg-type]


def test_without_pillow_labels_are_counted_and_pixels_refused(tree: Path, no_pillow: None) -> None:
    dataset = pacs.scan(tree)
    assert np.bincount(dataset.y).tolist() == [16] * 7
    with pytest.raises(DataError, match=r"Pillow, which is not installed. Run `pip install"):
        dataset.samples(np.array([0]), 8)


def test_known_folders_and_archives_are_found(tree: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match='"pacs" was not found.*Get it: follow the download link'):
        datasets.find("pacs", [tmp_path])
    (tmp_path / "pacs" / "photo").mkdir(parents=True)
    with pytest.raises(DataError, match=r"pacs is incomplete: it lacks art_painting/, cartoon/"):
        datasets.find("pacs", [tmp_path])
    write_tar(tmp_path / "pacs96.tar", tree)
    assert datasets.find("pacs", [tmp_path]) == tmp_path / "pacs96.tar"
    one = next(k for k in datasets.known([tmp_path]) if k.name == "pacs")
    assert one.available
    with pytest.raises(InputError, match='"pacs" has no official file to fetch directly. To get'):
        datasets.fetch("pacs")
    with pytest.raises(InputError, match='"gaussians" is generated; it lies in no folder'):
        datasets.find("gaussians")
