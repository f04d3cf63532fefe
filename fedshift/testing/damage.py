"""Files damaged at random: what a reader of them must refuse in its own words."""

from __future__ import annotations

import re
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedshift.errors import FedshiftError
from fedshift.seeds import numpy_generator

Change = Callable[[bytes, np.random.Generator], bytes]
# Starts of other formats: zip, PNG, gzip, a pickle, tar's name field, NumPy, idx, safetensors.
MAGIC = (b"PK\x03\x04", b"\x89PNG\r\n\x1a\n", b"\x1f\x8b\x08\x00", b"\x80\x04\x95", b"../../x\0",
         b"\x93NUMPY\x01\x00", b"\x00\x00\x08\x03", b"\xff" * 8, b"\0" * 8)  # fmt: skip
# What parsers of text and numbers trip over.
ODD = (b"NaN", b"nan", b"-inf", b"1e999", b"-1", b"0", b"9" * 5000, b"1_000", b"0x10", b"", b"\0",
       b"\xff\xfe", b'"', b"[" * 20_000, b'{"a":' * 20_000, b"../../../etc/passwd", b"\n\n", b",",
       b"true", b"null", b"-0.0", b"18446744073709551616", b"1e-400", "\N{ARABIC-INDIC DIGIT TWO}"
       .encode(), b"\r", b"a" * 200_000)  # fmt: skip
NUMBER = re.compile(rb"-?\d+\.?\d*")


def damaged(data: bytes, source: np.random.Generator) -> bytes:
    """The bytes after one to three changes."""
    for _ in range(1 + int(source.integers(3))):
        data = CHANGES[int(source.integers(len(CHANGES)))](data, source)
    return data


def _cut(data: bytes, source: np.random.Generator) -> bytes:
    return data[: _place(data, source)]


def _bits(data: bytes, source: np.random.Generator) -> bytes:
    held = bytearray(data)
    for _ in range(1 + int(source.integers(8)) if held else 0):
        held[int(source.integers(len(held)))] ^= 1 << int(source.integers(8))
    return bytes(held)


def _noise(data: bytes, source: np.random.Generator) -> bytes:
    at, size = _place(data, source), 1 + int(source.integers(64))
    return data[:at] + source.bytes(size) + data[at + size :]


def _start(data: bytes, source: np.random.Generator) -> bytes:
    magic = MAGIC[int(source.integers(len(MAGIC)))]
    return magic + data[len(magic) :]


def _header(data: bytes, source: np.random.Generator) -> bytes:
    """A length near the start that promises more than there is."""
    most = (1 << 62, 1 << 40, 1 << 31, 99_999_999, len(data), 0)[int(source.integers(6))]
    at = int(source.integers(5))
    return data[:at] + struct.pack("<>"[int(source.integers(2))] + "Q", most) + data[at + 8 :]


def _number(data: bytes, source: np.random.Generator) -> bytes:
    """One number of a text, or a word in its place."""
    found = list(NUMBER.finditer(data[:20_000]))
    if not found:
        return _odd(data, source)
    one, odd = found[int(source.integers(len(found)))], ODD[int(source.integers(len(ODD)))]
    return data[: one.start()] + odd + data[one.end() :]


def _odd(data: bytes, source: np.random.Generator) -> bytes:
    at = _place(data, source)
    return data[:at] + ODD[int(source.integers(len(ODD)))] + data[at:]


def _span(data: bytes, source: np.random.Generator) -> bytes:
    """A stretch left out, twice there, or somewhere else."""
    first, last = sorted((_place(data, source), _place(data, source)))
    last = min(last, first + 4096)
    at = _place(data, source)
    kinds = (b"", data[first:last] * 2, data[at : at + last - first])
    return data[:first] + kinds[int(source.integers(3))] + data[last:]


def _place(data: bytes, source: np.random.Generator) -> int:
    """Anywhere; half of the time among the first 300 bytes, where headers are."""
    most = min(300, len(data)) if source.random() < 0.5 else len(data)
    return int(source.integers(most + 1))


CHANGES: Sequence[Change] = (_cut, _bits, _noise, _start, _header, _number, _odd, _span)


@dataclass(frozen=True)
class Reader:
    """A file that is whole, and what reads it.

    most: seconds that reading may take
    """

    name: str
    path: Path
    read: Callable[[], object]
    most: float = 20.0


@dataclass(frozen=True)
class Read:
    """Damaged files: how many were taken for whole, how many refused, and what went wrong."""

    taken: int
    refused: int
    broken: tuple[str, ...]


def fuzz_file(reader: Reader, times: int, seed: int) -> Read:
    """Read the file in `times` damaged forms; it is whole again afterwards.

    Broken is a reader that raises anything but the library's own errors, a message that does not
    name the file (or its folder) in each line or is longer than a page, and reading that takes
    longer than `most`.
    """
    whole, source = reader.path.read_bytes(), numpy_generator(seed, "damage", reader.name)
    taken, broken = 0, list[str]()
    reader.read()
    try:
        for i in range(times):
            reader.path.write_bytes(damaged(whole, source))
            began = time.perf_counter()
            try:
                reader.read()
                taken += 1
            except FedshiftError as e:
                broken += _unclear(reader, str(e), i)
            except Exception as e:
                broken.append(f"{reader.name} {i}: {type(e).__name__}: {str(e)[:200]}")
            if (seconds := time.perf_counter() - began) > reader.most:
                broken.append(f"{reader.name} {i}: took {seconds:.0f} s")
    finally:
        reader.path.write_bytes(whole)
    return Read(taken, times - taken, tuple(broken))


def _unclear(reader: Reader, told: str, i: int) -> list[str]:
    """What is wrong with the words of a refusal; a configuration may have several mistakes."""
    lines = told.split("\n")
    named = (reader.path.name, str(reader.path.parent))
    if all(any(name in line for name in named) for line in lines) and len(told) < 5000:
        return []
    return [f"{reader.name} {i}: unclear: {told[:200]!r}"]
