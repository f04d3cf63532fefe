"""The idx format of MNIST and its relatives, raw or gzipped.

Layout: two zero bytes, a type code (8 = unsigned byte, 12 = 32-bit integer), the number of axes,
each axis as a big-endian 32-bit count, then the values. The header states the size, so a small
file that claims or unpacks to too much is refused before it fills the memory.
Source: LeCun, Cortes & Burges, "The MNIST database of handwritten digits", section "File formats".
"""

from __future__ import annotations

import gzip
import math
import os
import struct
import zlib
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
import torch
from torch import Tensor

from fedshift.datasets.base import Samples, damaged, read_whole

# The largest official idx set, EMNIST by class, holds 0.55 GB; a header above 1 GiB is a mistake.
LARGEST = 1 << 30

_GZIP_MAGIC = b"\x1f\x8b"
_PREFIXES = ("train", "t10k")
# Type code, bytes per value, and the name in error messages.
_BYTE = (8, 1, "unsigned bytes")
_INTEGER = (12, 4, "32-bit integers")


def read_array(path: Path, axes: int) -> Tensor:
    """The values of one idx file.

    Shapes: uint8, with `axes` axes as the header gives them.

    Raises DataError for a truncated, damaged or oversized file, and for a wrong type or axes.
    """
    values, shape = _read(path, axes, _BYTE)
    return torch.frombuffer(values, dtype=torch.uint8).reshape(shape)


def read_integers(path: Path, axes: int) -> Tensor:
    """The values of an idx file of 32-bit integers: int64, with `axes` axes; errors as above."""
    values, shape = _read(path, axes, _INTEGER)
    # Big-endian in the file; astype also gives memory that torch may write to.
    return torch.from_numpy(np.frombuffer(values, dtype=">i4").astype(np.int64)).reshape(shape)


def read_samples(folder: Path, prefix: str, classes: int) -> Samples:
    """Images and labels of one part ("train" or "t10k") of an idx folder.

    Shapes: x uint8 [n, 1, height, width], y int64 [n].

    If a file exists both gzipped and raw, an undamaged one of them is read.

    Raises DataError for a missing or damaged file, counts that differ, and a label that is not
    below `classes`.
    """
    images_stem, labels_stem = _stems(prefix)
    images = read_whole(existing(folder, images_stem), lambda path: read_array(path, 3))

    def labels_of(path: Path) -> Tensor:
        labels = read_array(path, 1)
        if len(images) != len(labels):
            raise damaged(path, f"{len(labels):,} labels for {len(images):,} images")
        if int(labels.max()) >= classes:
            raise damaged(path, f"label {int(labels.max())}; allowed: 0 to {classes - 1}")
        return labels

    labels = read_whole(existing(folder, labels_stem), labels_of)
    return Samples(images.unsqueeze(1), labels.long())


def read_pair(folder: Path, classes: int = 10) -> tuple[Samples, Samples]:
    """Training and test part of an idx folder; see `read_samples`."""
    return read_samples(folder, "train", classes), read_samples(folder, "t10k", classes)


def missing(folder: Path) -> tuple[str, ...]:
    """The official file names that `folder` holds neither gzipped nor raw."""
    stems = (stem for prefix in _PREFIXES for stem in _stems(prefix))
    return tuple(f"{stem}[.gz]" for stem in stems if not find(folder, stem))


def _stems(prefix: str) -> tuple[str, str]:
    return f"{prefix}-images-idx3-ubyte", f"{prefix}-labels-idx1-ubyte"


def find(folder: Path, stem: str) -> tuple[Path, ...]:
    """The files of this name that are there, gzipped ones first."""
    # Unpackers that keep the inner name write a dot for the dash before "idx".
    names = (f"{stem}.gz", stem, stem.replace("-idx", ".idx"))
    return tuple(folder / name for name in names if os.path.isfile(folder / name))


def existing(folder: Path, stem: str) -> tuple[Path, ...]:
    """As `find`. Raises DataError where there is none."""
    paths = find(folder, stem)
    if not paths:
        raise damaged(folder / f"{stem}.gz", "no such file, neither gzipped nor raw")
    return paths


def _open(path: Path) -> BinaryIO:
    # By content, not by name: raw files are often left with the ending .gz and vice versa.
    with path.open("rb") as stream:
        packed = stream.read(2) == _GZIP_MAGIC
    return cast(BinaryIO, gzip.open(path, "rb")) if packed else path.open("rb")


def _read(path: Path, axes: int, kind: tuple[int, int, str]) -> tuple[bytearray, tuple[int, ...]]:
    """The bytes of the values, and the shape."""
    try:
        with _open(path) as stream:
            shape = _read_header(path, stream, axes, kind)
            expected = math.prod(shape) * kind[1]
            # Read one byte more, to notice surplus data without unpacking all of it.
            values = bytearray(stream.read(expected + 1))
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise damaged(path, f"the gzip stream is truncated or damaged ({error})") from error
    except OSError as error:
        raise damaged(path, f"cannot be read ({error.strerror or error})") from error
    if len(values) != expected:
        size = f"only {len(values) // kind[1]:,}" if len(values) < expected else "more"
        announced = f"{_times(shape)} = {math.prod(shape):,} values"
        raise damaged(path, f"the header announces {announced}, the file holds {size}")
    return values, shape


def _read_header(
    path: Path, stream: BinaryIO, axes: int, kind: tuple[int, int, str]
) -> tuple[int, ...]:
    magic, expected = stream.read(4), bytes((0, 0, kind[0], axes))
    if magic != expected:
        raise damaged(
            path,
            f"starts with the bytes {magic.hex(' ') or '(none)'}, expected {expected.hex(' ')} "
            f"(idx, {kind[2]}, {axes} {'axis' if axes == 1 else 'axes'})",
        )
    header = stream.read(4 * axes)
    if len(header) < 4 * axes:
        raise damaged(path, f"ends within the header, which takes {4 + 4 * axes} bytes")
    shape = struct.unpack(f">{axes}I", header)
    largest = LARGEST // kind[1]
    # Before reading: a damaged header may announce more than there is memory.
    if not 0 < math.prod(shape) <= largest:
        raise damaged(
            path, f"the header announces {_times(shape)} values; allowed: 1 to {largest:,} in all"
        )
    return shape


def _times(shape: tuple[int, ...]) -> str:
    return " x ".join(f"{axis:,}" for axis in shape)
