"""Read pickles of arrays without running anything that they name.

A pickle can name any importable function and have it called. Here only a few names are allowed, and
each is replaced by harmless code: for the byte arrays of Python 2 by that of this module, for
tables and arrays of numbers by that of `pickled_tables`. What a pickle names is never called, so a
forged dtype or shape cannot reach numpy.
"""

from __future__ import annotations

import math
import os
import pickle
import pickletools
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from fedshift.datasets.base import damaged
from fedshift.errors import DataError

# Official CIFAR files take 31 MB, the training file of CIFAR-100 155 MB.
LARGEST = 1 << 28
# Python 2 writes protocol 2 at most; copies that were saved again may have 4.
PROTOCOL = 4


class Array:
    """An unsigned-byte array as a pickle describes it: its shape and its bytes, both checked."""

    # Defaults, because a pickle may create the object and never describe it.
    shape: tuple[int, ...] = ()
    _raw: bytes = b""
    _order: str = "C"

    def __setstate__(self, state: Any) -> None:
        """Takes numpy's state tuple (version, shape, dtype, is_fortran, bytes).

        Raises DataError for anything but unsigned bytes that fill the shape exactly.
        """
        match state:
            case (1, tuple() as shape, _ByteType(), bool() | int() as fortran, bytes() as raw):
                pass
            case _:
                raise DataError("an array's description is not that of plain unsigned bytes")
        if not all(type(axis) is int and axis >= 0 for axis in shape):
            raise DataError(f"an array has the impossible shape {shape}")
        # Checked here, or reshape would fail later, or memory be taken for a forged huge shape.
        if math.prod(shape) != len(raw):
            raise DataError(f"an array of shape {list(shape)} comes with {len(raw):,} bytes")
        self.shape, self._raw, self._order = shape, raw, "F" if fortran else "C"

    def values(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """A new, writable array in C order."""
        order: Any = self._order
        flat = np.frombuffer(self._raw, dtype=np.uint8)
        return np.array(flat.reshape(self.shape, order=order), order="C")


class _ByteType:
    """Stands for numpy.dtype; only "u1" is allowed, and its state is ignored."""

    def __init__(self, code: Any, *_flags: Any) -> None:
        if code not in ("u1", b"u1"):
            raise DataError(f"an array of type {code!r}; allowed: 'u1' (unsigned bytes)")

    def __setstate__(self, state: Any) -> None:
        pass


def _reconstruct(kind: Any, *_arguments: Any) -> Array:
    if kind is not Array:
        raise DataError("an array of a class other than numpy.ndarray")
    return Array()


def encode(text: Any, encoding: Any = "") -> bytes:
    """Stands for codecs.encode."""
    # Python 3 writes bytes this way in protocol 2; other codecs could expand to any size.
    if not isinstance(text, str) or encoding != "latin1":
        raise DataError(f"text encoded with {encoding!r}; allowed: 'latin1'")
    return text.encode("latin1")


def _resolve(module: str, name: str) -> Any:
    match module, name:
        case (("numpy.core.multiarray" | "numpy._core.multiarray"), "_reconstruct"):
            return _reconstruct
        case "numpy", "ndarray":
            return Array
        case "numpy", "dtype":
            return _ByteType
        case "_codecs", "encode":
            return encode
    raise forbidden(module, name)


def forbidden(module: str, name: str) -> DataError:
    """The error for a name that no data set needs."""
    return DataError(
        f"the pickle asks for {module}.{name}, which reading arrays never needs; it may come from "
        "someone who wants code to run on this machine. Nothing was run"
    )


Resolve = Callable[[str, str], Any]


# A subclass is pickle's only way to decide which names a stream may use.
class _Restricted(pickle.Unpickler):
    def __init__(self, stream: BinaryIO, resolve: Resolve) -> None:
        super().__init__(stream, encoding="bytes")
        self.resolve = resolve

    def find_class(self, module: str, name: str, /) -> Any:
        return self.resolve(module, name)


def _check_opcodes(stream: BinaryIO, newest: int) -> None:
    """Refuse damaged lengths, and opcodes of protocols that the data set does not use.

    With a damaged length of a byte array of protocol 5 the interpreter would write to stderr.
    """
    for opcode, _, position in pickletools.genops(stream):
        if opcode.proto > newest:
            raise DataError(
                f"opcode {opcode.name} of pickle protocol {opcode.proto} at byte {position}; "
                f"allowed: protocols up to {newest}"
            )


def _open(path: Path) -> BinaryIO:
    return path.open("rb")


def load(
    path: Path,
    resolve: Resolve = _resolve,
    opened: Callable[[Path], BinaryIO] = _open,
    protocol: int = PROTOCOL,
) -> Any:
    """What the file holds: dicts, lists, numbers, texts, bytes and `Array`s, nothing else.

    Texts of Python 2 come as bytes. `resolve` gives what stands for a name in the pickle, or raises
    `forbidden`; `opened` gives a stream that stands where the pickle starts; `protocol` is the
    newest one allowed.

    Raises DataError for an unreadable, oversized or damaged file, or a forbidden global in it.
    """
    try:
        if (size := os.path.getsize(path)) > LARGEST:
            raise DataError(f"{size:,} bytes; allowed: at most {LARGEST:,}")
        with opened(path) as stream:
            start = stream.tell()
            # Before loading: this pass only reads opcodes and makes no objects.
            _check_opcodes(stream, protocol)
            stream.seek(start)
            return _Restricted(stream, resolve).load()
    except DataError as error:
        raise damaged(path, str(error)) from error
    except OSError as error:
        raise damaged(path, f"cannot be read ({error.strerror or error})") from error
    # Malformed opcodes raise almost any exception; all of them mean a damaged file.
    except (Exception, MemoryError) as error:
        # Some of pickle's own messages run over two lines.
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise damaged(path, f"not a complete pickle ({reason})") from error
