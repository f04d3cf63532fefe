"""Read real numbers that users give; text, True, dates and the like are never accepted."""

from __future__ import annotations

import math
from numbers import Integral
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedshift.errors import InputError, shown

# Kinds of arrays, by numpy's letter, that numpy would silently convert to numbers.
_NOT_REAL = {
    "b": "True and False",
    "S": "text",
    "U": "text",
    "c": "complex numbers",
    "M": "dates",
    "m": "spans of time",
    "V": "records",
}


def number(given: object) -> float:
    """A real number as a float. Everything else gives NaN, which no check of a range passes.

    Arrays and tensors without dimensions, Fractions and Decimals count as real numbers; text, True
    and False, complex numbers and other arrays do not.
    """
    kind = getattr(getattr(given, "dtype", None), "kind", "f")
    if isinstance(given, str | bytes | bytearray | bool) or kind in _NOT_REAL:
        return math.nan
    # float() accepts an array of one element, which is more likely a mistake.
    if getattr(given, "shape", ()) != ():
        return math.nan
    try:
        # A huge Decimal becomes inf: refuse it, but accept a real infinity.
        value = float(given)  # type: ignore[arg-type]
        return math.nan if math.isinf(value) and given != value else value
    except (TypeError, ValueError, OverflowError, ArithmeticError):
        return math.nan


def is_whole(given: object) -> bool:
    """Whether it is an integer, also numpy's; True and False are not."""
    return isinstance(given, Integral) and not isinstance(given, bool)


def described(given: object) -> str:
    """A value as text for a message, shortened, however large it is."""
    try:
        return shown(repr(given))
    except ValueError:  # Python writes no integer of more than some 4,300 digits
        return "a number beyond all bounds"


def numbers(given: ArrayLike) -> NDArray[np.float64]:
    """An array of float64 of any shape. Raises ValueError with the entry that is no number.

    Infinite and NaN entries are accepted: the caller can refuse them with a better message.
    """
    if isinstance(given, np.ma.MaskedArray) and np.ma.is_masked(given):
        # asarray would return the numbers under the mask as if they were data.
        raise ValueError("some entries are masked; fill them in, as with .filled(0)")
    try:
        array = np.asarray(given)
    except (TypeError, RuntimeError, OverflowError) as error:
        raise ValueError(str(error)) from error
    except ValueError as error:
        raise ValueError("its rows differ in length") from error
    if array.dtype.kind in _NOT_REAL:
        raise ValueError(f"it holds {_NOT_REAL[array.dtype.kind]}")
    if array.dtype.kind == "O":  # None, Fraction, Decimal, huge integers
        return _from_objects(array)
    with np.errstate(over="ignore"):
        return array.astype(np.float64, copy=False)


def label_numbers(given: ArrayLike) -> NDArray[np.float64]:
    """`numbers` of one entry per label. Raises ValueError as it does, and by `disordered`."""
    if wrong := disordered(given):
        raise ValueError(wrong)
    return numbers(given)


def disordered(given: object) -> str:
    """What is wrong with a pandas Series whose labels do not ascend; else "".

    `value_counts` gives such a one. Taken by place, its entries would be those of other labels.
    """
    index: Any = getattr(given, "index", None)
    if not hasattr(given, "to_numpy") or getattr(index, "is_monotonic_increasing", True):
        return ""
    labels = ", ".join(described(label) for label in list(index)[:3])
    return (
        f"it is a Series with its labels in the order {labels}; give it .sort_index(), or "
        ".to_numpy() if that is the order of the classes"
    )


def check_labels(**given: object) -> None:
    """Raise InputError if DataFrames (by column) and Series (by index) name labels differently.

    Numbers are taken by place. Those without names, and the default ones 0, 1, ..., fit any others.
    """
    first: tuple[str, list[Any]] | None = None
    for name, value in given.items():
        index: Any = getattr(value, "columns", getattr(value, "index", None))
        if not hasattr(value, "to_numpy") or index is None:
            continue
        labels = list(index)
        if first is None:
            first = name, labels
        elif labels != first[1]:
            unnamed = any(one == list(range(len(one))) for one in (labels, first[1]))
            if set(labels) == set(first[1]) or not unnamed:
                raise InputError(
                    f"{name} has the labels {described(labels)} and {first[0]} has "
                    f"{described(first[1])}; give both the same labels in the same order, as by "
                    ".reindex(), or .to_numpy() of both"
                )


def _from_objects(array: NDArray[Any]) -> NDArray[np.float64]:
    values = np.array([number(x) for x in array.flat], dtype=np.float64)
    for value, x in zip(values.tolist(), array.flat, strict=True):
        if math.isnan(value) and not (isinstance(x, float) and math.isnan(x)):
            raise ValueError(f"{described(x)} is no number that a float can hold")
    return values.reshape(array.shape)
