"""Small generated data sets in the official layouts, and a check of their error messages."""

from __future__ import annotations

import gzip
import pickle
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedshift.datasets import cifar, cifar100
from fedshift.errors import DataError


def idx_bytes(values: np.ndarray) -> bytes:
    head = bytes((0, 0, 8, values.ndim)) + np.array(values.shape, dtype=">u4").tobytes()
    return head + values.astype(np.uint8).tobytes()


def write_idx(folder: Path, n_train: int = 6, n_test: int = 4, packed: bool = True) -> Path:
    """Random 28 x 28 images; label j % 10 for image j."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    for prefix, n in (("train", n_train), ("t10k", n_test)):
        images, labels = rng.integers(0, 256, (n, 28, 28)), np.arange(n) % 10
        for stem, values in (("images-idx3", images), ("labels-idx1", labels)):
            raw = idx_bytes(values)
            path = folder / f"{prefix}-{stem}-ubyte{'.gz' if packed else ''}"
            path.write_bytes(gzip.compress(raw) if packed else raw)
    return folder


def write_batch(path: Path, images: np.ndarray, labels: list[int]) -> Path:
    """An official batch of images [n, 3, 32, 32]."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = images.reshape(len(images), -1)
    batch = {b"batch_label": b"testing", b"labels": labels, b"data": data, b"filenames": [b"a.png"]}
    path.write_bytes(pickle.dumps(batch, protocol=2))
    return path


def write_mosaic(path: Path, images: np.ndarray, across: int = 4) -> Path:
    """A mosaic of images [n, 3, 32, 32], `across` to a row, pixel by pixel."""
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    canvas = np.zeros((32 * (len(images) // across), 32 * across, 3), dtype=np.uint8)
    for j, image in enumerate(images):
        row, column = 32 * (j // across), 32 * (j % across)
        for channel in range(3):
            canvas[row : row + 32, column : column + 32, channel] = image[channel]
    options = {"lossless": True} if path.suffix == ".webp" else {}
    Image.fromarray(canvas).save(path, **options)
    return path


def write_cifar_batches(folder: Path, images: np.ndarray, labels: list[int]) -> Path:
    """Five training batches and the test batch, all of the same images."""
    for name in (*cifar.BATCHES, cifar.TEST_BATCH):
        write_batch(folder / name, images, labels)
    return folder


def write_cifar_100(folder: Path, images: np.ndarray, fine: list[int]) -> Path:
    """The training and the test file, both of the same images, with the coarse labels of `fine`."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        b"filenames": [b"a.png"] * len(images),
        b"batch_label": b"testing batch 1 of 1",
        b"fine_labels": fine,
        b"coarse_labels": [cifar100.COARSE_OF[label] for label in fine],
        b"data": images.reshape(len(images), -1),
    }
    for name in (cifar100.TRAIN, cifar100.TEST):
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))
    return folder


@contextmanager
def refuses(path: Path, message: str) -> Iterator[Any]:
    """The error must name the file first, say what is wrong and end with what to do."""
    with pytest.raises(DataError) as caught:
        yield caught
    text = str(caught.value)
    assert text.startswith(f"{path}: ")
    assert message in text
    assert re.search("(Replace|Run|Rename) .*$", text)
    assert "\n" not in text


FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte",
         "t10k-labels-idx1-ubyte")  # fmt: skip


def idx(*shape: int) -> bytes:
    """A small valid idx file of zeros."""
    size = 1
    for n in shape:
        size *= n
    return struct.pack(f">I{len(shape)}I", 0x0800 + len(shape), *shape) + bytes(size)


def mnist(folder: Path, broken: str, content: bytes) -> None:
    (folder / "mnist").mkdir()
    for name in FILES:
        good = idx(4, 28, 28) if "images" in name else idx(4)
        (folder / "mnist" / name).write_bytes(content if name == broken else good)


class Touch:
    """A pickle of this creates a file when it is loaded without restriction."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)
