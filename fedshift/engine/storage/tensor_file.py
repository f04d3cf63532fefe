"""Safetensors files: written tensor by tensor, and mapped into memory without a copy.

Not by the library `safetensors`, which neither aligns tensors nor reads headers of 100 MB and more.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedshift.errors import InputError
from fedshift.tree import Params

# Tensors are aligned as by torch's own allocator: kernels may round differently elsewhere.
ALIGN = 64
# The format allows no gaps, so bytes between tensors are tensors of their own, with this prefix.
PAD = "~pad."
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64",
    torch.complex64: "C64", torch.bool: "BOOL",
}  # fmt: skip
KINDS = {name: kind for kind, name in DTYPES.items()}

# Gives names and tensors; called twice, for the header and for the bytes.
Named = Callable[[], Iterable[tuple[str, Tensor]]]


class Place(NamedTuple):
    """What a tensor is, and where in a file it starts and stops, in bytes from the beginning."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


class Written(NamedTuple):
    """The SHA-256 of a file, and the places of its tensors."""

    sha256: str
    places: tuple[Place, ...]


def write_tensors(
    path: Path, named: Named, flush: Callable[[int], object] = lambda descriptor: None
) -> Written:
    """Write a safetensors file, with no more than one tensor in memory at a time.

    named: gives names and tensors, the same ones at each call. flush: called at the end with the
    open file's descriptor, such as `os.fsync`. Raises OSError if the file cannot be written, and
    InputError for a type of tensor that the format does not have.
    """
    places = _places(named())
    header = _header(places)
    digest = hashlib.sha256()
    with path.open("wb") as f:
        for block in (header, *_blocks(places, named())):
            digest.update(block)
            f.write(block)
        f.flush()
        flush(f.fileno())
    moved = (p._replace(start=len(header) + p.start, stop=len(header) + p.stop) for p in places)
    return Written(digest.hexdigest(), tuple(moved))


def places_in(path: Path) -> tuple[Place, ...]:
    """The places of a file's tensors, from its header, which may have any length.

    The reader of `safetensors` refuses headers above 100 MB, about half a million tensors; a
    checkpoint may have more. Raises OSError if the file cannot be read, and ValueError, LookupError
    or TypeError for a damaged header or a file that is too short for it.
    """
    # A header may be damaged. Reading mapped memory beyond the end of the file would crash Python.
    size = path.stat().st_size
    with path.open("rb") as f:
        start = 8 + int.from_bytes(f.read(8), "little")
        if start > size:
            raise ValueError("a header longer than the file")
        entries = json.loads(f.read(start - 8))
    places = []
    for name, entry in entries.items():
        first, last = entry["data_offsets"]
        p = Place(name, KINDS[entry["dtype"]], tuple(entry["shape"]), start + first, start + last)
        length = math.prod(p.shape) * p.dtype.itemsize
        if (
            min(p.shape, default=0) < 0
            or not start <= p.start <= p.start + length == p.stop <= size
        ):
            raise ValueError(f'"{name}" is not where the header says')
        places.append(p)
    return tuple(p for p in places if not p.name.startswith(PAD))


def map_tensors(path: Path, places: Sequence[Place]) -> Params:
    """The tensors of a file, mapped into memory: bytes are read when they are used.

    Writing to them does not change the file, and the file may be removed while they are in use.
    """
    size = max((p.stop for p in places), default=0)
    whole = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    return {p.name: whole[p.start : p.stop].view(p.dtype).view(p.shape) for p in places}


def _places(named: Iterable[tuple[str, Tensor]]) -> list[Place]:
    """Places in bytes from the end of the header; each starts at a multiple of ALIGN."""
    places: list[Place] = []
    for name, v in named:
        if v.dtype not in DTYPES:
            raise InputError(f'"{name}" is {v.dtype}, which a safetensors file cannot hold')
        start = -(-places[-1].stop // ALIGN) * ALIGN if places else 0
        stop = start + v.numel() * v.element_size()
        places.append(Place(name, v.dtype, tuple(v.shape), start, stop))
    return places


def _header(places: Sequence[Place]) -> bytes:
    entries: dict[str, Any] = {}
    end = 0
    for i, p in enumerate(places):
        if p.start > end:
            gap = [end, p.start]
            entries[f"{PAD}{i}"] = {"dtype": "U8", "shape": [p.start - end], "data_offsets": gap}
        offsets = [p.start, p.stop]
        entries[p.name] = {"dtype": DTYPES[p.dtype], "shape": p.shape, "data_offsets": offsets}
        end = p.stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGN)
    return len(text).to_bytes(8, "little") + text


def _blocks(places: Sequence[Place], named: Iterable[tuple[str, Tensor]]) -> Iterator[bytes]:
    end = 0
    for p, (_, v) in zip(places, named, strict=True):
        # Zeros up to the next aligned start.
        yield bytes(p.start - end)
        flat = v.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        yield flat.numpy().tobytes()
        end = p.stop
