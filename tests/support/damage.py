"""Files damaged at random: their readers must refuse them with the library's own errors."""

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
# First bytes of other formats: zip, PNG, gzip, a pickle, tar's name field, NumPy, idx, safetensors.
MAGIC = (b"PK\x03\x04", b"\x89PNG\r\n\x1a\n", b"\x1f\x8b\x08\x00", b"\x80\x04\x95", b"../../x\0",
         b"\x93NUMPY\x01\x00", b"\x00\x00\x08\x03", b"\xff" * 8, b"\0" * 8)  # fmt: skip
# Values on which parsers of text and numbers often fail.
ODD = (b"NaN", b"nan", b"-inf", b"1e999", b"-1", b"0", b"9" * 5000, b"1_000", b"0x10", b"", b"\0",
       b"\xff\xfe", b'"', b"[" * 20_000, b'{"a":' * 20_000, b"../../../etc/passwd", b"\n\n", b",",
       b"true", b"null", b"-0.0", b"18446744073709551616", b"1e-400", "\N{ARABIC-INDIC DIGIT TWO}"
       .encode(), b"\r", b"a" * 200_000)  # fmt: skip
NUMBER = re.compile(rb"-?\d+\.?\d*")


def damaged(data: bytes, rng: np.random.Generator) -> bytes:
    """The bytes after one to three random changes."""
    for _ in range(1 + int(rng.integers(3))):
        data = CHANGES[int(rng.integers(len(CHANGES)))](data, rng)
    return data


def _cut(data: bytes, rng: np.random.Generator) -> bytes:
    return data[: _place(data, rng)]


def _bits(data: bytes, rng: np.random.Generator) -> bytes:
    content = bytearray(data)
    for _ in range(1 + int(rng.integers(8)) if content else 0):
        content[int(rng.integers(len(content)))] ^= 1 << int(rng.integers(8))
    return bytes(content)


def _noise(data: bytes, rng: np.random.Generator) -> bytes:
    at, size = _place(data, rng), 1 + int(rng.integers(64))
    return data[:at] + rng.bytes(size) + data[at + size :]


def _start(data: bytes, rng: np.random.Generator) -> bytes:
    magic = MAGIC[int(rng.integers(len(MAGIC)))]
    return magic + data[len(magic) :]


def _header(data: bytes, rng: np.random.Generator) -> bytes:
    """Write a length, mostly larger than the file, near the start."""
    length = (1 << 62, 1 << 40, 1 << 31, 99_999_999, len(data), 0)[int(rng.integers(6))]
    start = int(rng.integers(5))
    return data[:start] + struct.pack("<>"[int(rng.integers(2))] + "Q", length) + data[start + 8 :]


def _number(data: bytes, rng: np.random.Generator) -> bytes:
    """Replace one number of a text by an odd value."""
    matches = list(NUMBER.finditer(data[:20_000]))
    if not matches:
        return _odd(data, rng)
    match, odd = matches[int(rng.integers(len(matches)))], ODD[int(rng.integers(len(ODD)))]
    return data[: match.start()] + odd + data[match.end() :]


def _odd(data: bytes, rng: np.random.Generator) -> bytes:
    at = _place(data, rng)
    return data[:at] + ODD[int(rng.integers(len(ODD)))] + data[at:]


def _span(data: bytes, rng: np.random.Generator) -> bytes:
    """Remove a section, repeat it, or replace it by another."""
    first, last = sorted((_place(data, rng), _place(data, rng)))
    last = min(last, first + 4096)  # so that files do not grow much
    at = _place(data, rng)
    kinds = (b"", data[first:last] * 2, data[at : at + last - first])
    return data[:first] + kinds[int(rng.integers(3))] + data[last:]


def _place(data: bytes, rng: np.random.Generator) -> int:
    """A random position; half of the time among the first 300 bytes, where headers are."""
    # Otherwise nearly all damage would hit the data, and hardly any the headers.
    end = min(300, len(data)) if rng.random() < 0.5 else len(data)
    return int(rng.integers(end + 1))


CHANGES: Sequence[Change] = (_cut, _bits, _noise, _start, _header, _number, _odd, _span)


@dataclass(frozen=True)
class Reader:
    """An intact file and its reader; `most` is how many seconds reading may take."""

    name: str
    path: Path
    read: Callable[[], object]
    most: float = 20.0


@dataclass(frozen=True)
class Read:
    """The result: how many damaged files were accepted, how many refused, and what went wrong."""

    taken: int
    refused: int
    broken: tuple[str, ...]


def fuzz_file(reader: Reader, times: int, seed: int) -> Read:
    """Read the file in `times` damaged versions, and restore it.

    A version counts as broken if the reader raises anything but the library's own errors, if a line
    of the message does not name the file (or its folder), if the message is longer than a page, or
    if reading takes longer than `most`.
    """
    whole, rng = reader.path.read_bytes(), numpy_generator(seed, "damage", reader.name)
    taken, broken = 0, list[str]()
    reader.read()  # a control: if the intact file were refused, all refusals would look right
    try:
        for i in range(times):
            reader.path.write_bytes(damaged(whole, rng))
            began = time.perf_counter()
            try:
                reader.read()
                taken += 1
            except FedshiftError as e:  # a refusal is right if its message is clear
                broken += _unclear(reader, str(e), i)
            except Exception as e:
                broken.append(f"{reader.name} {i}: {type(e).__name__}: {str(e)[:200]}")
            if (seconds := time.perf_counter() - began) > reader.most:
                broken.append(f"{reader.name} {i}: took {seconds:.0f} s")
    finally:
        reader.path.write_bytes(whole)
    return Read(taken, times - taken, tuple(broken))


def _unclear(reader: Reader, message: str, i: int) -> list[str]:
    """What is wrong with a refusal's message, which may have one line for each mistake."""
    lines = message.split("\n")
    names = (reader.path.name, str(reader.path.parent))
    if all(any(name in line for name in names) for line in lines) and len(message) < 5000:
        return []
    return [f"{reader.name} {i}: unclear: {message[:200]!r}"]
