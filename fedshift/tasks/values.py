"""Cells that stand for numbers without being plain numbers: true and false, durations, marks.

A table is read alike, whether pandas has these types or a CSV file has them as text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from fedshift.errors import InputError, shown
from fedshift.tasks.names import as_number, plain

# Texts for a missing number, in addition to empty cells and those that pandas knows (NA, null).
MARKS = {"?", "-", "--", ".", "*", "missing", "unknown", "n.a.", "none", "nil"}
# The texts that pandas reads as booleans.
TRUTH = {"True": 1, "TRUE": 1, "true": 1, "False": 0, "FALSE": 0, "false": 0}
# Durations as pandas writes them: "2 days 01:30:00", "-1 days +23:00:00".
_DURATION = re.compile(r"-?\d+ days?( [+-]?\d{1,2}:\d{2}:\d{2}(\.\d+)?)?", re.ASCII)


def truth(text: str) -> float:
    """1 for "True", 0 for "False"; NaN for other texts."""
    return float(TRUTH.get(text, math.nan))


def seconds(text: str) -> float:
    """The seconds of a duration as pandas writes it; NaN for other texts."""
    import pandas as pd

    return float(pd.Timedelta(text).total_seconds()) if _DURATION.fullmatch(text) else math.nan


def reader_of(
    names: Sequence[str], number: Callable[[str], float] = as_number
) -> Callable[[str], float]:
    """The function that makes numbers of a column's texts: `truth`, `seconds` or `number`.

    >>> from fedshift.tasks.values import reader_of
    >>> reader_of(["False", "?"])("True"), reader_of(["1", "True"])("1")
    (1.0, 1.0)
    """
    given = [name for name in names if name.lower() not in MARKS]
    for read in (truth, seconds):
        if given and not any(math.isnan(read(name)) for name in given):
            return read
    return number


def alike(name: str) -> list[str]:
    """Other names of the same truth value, since "1" in one table is "True" in another."""
    value = TRUTH.get(name, as_number(name))
    return [str(value)[:1], *(t for t, v in TRUTH.items() if v == value)] if value in (0, 1) else []


def is_truth(values: Any) -> bool:
    """Whether a column of pandas or numpy has booleans, perhaps with missing values."""
    import pandas as pd

    kind = getattr(getattr(values, "dtype", None), "kind", "O")
    return kind == "b" or (kind == "O" and pd.api.types.infer_dtype(values) == "boolean")


def plain_column(name: str, values: Any) -> Any:
    """The values as a pandas column, with durations, booleans and decimals as numbers.

    Raises InputError for complex numbers.
    """
    import pandas as pd

    values = pd.Series(values).infer_objects()
    if values.dtype.kind == "m":
        return values.dt.total_seconds().to_numpy("float64", na_value=math.nan)
    kind = "complex" if values.dtype.kind == "c" else pd.api.types.infer_dtype(values)
    if kind == "boolean":
        return values.astype("boolean")
    if kind == "decimal":
        return values.astype("float64")
    if kind == "complex":
        raise InputError(
            f'column "{shown(name)}" holds complex numbers; give two columns, .real and .imag'
        )
    return values


def about_kind(name: str, values: Any) -> list[str]:
    """A sentence on a column of durations or dates."""
    import pandas as pd

    kind = pd.api.types.infer_dtype(plain(values))
    if kind in ("timedelta", "timedelta64"):
        return [in_seconds(name)]
    if kind in ("datetime", "datetime64", "date", "period"):
        return [about_dates(name)]
    return []


def about_dates(name: str) -> str:
    """The sentence on a column of dates."""
    return (
        f'Column "{shown(name)}" holds dates, which count as names; give numbers, such as '
        ".dt.year, to learn from time."
    )


def about_kinds(frame: Any) -> tuple[str, ...]:
    """The sentences of `about_kind` on the columns of a DataFrame."""
    return tuple(note for name in frame for note in about_kind(str(name), frame[name]))


def in_seconds(name: str) -> str:
    """The sentence on a column of durations."""
    return f'Column "{shown(name)}" holds durations, which count in seconds.'
