"""Images as files: listed in a folder or a tar archive, decoded to one size when asked for."""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import os
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedshift.datasets.base import damaged
from fedshift.errors import DataError, InputError, unknown

Ints = NDArray[np.int64]
Bytes = NDArray[np.uint8]

# Of a table in the style of WILDS: validation and test from other domains, and (id) from the same.
SPLITS = ("train", "val", "test", "id_val", "id_test")
ENDINGS = (".jpg", ".jpeg", ".png")
# Photographs of 24 megapixels are usual; more than 64 is a damaged or forged header.
_MOST_PIXELS = 1 << 26
# int64 holds all numbers of 18 digits.
_MOST_DIGITS = 18


class Store(Protocol):
    """Files by name, `/` between the parts of a name; `place` is where they lie."""

    @property
    def place(self) -> Path: ...

    def names(self) -> tuple[str, ...]: ...

    def read(self, name: str) -> bytes: ...


@dataclass(frozen=True)
class Folder:
    """The files of a folder and of all folders below it."""

    place: Path

    def names(self) -> tuple[str, ...]:
        """All files, sorted."""
        found = (Path(top) / name for top, _, names in os.walk(self.place) for name in names)
        return tuple(sorted(path.relative_to(self.place).as_posix() for path in found))

    def read(self, name: str) -> bytes:
        """The file's bytes. Raises DataError where there are none to read."""
        try:
            return (self.place / name).read_bytes()
        except OSError as error:
            raise damaged(
                self.place / name, f"cannot be read ({error.strerror or error})"
            ) from error


@dataclass(frozen=True, eq=False)
class Archive:
    """The plain files of an uncompressed tar archive: name -> (offset, size) in bytes."""

    place: Path
    members: Mapping[str, tuple[int, int]]

    def names(self) -> tuple[str, ...]:
        """All files, sorted."""
        return tuple(sorted(self.members))

    def read(self, name: str) -> bytes:
        """The file's bytes. Raises DataError for a name that the archive lacks or a short file."""
        if name not in self.members:
            raise damaged(self.place / name, "no such file in the archive")
        offset, size = self.members[name]
        held = max(0, os.path.getsize(self.place) - offset)
        if held < size:  # before reading: a damaged header may promise more than there can be
            raise damaged(self.place / name, f"the archive ends after {held} of {size} bytes")
        with self.place.open("rb") as stream:
            stream.seek(offset)
            return stream.read(size)


def archive(path: Path) -> Archive:
    """Index a tar archive without unpacking it; links and devices in it are left out.

    Compressed archives are refused: every image would mean reading all those before it.
    """
    try:
        with tarfile.open(path, "r:") as tar:
            plain = (m for m in tar if m.isfile() and m.sparse is None)
            return Archive(path, {m.name: (m.offset_data, m.size) for m in plain})
    except (tarfile.TarError, EOFError, OSError, ValueError, OverflowError) as error:
        raise damaged(
            path, f"not a complete, uncompressed tar archive ({error}); unpack a compressed one"
        ) from error


def open_store(path: Path) -> Store:
    """The files of a folder, or of a tar archive. Raises DataError when there is neither."""
    if os.path.isdir(path):
        return Folder(path)
    if not os.path.isfile(path):
        raise DataError(f"{path}: no such folder or archive. Name a folder or a .tar file.")
    return archive(path)


@dataclass(frozen=True, eq=False)
class Images:
    """Images that are decoded when asked for.

    `names[j]` is image j in the store, `rows[j]` the place in a table that named it, for messages.
    """

    store: Store
    names: tuple[str, ...]
    rows: tuple[str, ...]


def decode(images: Images, which: Ints, size: int, out: Bytes | None = None) -> Tensor:
    """The images at `which` [m] in colour at size x size: uint8 [m, 3, size, size].

    Images of another size are resized with bicubic interpolation, without regard to their aspect
    ratio (as the PACS and iWildCam benchmarks do); `out` takes the values if given.

    Raises:
        InputError: a size that is not a whole number of at least 1.
        DataError: Pillow missing, or a file missing or damaged, named with its table's row.
    """
    check_size(size)
    shape = (len(which), 3, size, size)
    into = np.empty(shape, np.uint8) if out is None else out
    pillow = _pillow(images.store.place)
    for j, k in enumerate(which):
        try:
            into[j] = _pixels(pillow, images.store, images.names[k], size)
        except DataError as error:
            raise DataError(f"{error} ({images.rows[k]})") from error
    return torch.from_numpy(into)


def decode_once(images: Images, which: Ints, size: int, folder: Path) -> Tensor:
    """As `decode`, kept in a file of `folder`: decoded by the first call, memory-mapped after it.

    The file is raw bytes [m, 3, size, size], named by a digest of names and size; the tensor pages
    it in as it is read, and writing to the tensor does not change it. A file that is not complete
    never gets its name. Images exchanged under the same names are not noticed: delete the file.
    """
    check_size(size)
    shape = (len(which), 3, size, size)
    if not len(which):
        return torch.empty(shape, dtype=torch.uint8)
    names = "\n".join(images.names[k] for k in which)
    path = folder / f"{hashlib.sha256(f'{size};{names}'.encode()).hexdigest()[:16]}.u8"
    if not os.path.isfile(path) or os.path.getsize(path) != np.prod(shape):
        _fill(images, which, size, path)
    return torch.from_numpy(np.memmap(path, np.uint8, "c", shape=shape))


def check_size(size: object) -> None:
    """Raises InputError unless `size` is a whole number of pixels, at least 1."""
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise InputError(f"size={size!r}; allowed: a whole number of pixels, 1 or more")


def check_not_enlarged(path: Path, size: int) -> None:
    """Raises DataError where the images in a folder or archive are smaller than `size` pixels.

    The first image that is met speaks for all of them. Without any, nothing is said here.
    """
    first = _first(path)
    if first is None:
        return
    with _pillow(path).open(io.BytesIO(first[1]), formats=("JPEG", "PNG")) as image:
        side = min(image.width, image.height)
        if side < size:
            raise DataError(
                f"{path}: {first[0]} has {image.width} x {image.height} pixels, and enlarging "
                f"images to {size} adds nothing to them. Ask for at most {side} pixels, or get the "
                "originals (`fedshift datasets` says where each set comes from) and name the "
                "folder above them first in $FEDSHIFT_DATA."
            )


def _first(path: Path) -> tuple[str, bytes] | None:
    """Name and bytes of the first image in a folder or an uncompressed archive."""
    if path.is_dir():
        for top, _, names in os.walk(path):
            for name in filter(_is_image, names):
                return name, Path(top, name).read_bytes()
        return None
    with tarfile.open(path, "r:") as tar:
        for member in tar:
            stream = tar.extractfile(member) if _is_image(member.name) else None
            if stream is not None:
                return member.name, stream.read()
    return None


def _is_image(name: str) -> bool:
    return name.lower().endswith(ENDINGS) and not os.path.basename(name).startswith(".")


def read_table(raw: bytes, where: Path, columns: Sequence[str]) -> dict[str, list[str]]:
    """The named columns of a CSV file with a header.

    Raises DataError for text that is not UTF-8, a column that is missing (they are listed), no
    rows, or a row that is too short.
    """
    try:
        reader = csv.DictReader(io.StringIO(raw.decode("utf-8-sig"), newline=""), restval="\0")
        header = list(reader.fieldnames or ())
        absent = [c for c in columns if c not in header]
        if absent:
            raise damaged(
                where, f"has no column {', '.join(absent)}; it has {', '.join(header) or 'none'}"
            )
        table: dict[str, list[str]] = {c: [] for c in columns}
        for k, row in enumerate(reader, 1):
            if any(row[c] == "\0" for c in columns):
                raise damaged(where, f"row {k} is too short; expected {', '.join(columns)}")
            for c in columns:
                table[c].append(row[c])
    except (UnicodeDecodeError, csv.Error) as error:
        raise damaged(where, f"not a CSV file ({error})") from error
    if not table[columns[0]]:
        raise damaged(where, "has no rows")
    return table


def codes(values: Sequence[str], allowed: Sequence[str], where: Path, column: str) -> Ints:
    """The position of each value in `allowed`: int64 [n]. Raises DataError with the row."""
    place = {value: k for k, value in enumerate(allowed)}
    for k, value in enumerate(values, 1):
        if value not in place:
            raise damaged(where, f'row {k}: {column} is "{value}"; allowed: {", ".join(allowed)}')
    return np.array([place[value] for value in values], dtype=np.int64)


def whole_numbers(values: Sequence[str], where: Path, column: str) -> Ints:
    """The values as int64 [n], all at least 0. Raises DataError with the row."""
    for k, value in enumerate(values, 1):
        if not (value.isascii() and value.isdecimal() and len(value) <= _MOST_DIGITS):
            raise damaged(where, f'row {k}: {column} is "{value}", expected a whole number >= 0')
    return np.array([int(value) for value in values], dtype=np.int64)


def rows_of(split: Ints, names: Sequence[str]) -> Ints:
    """Positions with one of the named splits, ascending; `split` [n] counts in SPLITS.

    Raises InputError for an unknown name, with the nearest match.
    """
    for name in names:
        if name not in SPLITS:
            raise unknown("split", name, SPLITS)
    return np.flatnonzero(np.isin(split, [SPLITS.index(name) for name in names])).astype(np.int64)


def _fill(images: Images, which: Ints, size: int, path: Path) -> None:
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        out = np.memmap(part, np.uint8, "w+", shape=(len(which), 3, size, size))
        decode(images, which, size, out)
        out.flush()
        os.replace(part, path)
    except OSError as error:
        raise DataError(
            f"{path}: cannot be written ({error.strerror or error}). It takes "
            f"{len(which) * 3 * size * size:,} bytes; free some space or choose a smaller size."
        ) from error
    finally:
        # Where the folder could not be made there is nothing to remove, which is no second error.
        with contextlib.suppress(OSError):
            part.unlink()


def _pillow(place: Path) -> ModuleType:
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError(
            f"{place}: images are read with Pillow, which is not installed. "
            'Run `pip install "fedshift[vision]"`.'
        ) from error
    return Image


def _pixels(pillow: ModuleType, store: Store, name: str, size: int) -> Bytes:
    raw = store.read(name)
    try:
        with pillow.open(io.BytesIO(raw), formats=("JPEG", "PNG")) as image:
            if image.width * image.height > _MOST_PIXELS:
                raise ValueError(f"{image.width} x {image.height} pixels")
            colour = image.convert("RGB")
    except (OSError, SyntaxError, ValueError, pillow.DecompressionBombError) as error:
        raise damaged(store.place / name, f"not a readable JPEG or PNG image ({error})") from error
    if colour.size != (size, size):
        colour = colour.resize((size, size), pillow.Resampling.BICUBIC)
    return np.asarray(colour).transpose(2, 0, 1)
