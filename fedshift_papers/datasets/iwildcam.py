"""iWildCam 2020, WILDS v2.0: animals seen by camera traps, from the benchmark's own folder.

Beery et al. 2020 (arXiv 2004.10340); Koh et al. 2021, "WILDS", appendix E.1. A client is a camera
or a group of cameras.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from fedshift.datasets.base import Samples, cache_folder, damaged
from fedshift.datasets.images import (
    SPLITS,
    Images,
    Ints,
    codes,
    decode_once,
    read_table,
    rows_of,
    whole_numbers,
)
from fedshift.datasets.store import Folder

COUNTS = (129_809, 14_961, 42_791, 7_314, 8_154)
CLASSES = 182
SIZE = 96

_COLUMNS = ("split", "location_remapped", "sequence_remapped", "y", "filename")
# What categories.csv writes for categories that the benchmark leaves out.
_UNUSED = "99999"


@dataclass(frozen=True, eq=False)
class Wildcam:
    """What there is, not decoded: image j has label y[j], camera[j], sequence[j], split[j].

    Shapes: y, camera, sequence, split int64 [n]; `classes` K names.
    """

    images: Images
    y: Ints
    camera: Ints
    sequence: Ints
    split: Ints
    classes: tuple[str, ...]

    def rows(self, *splits: str) -> Ints:
        """Positions of all images of these splits, ascending. InputError for an unknown split."""
        return rows_of(self.split, splits)

    def samples(self, which: Ints, size: int = SIZE, cache: Path | None = None) -> Samples:
        """The images at `which` [m]: x uint8 [m, 3, size, size], memory-mapped, not in memory.

        Decoded to a file of 3 m size^2 bytes in `cache` (the user's cache folder) by the first
        call: 3.6 GB for the training part at 96 px, 78 GB at the 448 px of the papers.
        """
        folder = cache_folder() / "iwildcam" if cache is None else cache
        x = decode_once(self.images, which, size, folder)
        return Samples(x, torch.from_numpy(self.y[which]))


def scan(path: Path | str) -> Wildcam:
    """List a folder iwildcam_v2.0: metadata.csv, categories.csv and train/ with all images.

    The labels, cameras (`location_remapped`) and sequences must be numbered 0, 1, ... without a
    gap, as the benchmark asserts. Images are looked for when they are decoded, not here.

    Raises DataError for a table missing or damaged, with its row; a numbering with a gap; a label
    without a name.
    """
    store = Folder(Path(path))
    where = store.place / "metadata.csv"
    table = read_table(store.read(where.name), where, _COLUMNS)
    split = codes(table["split"], SPLITS, where, "split")
    numbers = {c: whole_numbers(table[c], where, c) for c in _COLUMNS[1:4]}
    for column, values in numbers.items():
        _check_contiguous(where, column, values)
    # The benchmark keeps the images of all splits in train/.
    names = tuple(f"train/{name}" for name in table["filename"])
    rows = tuple(f"row {k} of metadata.csv" for k in range(1, len(names) + 1))
    return Wildcam(
        Images(store, names, rows),
        numbers["y"],
        numbers["location_remapped"],
        numbers["sequence_remapped"],
        split,
        _classes(store, int(numbers["y"].max()) + 1),
    )


def read(path: Path, size: int = SIZE) -> tuple[Samples, Samples]:
    """(train, test) of the complete set, memory-mapped; see `Wildcam.samples`.

    Raises DataError where a split is not as large as in WILDS v2.0.
    """
    listing = scan(path)
    check_complete(listing)
    return listing.samples(listing.rows("train"), size), listing.samples(listing.rows("test"), size)


def check_complete(listing: Wildcam) -> None:
    """Raises DataError unless splits and classes are as many as in WILDS v2.0."""
    where = listing.images.store.place / "metadata.csv"
    for name, official in zip(SPLITS, COUNTS, strict=True):
        if (count := len(listing.rows(name))) != official:
            raise damaged(where, f"{count:,} images are {name}, in WILDS v2.0 {official:,}")
    if len(listing.classes) != CLASSES:
        raise damaged(where, f"{len(listing.classes)} classes, in WILDS v2.0 {CLASSES}")


def missing(path: Path) -> tuple[str, ...]:
    """Which of the two tables and the image folder are not there."""
    tables = [n for n in ("metadata.csv", "categories.csv") if not os.path.isfile(path / n)]
    return (*tables, *([] if os.path.isdir(path / "train") else ["train/"]))


def _check_contiguous(where: Path, column: str, values: Ints) -> None:
    # Without counting up to the largest, which may be 10^17 in a damaged table.
    numbers = np.unique(values)
    gaps = np.flatnonzero(numbers != np.arange(len(numbers)))
    if gaps.size:
        raise damaged(
            where,
            f"{column} goes up to {values.max()} but is never {gaps[0]}; no gaps are allowed",
        )


def _classes(store: Folder, count: int) -> tuple[str, ...]:
    where = store.place / "categories.csv"
    table = read_table(store.read(where.name), where, ("y", "name"))
    names = {y: name for y, name in zip(table["y"], table["name"], strict=True) if y != _UNUSED}
    for y in range(count):
        if str(y) not in names:
            raise damaged(where, f"no row has y = {y}, which metadata.csv uses")
    return tuple(names[str(y)] for y in range(count))
