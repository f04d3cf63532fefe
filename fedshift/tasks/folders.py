"""Reading images from folders client/label/file, or as an index file lists them, at one size."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedshift.arguments import called
from fedshift.datasets.images import ENDINGS, OTHER_ENDINGS, open_image
from fedshift.datasets.store import Store, open_store
from fedshift.errors import DataError, InputError, shown
from fedshift.real import is_whole
from fedshift.tasks.making import Rows
from fedshift.tasks.names import Coded, coded
from fedshift.tasks.tables import read_table

INDEX = ("path", "client", "label")


class Listed(NamedTuple):
    """Names of image files in a folder, with the client and label of each."""

    files: Sequence[str]
    client: Coded
    label: Coded


def rows_of_folder(path: Path, size: object, index: str | os.PathLike[str] | None) -> Rows:
    """Examples uint8 [n, 3, height, width] with labels and clients.

    Raises DataError for a folder without such images, and for an image that cannot be read. Without
    `size`, also for the first image that differs in size from those before.
    """
    if not path.is_dir():
        raise DataError(f"there is no folder {path}; give one with client/label/image files in it")
    store = open_store(path)
    listed = _by_folder(store) if index is None else _by_index(path, Path(index))
    return Rows(_decoded(store, listed.files, _pixels_of(size)), listed.label, listed.client)


def _by_folder(store: Store) -> Listed:
    files = []
    for name in store.names():
        if Path(name).name.startswith(".") or not name.lower().endswith((*ENDINGS, *OTHER_ENDINGS)):
            continue
        if not name.lower().endswith(ENDINGS):
            raise DataError(f"{store.place / name}: images are JPEG or PNG files; convert it")
        if name.count("/") != 2:
            raise DataError(
                f"{store.place / name}: images lie in client/label/file, or are listed in a CSV "
                "file: index=..."
            )
        files.append(name)
    if not files:
        raise DataError(f"{store.place} holds no JPEG or PNG images in client/label/ folders")
    parts = [name.split("/") for name in files]
    client, label = coded([part[0] for part in parts]), coded([part[1] for part in parts])
    return Listed(files, client, label)


def _by_index(folder: Path, index: Path) -> Listed:
    """Images that a CSV file lists by path (from the folder), client and label."""
    file = index if index.is_file() else folder / index
    table, _ = read_table(file, INDEX, names=INDEX)
    path, client, label = (coded(table.of[name]) for name in INDEX)
    if (path.codes < 0).any():
        raise DataError(f"{file}, row {int((path.codes < 0).argmax()) + 1}: it names no path")
    return Listed([path.names[k] for k in path.codes], client, label)


def _pixels_of(size: object) -> tuple[int, int] | None:
    """(height, width) to which images are resized; None if they stay as they are."""
    pair = (size, size) if is_whole(size) else size
    if pair is None:
        return None
    if not isinstance(pair, tuple | list) or len(pair) != 2 or not all(map(is_whole, pair)):
        raise InputError(f"size is {called(size)}; give pixels a side, or (height, width)")
    if min(pair) < 1:
        raise InputError(f"size={size}; give 1 pixel or more")
    return int(pair[0]), int(pair[1])


def _decoded(store: Store, files: Sequence[str], size: tuple[int, int] | None) -> Tensor:
    first = open_image(store, files[0])
    height, width = size or (first.height, first.width)
    pixels = np.empty((len(files), 3, height, width), np.uint8)
    for j, name in enumerate(files):
        image = open_image(store, name)
        if image.size != (width, height):
            if size is None:
                raise DataError(
                    f"{shown(name)} has {image.width} x {image.height} pixels and "
                    f"{shown(files[0])} {width} x {height}; give size=, which all are brought to"
                )
            image = image.resize((width, height))
        pixels[j] = np.asarray(image).transpose(2, 0, 1)
    return torch.from_numpy(pixels)
