"""Image files, decoded to one size on demand, and CSV tables that describe them."""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedshift.datasets.base import damaged
from fedshift.datasets.store import Folder as Folder
from fedshift.datasets.store import Store, open_store
from fedshift.errors import DataError, InputError, unknown

if TYPE_CHECKING:
    from PIL.Image import Image

Ints = NDArray[np.int64]
Bytes = NDArray[np.uint8]

# Splits as in WILDS: validation and test from other domains, and from the same ones (id).
SPLITS = ("train", "val", "test", "id_val", "id_test")
ENDINGS = (".jpg", ".jpeg", ".png")
OTHER_ENDINGS = (".bmp", ".gif", ".heic", ".jp2", ".ppm", ".tif", ".tiff", ".webp")
# Photographs of 24 megapixels are usual. A header with more than 64 is damaged or forged.
MOST_PIXELS = 1 << 26
# Raised whenever decoding changes, so that files that older versions have decoded are not used.
_DECODED = 2
# EXIF's tag 0x0112, and the transposition (numbered as Pillow does) that sets each value upright.
_ORIENTATION = 0x0112
_UPRIGHT: dict[object, int] = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}
# int64 holds all numbers of 18 digits.
_MOST_DIGITS = 18


@dataclass(frozen=True, eq=False)
class Images:
    """Images that are decoded on demand.

    `names[j]` is image j in the store; `rows[j]` is its place in a table, for messages.
    """

    store: Store
    names: tuple[str, ...]
    rows: tuple[str, ...]


def decode(images: Images, which: Ints, size: int, out: Bytes | None = None) -> Tensor:
    """The images at `which` [m] in colour at size x size: uint8 [m, 3, size, size].

    Each is taken `in_colour`. Images of another size, which may differ among themselves, are
    resized with bicubic interpolation, without regard to their aspect ratio (as the PACS and
    iWildCam benchmarks do); `out` takes the values if given.

    Raises InputError for a size that is not a whole number of at least 1, DataError without Pillow
    and for a missing or damaged file, named with its table's row.
    """
    check_size(size)
    shape = (len(which), 3, size, size)
    pixels = np.empty(shape, np.uint8) if out is None else out
    # Imported on use: listing and counting labels work without Pillow.
    pillow = _pillow(images.store.place)
    for j, k in enumerate(which):
        try:
            pixels[j] = _pixels(pillow, images.store, images.names[k], size)
        except DataError as error:
            raise DataError(f"{error} ({images.rows[k]})") from error
    return torch.from_numpy(pixels)


def decode_once(images: Images, which: Ints, size: int, folder: Path) -> Tensor:
    """As `decode`, kept in a file of `folder`: decoded by the first call, memory-mapped after it.

    The file is raw bytes [m, 3, size, size], named by a digest of where the images lie, their names
    and the size; the tensor pages it in as it is read, and writing to the tensor does not change
    it. The file gets its name only when it is complete. If images are replaced under the same
    names, this is not noticed: delete the file.
    """
    check_size(size)
    shape = (len(which), 3, size, size)
    if not len(which):
        return torch.empty(shape, dtype=torch.uint8)
    names = "\n".join(images.names[k] for k in which)
    place = os.path.realpath(images.store.place)
    # surrogateescape: names of files need not be UTF-8.
    identity = f"{_DECODED};{size};{place};{names}".encode("utf-8", "surrogateescape")
    path = folder / f"{hashlib.sha256(identity).hexdigest()[:16]}.u8"
    # A file of another length is damaged, and is made again.
    if not os.path.isfile(path) or os.path.getsize(path) != np.prod(shape):
        _fill(images, which, size, path)
    # Mode "c", copy on write: torch needs writable memory, and the file must not change.
    return torch.from_numpy(np.memmap(path, np.uint8, "c", shape=shape))


def check_size(size: object) -> None:
    """Raises InputError unless `size` is a whole number of pixels, at least 1."""
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise InputError(f"size={size!r}; allowed: a whole number of pixels, 1 or more")


def check_not_enlarged(path: Path, size: int) -> None:
    """Raises DataError where the images in a folder or archive are smaller than `size` pixels.

    Only the first image is looked at. Without images the check passes.
    """
    store = open_store(path)
    first = next(filter(is_image, store.names()), None)
    if first is None:
        return
    width, height = _open(_pillow(path), store, first).size
    side = min(width, height)
    if side < size:
        raise DataError(
            f"{path}: {first} has {width} x {height} pixels, and enlarging images to {size} adds "
            f"nothing to them. Ask for at most {side} pixels, or get the originals (`fedshift "
            "datasets` says where each set comes from) and name the folder above them first in "
            "$FEDSHIFT_DATA."
        )


def is_image(name: str) -> bool:
    """Whether a file's name is that of a JPEG or PNG image, not hidden."""
    return name.lower().endswith(ENDINGS) and not os.path.basename(name).startswith(".")


def read_table(raw: bytes, where: Path, columns: Sequence[str]) -> dict[str, list[str]]:
    """The named columns of a CSV file with a header.

    Raises DataError for text that is not UTF-8, a missing column (the message lists those there
    are), a repeated one, no rows, or a row that is longer or shorter than the header.
    """
    try:
        # A NUL byte as filler: no cell of a text file can contain it.
        reader = csv.DictReader(io.StringIO(raw.decode("utf-8-sig"), newline=""), restval="\0")
        header = list(reader.fieldnames or ())
        missing = [c for c in columns if c not in header]
        if missing:
            raise damaged(
                where, f"has no column {', '.join(missing)}; it has {', '.join(header) or 'none'}"
            )
        repeated = [c for c in columns if header.count(c) > 1]
        if repeated:
            raise damaged(where, f"has the column {repeated[0]} twice")
        table: dict[str, list[str]] = {c: [] for c in columns}
        for k, row in enumerate(reader, 1):
            if None in row:  # an unquoted comma within a value moves all values after it
                raise damaged(
                    where, f"row {k} has more values than the {len(header)} columns of the header"
                )
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
        # isascii: isdecimal is true of digits of other scripts, too.
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
        # If the folder could not be made, there is nothing to remove.
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
    colour = _open(pillow, store, name)
    if colour.size != (size, size):
        colour = colour.resize((size, size), pillow.Resampling.BICUBIC)
    return np.asarray(colour).transpose(2, 0, 1)


def open_image(store: Store, name: str) -> Image:
    """An image upright and in colour. Raises DataError where it cannot be decoded."""
    return _open(_pillow(store.place), store, name)


def _open(pillow: ModuleType, store: Store, name: str) -> Image:
    """Decode an image. Raises DataError for one that cannot be decoded."""
    raw = store.read(name)
    try:
        # Only the formats that the sets have: Pillow would otherwise believe a forged header.
        with pillow.open(io.BytesIO(raw), formats=("JPEG", "PNG")) as image:
            # The size is in the header: nothing has been decoded yet.
            if image.width * image.height > MOST_PIXELS:
                raise ValueError(f"{image.width} x {image.height} pixels")
            return in_colour(image)
    except unreadable(pillow) as error:
        raise damaged(store.place / name, f"not a readable JPEG or PNG image ({error})") from error


def unreadable(pillow: ModuleType) -> tuple[type[Exception], ...]:
    """What Pillow raises for damaged images."""
    return (OSError, SyntaxError, ValueError, pillow.DecompressionBombError)


def in_colour(image: Image) -> Image:
    """The image upright, in red, green and blue of 8 bits.

    It is turned by its EXIF orientation. Of 16 bits the high 8 are kept, in grey and in colour;
    greys, palettes and CMYK are converted. Transparency is ignored: a pixel has its stored colour,
    however transparent it is (as in the benchmarks).
    """
    from PIL.Image import Transpose, fromarray

    image.load()
    turn = _UPRIGHT.get(_orientation(image))
    if image.mode.startswith("I"):
        # Shifted here, because Pillow would clip all values above 255.
        image = fromarray((np.asarray(image) >> 8).astype(np.uint8))
    image.info.pop("transparency", None)
    colour = image.convert("RGB")
    return colour if turn is None else colour.transpose(Transpose(turn))


def _orientation(image: Image) -> object:
    """EXIF's code of the camera's orientation; None if it is missing or unreadable."""
    try:
        return image.getexif().get(_ORIENTATION)
    except (SyntaxError, ValueError, struct.error):
        return None
