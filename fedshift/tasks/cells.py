"""What the cells of a CSV file say that its columns do not: lines cut short, words for no value."""

from __future__ import annotations

import csv
import gzip
import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fedshift.errors import DataError, shown
from fedshift.tasks.names import Coded, coded, listed
from fedshift.tasks.rows import Numbers
from fedshift.tasks.sniffing import Format

# So many bytes of a file are looked at together.
BLOCK = 1 << 20
# From here on float64 does not tell all whole numbers apart.
EXACT = float(1 << 53)


def check_lengths(path: Path, form: Format, n: int) -> None:
    """Raise DataError for the first line with fewer cells than the file of n rows has columns.

    pandas fills such a line with missing values, and a file that was cut off has one at its end.
    """
    opened = gzip.open if path.suffix == ".gz" else open
    if _separators(path, form, opened) == n * (len(form.header) - 1):
        return  # no row has more, so that each has all
    with opened(path, "rt", encoding=form.encoding, errors="replace", newline="") as file:
        lines = itertools.islice(file, form.first, None)
        reader = csv.reader(lines, delimiter=form.separator, skipinitialspace=True)
        try:
            for cells in reader:
                if len(cells) < len(form.header) and any(cell.strip() for cell in cells):
                    raise DataError(
                        f"{path}, line {form.first + reader.line_num}: {len(cells)} cells for "
                        f"{len(form.header)} columns; complete that line, or remove it"
                    )
        except csv.Error:  # pandas has read the file: what this reader minds is no fault
            return


def _separators(path: Path, form: Format, opened: Callable[..., Any]) -> int:
    """How many separators the rows have outside quotes; a hundredth of the time of a reader.

    Quotes within a cell may falsify it, and separators of several bytes make it 0.
    """
    sign = form.separator.encode()
    count, quoted = 0, np.uint8(0)
    with opened(path, "rb") as file:
        for _ in range(form.first):
            file.readline()
        while len(sign) == 1 and (block := file.read(BLOCK)):
            signs = np.frombuffer(block, dtype=np.uint8)
            at = signs == ord(sign)
            if quoted or b'"' in block:
                marks = (signs == ord('"')).view(np.uint8)
                marks[0] ^= quoted
                inside = np.bitwise_xor.accumulate(marks)
                at, quoted = at & (inside == 0), inside[-1]
            count += int(np.count_nonzero(at))
    return count


def about_words(path: Path, form: Format, name: str, column: Numbers | Coded) -> list[str]:
    """A sentence on texts such as "None" in a column, which count as missing values.

    In a column of labels or clients they may be meant as names.
    """
    import pandas as pd

    absent = column.codes < 0 if isinstance(column, Coded) else np.isnan(column)
    if not absent.any():
        return []
    raw = pd.read_csv(path, usecols=[name], dtype=str, keep_default_na=False, **form.options)
    words = Counter(text.strip() for text in raw[name][absent].fillna(""))
    if not (given := [word for word in words if word]):
        return []
    each = listed([f'"{shown(word)}" ({words[word]:,} rows)' for word in given])
    return [
        f'Column "{shown(name)}": {each} counts as a missing value; if it is meant as a name, '
        "write another in the file."
    ]


def exact_names(path: Path, form: Format, name: str, column: Numbers | Coded) -> Numbers | Coded:
    """A column of labels, as texts if numbers are so long that float64 would make some equal.

    For example codes of SNOMED CT, which have up to 18 digits.
    """
    import pandas as pd

    if isinstance(column, Coded) or not np.nanmax(np.abs(column), initial=0.0) >= EXACT:
        return column
    raw = pd.read_csv(path, usecols=[name], dtype=str, **form.options)
    return coded(raw[name])
