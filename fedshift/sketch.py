"""Short representations of objects: a few lines even if their tensors are large.

Fields are shown by name, tensors by type and shape, long lists by their length.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

T = TypeVar("T")

# Limits: entries of a list, numbers of a tensor, and characters of any other representation.
FEW, SMALL, WIDE = 6, 12, 160


def sketched(kind: type[T]) -> type[T]:
    """Decorator of a dataclass or a named tuple: its repr is a short `Name(field=..., ...)`."""

    def in_short(made: Any) -> str:
        names = getattr(made, "_fields", None) or [f.name for f in fields(made) if f.repr]
        entries = ", ".join(f"{name}={sketch(getattr(made, name))}" for name in names)
        return f"{type(made).__name__}({entries})"

    kind.__repr__ = in_short  # type: ignore[method-assign]
    return kind


def sketch(value: Any) -> str:
    """One value, in a few words."""
    # Recognise tensors by attributes: importing torch would delay programs that only need weights.
    if hasattr(value, "tolist") and hasattr(value, "shape"):
        return _tensor(value)
    if hasattr(value, "named_parameters"):
        return f"{type(value).__name__} of {_counted(list(value.parameters()))}"
    if isinstance(value, Mapping):
        return _mapping(value)
    if isinstance(value, tuple | list) and not hasattr(value, "_fields"):
        return _sequence(value)
    text = repr(value)
    # Records have been shortened already, field by field.
    is_record = hasattr(value, "__dataclass_fields__") or hasattr(value, "_fields")
    return text if is_record or len(text) <= WIDE else f"{' '.join(text.split())[: WIDE - 3]}..."


def _tensor(value: Any) -> str:
    size, kind = list(value.shape), str(value.dtype).removeprefix("torch.")
    if value.ndim > 2 or _numbers(value) > SMALL:
        return f"{kind} {size}"
    try:
        return str(_rounded(value.tolist()))
    except RuntimeError:  # tensors within torch.func's transforms have no values to show
        return f"{kind} {size}"


def _rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _numbers(value: Any) -> int:
    return math.prod(value.shape)


def _mapping(value: Mapping[Any, Any]) -> str:
    """A few nested mappings by name; otherwise the number of values."""
    values = list(value.values())
    if len(values) <= FEW and values and all(isinstance(v, Mapping) for v in values):
        return "{" + ", ".join(f"{name}: {sketch(v)}" for name, v in value.items()) + "}"
    return f"{{{_counted(values)}}}"


def _sequence(value: Sequence[Any]) -> str:
    """Short sequences entry by entry; of long ones the first entries, or the number and kind."""
    long = len(value) > FEW
    if any(hasattr(v, "shape") or hasattr(v, "_fields") for v in value) or (
        long and any(hasattr(v, "__dataclass_fields__") for v in value)
    ):
        return f"({_counted(value)})"
    ends = ("[", "]") if isinstance(value, list) else ("(", ",)" if len(value) == 1 else ")")
    # Of a long sequence only the size of the numbers matters, not their last digits.
    first = [sketch(_rounded(v) if long else v) for v in value[:FEW]]
    more = f", ... {len(value) - FEW} more" if long else ""
    return ends[0] + ", ".join(first) + more + ends[1]


def _counted(values: Sequence[Any]) -> str:
    """`6 tensors, 1,234 numbers`, or `3 ClientData`."""
    if values and all(hasattr(v, "shape") for v in values):
        several = "s" if len(values) > 1 else ""
        return f"{len(values)} tensor{several}, {sum(map(_numbers, values)):,} numbers"
    kinds = {type(v).__name__ for v in values}
    return f"{len(values)} {kinds.pop() if len(kinds) == 1 else 'entries'}"
