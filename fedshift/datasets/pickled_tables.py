"""Pickles of pandas tables and numpy arrays, read as columns; see `safe_pickle`.

Neither pandas nor numpy's own constructors are called: code of this module stands for them, and
takes contiguous arrays of numbers and lists of objects alone. So a table that an old pandas wrote
is read whatever version of pandas is installed.
"""

from __future__ import annotations

import io
import lzma
import math
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedshift.datasets.base import damaged
from fedshift.datasets.safe_pickle import LARGEST, encode, forbidden, load
from fedshift.errors import DataError

Column = NDArray[Any]
_NUMBERS = {"f8": np.float64, "i8": np.int64, "i4": np.int32}
_NPY = b"\x93NUMPY\x01\x00"


def load_columns(path: Path) -> dict[str, Column]:
    """The columns of a pandas DataFrame in an xz-compressed pickle, by name, as arrays [n].

    Raises:
        DataError: unreadable or damaged file, or one that names a forbidden global.
    """
    frame = load(path, stand_in, _unpacked, protocol=5)
    if not isinstance(frame, _Frame) or frame.columns is None:
        raise damaged(path, "holds no table")
    return frame.columns


def load_object(path: Path) -> Any:
    """The one object in an .npy file: dicts and lists of numbers, texts and arrays.

    Raises:
        DataError: unreadable or damaged file, or one that names a forbidden global.
    """
    whole = load(path, stand_in, _past_header)
    if not isinstance(whole, _Array) or whole.values.shape != ():
        raise damaged(path, "holds no single object")
    return _plain(whole.values.item())


def _unpacked(path: Path) -> BinaryIO:
    with lzma.open(path) as stream:
        return io.BytesIO(stream.read(LARGEST))


def _past_header(path: Path) -> BinaryIO:
    stream = path.open("rb")
    if stream.read(len(_NPY)) != _NPY:
        raise DataError("not an .npy file of version 1.0")
    stream.seek(int.from_bytes(stream.read(2), "little"), io.SEEK_CUR)
    return stream


def _plain(value: Any) -> Any:
    """The value with arrays in place of what stood for them."""
    if isinstance(value, _Array):
        value = value.values
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, list) or (isinstance(value, np.ndarray) and value.dtype == object):
        return [_plain(one) for one in value]
    return value


class _Type:
    """Stands for numpy.dtype: little-endian numbers, or objects."""

    def __init__(self, code: Any, *_flags: Any) -> None:
        if code not in (*_NUMBERS, "O8"):
            raise DataError(f"an array of type {code!r}; allowed: {', '.join(_NUMBERS)}, O8")
        self.number = _NUMBERS.get(code)

    def __setstate__(self, state: Any) -> None:
        if not isinstance(state, tuple) or state[1] not in ("<", "|"):
            raise DataError("an array whose numbers are not little-endian")

    def array(self, shape: Any, raw: Any, order: Any) -> Column:
        """A new array of this shape with the numbers or objects of `raw`."""
        if not (isinstance(shape, tuple) and all(type(n) is int and n >= 0 for n in shape)):
            raise DataError(f"an array has the impossible shape {shape!r}")
        if self.number is None:
            flat = np.empty(len(raw), dtype=object)
            for i, value in enumerate(raw):
                flat[i] = value
        else:
            flat = np.frombuffer(raw, dtype=self.number)
        if flat.size != math.prod(shape):
            raise DataError(f"an array of shape {list(shape)} comes with {flat.size:,} values")
        return np.array(flat.reshape(shape, order="F" if order == "F" else "C"))


class _Array:
    """Stands for numpy.ndarray."""

    values: Column = np.empty(0)

    def __setstate__(self, state: Any) -> None:
        match state:
            case (1, tuple() as shape, _Type() as kind, bool() | int() as fortran, raw):
                self.values = kind.array(shape, raw, "F" if fortran else "C")
            case _:
                raise DataError("an array's description is not numpy's")


def _reconstruct(_kind: Any, *_arguments: Any) -> _Array:
    return _Array()


def _frombuffer(raw: Any, kind: Any, shape: Any, order: Any) -> Column:
    if not isinstance(kind, _Type):
        raise DataError("an array without a type")
    return kind.array(shape, raw, order)


class _Block(NamedTuple):
    """Rows of `values` are the columns at `place`."""

    values: Any
    place: Any
    axes: Any


class _Manager(NamedTuple):
    blocks: Any
    axes: Any


class _Index:
    """Stands for the names of columns or rows."""


def _new_index(_kind: Any, fields: Any) -> Any:
    return fields.get("data")


class _Frame:
    """Stands for pandas.DataFrame."""

    # None where a pickle makes a table and never describes it.
    columns: dict[str, Column] | None = None

    def __setstate__(self, state: Any) -> None:
        match state:
            case {"_mgr": _Manager(tuple() as blocks, [_Array() as names, *_])}:
                titles = [str(name) for name in names.values]
            case _:
                raise DataError("a table's description is not that of pandas 1.3 to 2")
        columns: dict[str, Column] = {}
        for block in blocks:
            places = np.arange(len(titles))[block.place]
            for place, values in zip(places, _values(block), strict=True):
                columns[titles[place]] = values
        if set(columns) != set(titles) or len({len(values) for values in columns.values()}) > 1:
            raise DataError("a table's columns are incomplete, or of unequal length")
        self.columns = {title: columns[title] for title in titles}


def _values(block: _Block) -> Column:
    return block.values.values if isinstance(block.values, _Array) else block.values


_STAND_INS = {
    "pandas.core.frame.DataFrame": _Frame,
    "pandas.core.internals.managers.BlockManager": _Manager,
    "pandas._libs.internals._unpickle_block": _Block,
    "pandas.core.indexes.base._new_Index": _new_index,
    "pandas.core.indexes.base.Index": _Index,
    "pandas.core.indexes.range.RangeIndex": _Index,
    "numpy.core.multiarray._reconstruct": _reconstruct,
    "numpy.core.numeric._frombuffer": _frombuffer,
    "numpy.ndarray": _Array,
    "numpy.dtype": _Type,
    "builtins.slice": slice,
    "_codecs.encode": encode,
}


def stand_in(module: str, name: str) -> Any:
    """What stands for a name in these pickles; raises `forbidden` for all others."""
    # numpy 2 renamed its inner package.
    made = _STAND_INS.get(f"{module.replace('numpy._core', 'numpy.core')}.{name}")
    if made is None:
        raise forbidden(module, name)
    return made
