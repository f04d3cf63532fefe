"""CIFAR-10 from the official python batches, or from mosaics of 32 x 32 tiles.

Source: Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009;
https://www.cs.toronto.edu/~kriz/cifar.html ("Dataset layout").
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedshift.datasets.base import Samples, damaged, joined
from fedshift.datasets.images import in_colour, unreadable
from fedshift.datasets.safe_pickle import Array, load
from fedshift.errors import DataError, nearest

CLASSES = (
    "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
)  # fmt: skip
BATCHES = tuple(f"data_batch_{k}" for k in range(1, 6))
TEST_BATCH = "test_batch"

SIDE = 32
_VALUES = 3 * SIDE * SIDE
# Mosaics of 1,000 tiles are usual; 4,096 (2048 x 2048 pixels) limits the memory for one file.
MOST_TILES = 4096
_ENDINGS = (".webp", ".png")


def missing(folder: Path) -> tuple[str, ...]:
    """The missing files; none if all six batches or both mosaic folders are there."""
    if all(_mosaic_paths(folder / part) for part in ("train", "test")):
        return ()
    return _missing_batches(folder)


def read(folder: Path) -> tuple[Samples, Samples]:
    """Training and test part, from batches if `folder` holds all of them, else from mosaics.

    Both layouts give the same pixels. Batches keep the official order; mosaics come class by
    class, then by file number, then tile by tile (rows first).

    Shapes: x uint8 [n, 3, 32, 32] (red, green, blue), y int64 [n].

    Raises DataError for a missing or damaged file, a pickle that asks for anything but arrays, or
    mosaics without Pillow.
    """
    # Batches are preferred: they are the official files, and need no Pillow.
    if not _missing_batches(folder):
        train = joined([read_batch(folder / name) for name in BATCHES])
        return train, read_batch(folder / TEST_BATCH)
    return read_mosaics(folder / "train"), read_mosaics(folder / "test")


def read_batch(path: Path) -> Samples:
    """One official batch: a pickled dict with b"data" [n, 3072] and b"labels" (n integers).

    Each row of the data is 1,024 red, 1,024 green, 1,024 blue values, row by row of the image.

    Raises DataError for an unreadable or foreign pickle, wrong keys, shape, type or label.
    """
    images, labels = read_pickled(path, {b"labels": len(CLASSES)})
    return Samples(images, labels[b"labels"])


def read_pickled(path: Path, classes: Mapping[bytes, int]) -> tuple[Tensor, dict[bytes, Tensor]]:
    """Images and labels of a pickled dict: b"data", and a list of n integers under each given key.

    `classes` gives how many classes the labels of a key have.

    Shapes: images uint8 [n, 3, 32, 32], labels int64 [n].

    Raises DataError for an unreadable or foreign pickle, wrong keys, shape, type or label.
    """
    batch = load(path)
    # Keys are bytes, because Python 2 wrote these pickles.
    if not isinstance(batch, dict) or not {b"data", *classes} <= batch.keys():
        keys = ", ".join(repr(key) for key in (b"data", *classes))
        raise damaged(path, f"holds {_describe(batch)}, expected a dict with {keys}")
    data = batch[b"data"]
    if not isinstance(data, Array) or len(data.shape) != 2 or data.shape[1] != _VALUES:
        shape = list(data.shape) if isinstance(data, Array) else type(data).__name__
        raise damaged(path, f"b'data' is {shape}, expected bytes of shape [n, {_VALUES}]")
    labels = {
        key: _checked_labels(path, key, batch[key], data.shape[0], count)
        for key, count in classes.items()
    }
    return torch.from_numpy(data.values()).reshape(-1, 3, SIDE, SIDE), labels


def read_mosaics(folder: Path) -> Samples:
    """All mosaics `CLASS_NUMBER.webp` (or .png) of a folder, each cut in 32 x 32 tiles.

    Raises DataError without mosaics or Pillow, for an unknown class, and for a damaged image or one
    whose sides are not multiples of 32.
    """
    paths = _mosaic_paths(folder)
    if not paths:
        raise DataError(
            f"{folder}: no mosaics; expected files such as airplane_0.webp. "
            "Run `fedshift datasets fetch cifar-10` for the official batches."
        )
    parts = []
    # Sorted, because the order in which a folder lists its files depends on the file system.
    for label, _, path in sorted((*_class_and_number(path), path) for path in paths):
        tiles = _tiles(path)
        parts.append(Samples(tiles, torch.full((len(tiles),), label, dtype=torch.int64)))
    return joined(parts)


def _missing_batches(folder: Path) -> tuple[str, ...]:
    return tuple(b for b in (*BATCHES, TEST_BATCH) if not os.path.isfile(folder / b))


def _describe(value: object) -> str:
    if isinstance(value, dict):
        return f"a dict with the keys {', '.join(sorted(repr(key) for key in value)) or '(none)'}"
    return f"a {type(value).__name__}"


def _checked_labels(path: Path, key: bytes, labels: Any, count: int, classes: int) -> Tensor:
    # `type`, not `isinstance`: True would count as a label.
    if not isinstance(labels, list) or not all(type(label) is int for label in labels):
        raise damaged(path, f"{key!r} is {_describe(labels)}, expected a list of integers")
    if len(labels) != count:
        raise damaged(path, f"{len(labels):,} labels for {count:,} images")
    wrong = next((label for label in labels if not 0 <= label < classes), None)
    if wrong is not None:
        raise damaged(path, f"label {wrong}; allowed: 0 to {classes - 1}")
    return torch.tensor(labels, dtype=torch.int64)


def _mosaic_paths(folder: Path) -> list[Path]:
    if not os.path.isdir(folder):
        return []
    return [folder / name for name in os.listdir(folder) if name.lower().endswith(_ENDINGS)]


def _class_and_number(path: Path) -> tuple[int, int]:
    name, _, number = path.stem.rpartition("_")
    if name not in CLASSES or not number.isdecimal():
        raise DataError(
            f"{path}: not a mosaic's name; expected CLASS_NUMBER with a class of "
            f"{', '.join(CLASSES)}.{nearest(name, CLASSES)} Rename the file or move it away."
        )
    return CLASSES.index(name), int(number)


def _tiles(path: Path) -> Tensor:
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError(
            f"{path}: mosaics are read with Pillow, which is not installed. "
            'Run `pip install "fedshift[vision]"`, or use the official batches '
            "(`fedshift datasets fetch cifar-10`)."
        ) from error
    try:
        with Image.open(path, formats=("WEBP", "PNG")) as image:
            _check_sides(path, *image.size)
            pixels = np.asarray(in_colour(image))
    except DataError:
        raise
    except unreadable(Image) as error:
        raise damaged(path, f"not a readable WebP or PNG image ({error})") from error
    down, across = pixels.shape[0] // SIDE, pixels.shape[1] // SIDE
    # A copy, because Pillow's memory is read-only.
    grid = torch.from_numpy(pixels.reshape(down, SIDE, across, SIDE, 3).copy())
    return grid.permute(0, 2, 4, 1, 3).reshape(-1, 3, SIDE, SIDE)


def _check_sides(path: Path, width: int, height: int) -> None:
    tiles = (width // SIDE) * (height // SIDE)
    if width % SIDE or height % SIDE or not 0 < tiles <= MOST_TILES:
        raise damaged(
            path,
            f"{width} x {height} pixels; both sides must be multiples of {SIDE}, with at most "
            f"{MOST_TILES:,} tiles in all",
        )
