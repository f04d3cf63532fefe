"""Reading idx files, and every way in which they can be wrong."""

from __future__ import annotations

import gzip
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch

from fedshift.datasets import idx
from support.dataset_fixtures import idx_bytes, refuses, write_idx


@pytest.mark.parametrize("packed", [True, False])
def test_idx_images_and_labels_come_back(tmp_path: Path, packed: bool) -> None:
    folder = write_idx(tmp_path, n_train=12, packed=packed)
    train, test = idx.read_pair(folder, 10)
    first = np.random.default_rng(0).integers(0, 256, (12, 28, 28))
    assert torch.equal(train.x[:, 0].long(), torch.from_numpy(first))
    assert train.y.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
    assert (len(test), test.x.dtype, test.y.dtype) == (4, torch.uint8, torch.int64)


def test_idx_names_with_a_dot_and_raw_content_under_gz(tmp_path: Path) -> None:
    folder = write_idx(tmp_path)
    packed = folder / "train-images-idx3-ubyte.gz"
    packed.write_bytes(gzip.decompress(packed.read_bytes()))
    (folder / "t10k-labels-idx1-ubyte.gz").rename(folder / "t10k-labels.idx1-ubyte")
    assert idx.missing(folder) == ()
    assert len(idx.read_pair(folder, 10)[0]) == 6


IMAGES = idx_bytes(np.zeros((3, 2, 2)))
IDX_CASES = {
    "empty": (b"", "starts with the bytes (none), expected 00 00 08 03"),
    "magic": (b"\x89PNG" + IMAGES, "starts with the bytes 89 50 4e 47, expected 00 00 08 03"),
    "labels": (idx_bytes(np.zeros(3)), "expected 00 00 08 03 (idx, unsigned bytes, 3 axes)"),
    "type": (b"\0\0\x0d\x03" + IMAGES[4:], "starts with the bytes 00 00 0d 03"),
    "header": (IMAGES[:11], "ends within the header, which takes 16 bytes"),
    "truncated": (IMAGES[:-1], "announces 3 x 2 x 2 = 12 values, the file holds only 11"),
    "surplus": (IMAGES + b"\0", "announces 3 x 2 x 2 = 12 values, the file holds more"),
    "no images": (idx_bytes(np.zeros((0, 2, 2))), "announces 0 x 2 x 2 values; allowed: 1 to"),
    "oversized": (
        b"\0\0\x08\x03" + b"\xff" * 12,
        "4,294,967,295 x 4,294,967,295 x 4,294,967,295 values; allowed: 1 to 1,073,741,824",
    ),
}


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("case", IDX_CASES)
def test_damaged_idx_files_are_refused(tmp_path: Path, case: str, packed: bool) -> None:
    content, message = IDX_CASES[case]
    path = tmp_path / "x-idx3-ubyte"
    path.write_bytes(gzip.compress(content) if packed else content)
    with refuses(path, message):
        idx.read_array(path, 3)


@pytest.mark.parametrize("cut", [5, 12, -9, -4])
def test_truncated_gzip_is_refused(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "x.gz"
    path.write_bytes(gzip.compress(idx_bytes(np.arange(200).reshape(50, 2, 2)))[:cut])
    with refuses(path, "the gzip stream is truncated or damaged"):
        idx.read_array(path, 3)


def test_damaged_gzip_is_refused(tmp_path: Path) -> None:
    packed = bytearray(
        gzip.compress(idx_bytes(np.random.default_rng(5).integers(0, 256, (3, 32, 32))))
    )
    packed[len(packed) // 2] ^= 0xFF
    path = tmp_path / "x.gz"
    path.write_bytes(packed)
    with refuses(path, "the gzip stream is truncated or damaged"):
        idx.read_array(path, 3)


def test_a_bomb_is_not_unpacked_beyond_its_header(tmp_path: Path) -> None:
    path = tmp_path / "bomb.gz"
    path.write_bytes(gzip.compress(IMAGES + bytes(50_000_000), compresslevel=1))
    tracemalloc.start()
    with refuses(path, "the file holds more"):
        idx.read_array(path, 3)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2_000_000


@pytest.mark.parametrize("cut", [0, 40, -1])
def test_a_whole_file_beside_a_cut_one_is_read(tmp_path: Path, cut: int) -> None:
    whole = idx.read_pair(write_idx(tmp_path / "whole"), 10)
    folder = write_idx(write_idx(tmp_path / "both"), packed=False)
    for path in folder.glob("*.gz"):
        path.write_bytes(path.read_bytes()[:cut])
    for part, expected in zip(idx.read_pair(folder, 10), whole, strict=True):
        assert torch.equal(part.x, expected.x)
        assert torch.equal(part.y, expected.y)
    raw = folder / "t10k-images-idx3-ubyte"
    raw.write_bytes(raw.read_bytes()[:-1])
    with refuses(folder / f"{raw.name}.gz", f"({raw.name} beside it cannot be read either.)"):
        idx.read_pair(folder, 10)


def test_counts_labels_and_absence_are_checked(tmp_path: Path) -> None:
    folder = write_idx(tmp_path)
    labels = folder / "train-labels-idx1-ubyte.gz"
    labels.write_bytes(idx_bytes(np.zeros(5)))
    with refuses(labels, "5 labels for 6 images"):
        idx.read_samples(folder, "train", 10)
    labels.write_bytes(idx_bytes(np.array([0, 1, 2, 10, 4, 5])))
    with refuses(labels, "label 10; allowed: 0 to 9"):
        idx.read_samples(folder, "train", 10)
    labels.unlink()
    with refuses(labels, "no such file, neither gzipped nor raw"):
        idx.read_samples(folder, "train", 10)
    with refuses(folder, "cannot be read (Is a directory)"):
        idx.read_array(folder, 1)
