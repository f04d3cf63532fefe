"""Labelled examples, the digest that identifies them, and the folders searched for data sets."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from fedshift.arguments import called, check_path
from fedshift.errors import DataError, InputError, shown
from fedshift.sketch import sketched

T = TypeVar("T")


@sketched
@dataclass(frozen=True, eq=False)
class Samples:
    """Labelled examples: `x[j]` has label `y[j]`.

    Images are kept as stored (uint8); the model scales them.

    Shapes: x uint8 [n, channels, height, width] or float32 [n, d] (or [n, ...], as a user's own
    data may be); y int64 [n].

    Raises InputError for another type or number of axes, or x and y of unequal length.
    """

    x: Tensor
    y: Tensor

    def __post_init__(self) -> None:
        images = self.x.dtype == torch.uint8 and self.x.ndim == 4
        vectors = self.x.dtype == torch.float32 and self.x.ndim >= 2
        if not (images or vectors):
            raise InputError(
                f"x is {self.x.dtype} with shape {list(self.x.shape)}; allowed: uint8 images "
                "[n, channels, height, width] or float32 numbers [n, d] or [n, ...]."
            )
        if self.y.dtype != torch.int64 or self.y.shape != self.x.shape[:1]:
            raise InputError(
                f"y is {self.y.dtype} with shape {list(self.y.shape)}; it must be int64 with one "
                f"label for each of the {len(self.x)} examples: shape [{len(self.x)}]."
            )

    def __len__(self) -> int:
        return len(self.y)

    def take(self, index: Tensor) -> Samples:
        """The examples at `index` (int64 [m]), in that order."""
        return Samples(self.x[index], self.y[index])


def joined(parts: Sequence[Samples]) -> Samples:
    """The examples of all parts, one after the other."""
    return Samples(torch.cat([part.x for part in parts]), torch.cat([part.y for part in parts]))


@sketched
@dataclass(frozen=True, eq=False)
class Dataset:
    """A data set with its own division in training and test examples.

    `classes[k]` names label k. `sha256` is `content_sha256(train, test)`. It depends on the
    decoded examples and their order, not on the files: raw, gzipped and recompressed copies agree.
    `source` is the folder that was read, or "generated".
    """

    name: str
    train: Samples
    test: Samples
    classes: tuple[str, ...]
    sha256: str
    source: str
    licence: str


def content_sha256(*parts: Samples) -> str:
    """SHA-256 over types, shapes and values of the parts, in order.

    The digest covers the order of the examples on purpose: a seeded split picks examples by
    position, so the same images in another order would give another run.
    """
    digest = hashlib.sha256()
    for part in parts:
        for tensor in (part.x, part.y):
            # Type and shape too: the same bytes in another shape are other examples.
            digest.update(f"{tensor.dtype} {list(tensor.shape)};".encode())
            digest.update(tensor.contiguous().numpy().data)
    return digest.hexdigest()


def cache_folder() -> Path:
    """Where downloads go: `$XDG_CACHE_HOME/fedshift`, or `~/.cache/fedshift`.

    Raises InputError if neither is known: without $HOME and without an entry among the system's
    users, as in many containers.
    """
    base = os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    if base.startswith("~"):
        raise InputError(
            f"no folder for downloads: {base} stands below a home folder that is not known here; "
            "name a folder, or set $XDG_CACHE_HOME"
        )
    return Path(base) / "fedshift"


def search_folders() -> tuple[Path, ...]:
    """The folders that are searched, in order: `$FEDSHIFT_DATA`'s, the cache, Debian's.

    Without a home folder there is no cache.
    """
    try:
        cache = [cache_folder()]
    except InputError:
        cache = []
    return (*named_folders(), *cache, Path("/usr/share/datasets"))


def roots_of(folders: Sequence[Path | str] | None) -> tuple[Path, ...]:
    """These folders as paths, or those of `search_folders` if they are None.

    Raises InputError for anything but a list of paths.
    """
    if folders is None:
        return search_folders()
    if isinstance(folders, str | Path) or not isinstance(folders, Iterable):
        raise InputError(f"folders is {called(folders)}, and a list is due; give [folder]")
    named = tuple(folders)
    for i, folder in enumerate(named):
        check_path(f"folders[{i}]", folder)
    return tuple(map(Path, named))


def named_folders() -> tuple[Path, ...]:
    """The folders of `$FEDSHIFT_DATA`, separated as in `$PATH`; empty parts are skipped."""
    named = os.environ.get("FEDSHIFT_DATA", "").split(os.pathsep)
    return tuple(Path(os.path.expanduser(part)) for part in named if part.strip())


def unsearchable(folder: Path) -> str:
    """Why a folder cannot be searched, such as "Permission denied"; "" if it can."""
    try:
        # With "." inside it, because a folder that may be listed, but not entered, is of no use.
        os.stat(os.path.join(folder, "."))
    except (FileNotFoundError, NotADirectoryError):
        return "no such folder"
    except OSError as e:
        return str(e.strerror)
    return ""


def read_whole(paths: Sequence[Path], read: Callable[[Path], T]) -> T:
    """Read the first undamaged one of several files with the same content.

    So a truncated download does no harm if an undamaged copy lies beside it, packed or unpacked.
    Raises the DataError of the first file if all are damaged.
    """
    errors: list[DataError] = []
    for path in paths:
        try:
            return read(path)
        except DataError as error:
            errors.append(error)
    if len(paths) == 1:
        raise errors[0]
    beside = " and ".join(os.path.relpath(path, paths[0].parent) for path in paths[1:])
    raise DataError(f"{errors[0]} ({beside} beside it cannot be read either.)")


def damaged(path: Path, what: str) -> DataError:
    """The error for a file that exists but cannot be used."""
    return DataError(
        f"{path}: {shown(what, 1000)}. Replace the file by an undamaged copy (`fedshift datasets` "
        "says where each set comes from)."
    )
