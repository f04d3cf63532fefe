"""Read label counts and a target's label distribution from CSV; errors name the bad cell."""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedshift.errors import DataError, nearest, shown

# pandas calls a column without a name "Unnamed: 0".
CLIENT_COLUMN = ("", "client", "clients", "client name", "name", "id", "unnamed: 0")
LABEL_COLUMN = ("label", "class")
VALUE_COLUMN = ("value", "share", "mass", "probability", "count", "counts", "target", "n")
# Largest file in bytes; 100,000 clients with 100 labels take a tenth of it.
LARGEST = 1 << 28

# Stricter than float(): no "nan", "inf", "1_000" or digits of other scripts.
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)


@dataclass(frozen=True)
class Counts:
    """Label counts [M, K] with the names of the K classes and of the M clients."""

    classes: tuple[str, ...]
    clients: tuple[str, ...]
    counts: NDArray[np.float64]


@dataclass(frozen=True)
class _Line:
    number: int
    cells: tuple[str, ...]


def read_counts(path: Path) -> Counts:
    """The label counts of M clients: a header of K label names, then one row per client.

    A first column whose header is empty or one of `CLIENT_COLUMN` holds the clients' names;
    without it clients are named by their row, from 0. Raises `DataError` with file, line and
    column for a missing, empty or ragged file, doubled names, and every cell that is not a finite
    number >= 0.
    """
    header, rows = _table(path)
    # Names under another header raise "not a number", with a hint at the headers that are known.
    first = 1 if header.cells[0].lower() in CLIENT_COLUMN else 0
    classes = header.cells[first:]
    if not classes:
        raise DataError(f"{path}, line {header.number}: no label names after the client column")
    _refuse_doubled(path, "label", classes, [header.number] * len(classes))
    if not rows:
        raise DataError(f"{path}: a header and no rows; one row per client is needed")
    clients = tuple(r.cells[0] if first else str(i) for i, r in enumerate(rows))
    _refuse_doubled(path, "client", clients, [r.number for r in rows])
    counts = [
        [_number(path, row, j, header.cells[j]) for j in range(first, len(header.cells))]
        for row in rows
    ]
    return Counts(classes, clients, np.array(counts, dtype=np.float64))


def read_target(path: Path, classes: Sequence[str]) -> NDArray[np.float64]:
    """The target's mass per class [K] in the order of `classes`, as written (not normalised).

    Either one row under a header of the label names, in any order, or two columns, label and
    value, with or without a header. Every class must be given, a zero included: a label left out
    by mistake would otherwise count as zero. Raises `DataError` as `read_counts` does, and for
    labels that the counts do not have.
    """
    header, rows = _table(path)
    # A file of two columns is either (label, value) by row, or two labels over a row of numbers.
    if len(header.cells) == 2 and not _is_row(header, rows, classes):
        rows = rows if _names_columns(header) else [header, *rows]
        entries = [(r.cells[0], r.number, _number(path, r, 1, r.cells[0])) for r in rows]
        return _in_order(path, entries, classes)
    # A target copied from a table of counts has the column of client names, too, which is skipped
    # unless a label has this name.
    if header.cells[0].lower() in CLIENT_COLUMN and header.cells[0] not in classes:
        header = _Line(header.number, header.cells[1:])
        rows = [_Line(r.number, r.cells[1:]) for r in rows]
    if len(rows) != 1:
        raise DataError(
            f"{path}: {len(rows)} rows under the label names; a target is exactly one row, "
            "or two columns: label,value"
        )
    row = rows[0]
    entries = [
        (name, header.number, _number(path, row, j, name)) for j, name in enumerate(header.cells)
    ]
    return _in_order(path, entries, classes)


def _is_row(header: _Line, rows: list[_Line], classes: Sequence[str]) -> bool:
    """Whether two columns are two labels over one row of numbers, one maybe misspelled."""
    if len(rows) != 1:
        return False
    if set(header.cells) <= set(classes):
        return True
    # One label may be misspelled: then the error should name it, not ask for two columns.
    over_numbers = all(_NUMBER.fullmatch(cell) for cell in rows[0].cells)
    return over_numbers and not _NUMBER.fullmatch(header.cells[1]) and not _names_columns(header)


def _names_columns(header: _Line) -> bool:
    label, value = (c.lower() for c in header.cells)
    return label in LABEL_COLUMN and value in VALUE_COLUMN


def _in_order(
    path: Path, entries: list[tuple[str, int, float]], classes: Sequence[str]
) -> NDArray[np.float64]:
    for name, line, _ in entries:
        if name not in classes:
            raise DataError(
                f'{path}, line {line}: label "{shown(name)}" is not among the labels of the counts '
                f"({_some(classes)}).{nearest(name, classes)} If no client holds it, give the "
                "counts a column of zeros for it."
            )
    _refuse_doubled(path, "label", [e[0] for e in entries], [e[1] for e in entries])
    values = {name: value for name, _, value in entries}
    missing = [c for c in classes if c not in values]
    if missing:
        raise DataError(
            f'{path}: no value for label "{shown(missing[0])}" ({len(missing)} of {len(classes)} '
            "labels are missing); write 0 for a label that the target does not have"
        )
    return np.array([values[c] for c in classes], dtype=np.float64)


def _table(path: Path) -> tuple[_Line, list[_Line]]:
    lines = _lines(path)
    if not lines:
        raise DataError(f"{path} is empty; the first row must hold the label names")
    header, *rows = lines
    # In many countries spreadsheets write semicolons. The file is then a single column, and any
    # other message would mislead.
    if len(header.cells) == 1 and re.search(r"[;\t]", header.cells[0]):
        raise DataError(f"{path}, line {header.number}: columns must be separated by commas")
    for row in rows:
        if len(row.cells) != len(header.cells):
            raise DataError(
                f"{path}, line {row.number}: {len(row.cells)} cells; the first row has "
                f"{len(header.cells)}"
            )
    return header, rows


def _lines(path: Path) -> list[_Line]:
    try:
        # utf-8-sig: spreadsheets write a byte-order mark before the first name.
        with path.open(encoding="utf-8-sig", newline="") as file:
            # One character more than is allowed shows that a file is too long, without reading all
            # of it.
            text = file.read(LARGEST + 1)
            if len(text) > LARGEST:
                raise DataError(
                    f"{path}: more than {LARGEST >> 20} MB; counts are one row per client"
                )
            reader = csv.reader(io.StringIO(text, newline=""), strict=True)
            return [
                _Line(reader.line_num, tuple(cell.strip() for cell in cells))
                for cells in reader
                if any(cell.strip() for cell in cells)
            ]
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text (byte {error.start})") from error
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: {shown(str(error), 200)}") from error


def _number(path: Path, row: _Line, column: int, name: str) -> float:
    cell = row.cells[column]
    where = f'{path}, line {row.number}, column {column + 1} ("{shown(name)}")'
    if not _NUMBER.fullmatch(cell):
        hint = ' If this column holds client names, call it "client".' if column == 0 else ""
        if cell.endswith("%"):
            hint = " Leave out the percent sign: give numbers of examples, or shares as 0.5."
        raise DataError(f'{where}: "{shown(cell)}" is not a number; a number >= 0 is needed.{hint}')
    value = float(cell)
    if value < 0 or not np.isfinite(value):
        raise DataError(f"{where}: {shown(cell)} is out of range; a finite number >= 0 is needed")
    return value


def _refuse_doubled(path: Path, what: str, names: Sequence[str], lines: Sequence[int]) -> None:
    counts = Counter(names)
    for name, line in zip(names, lines, strict=True):
        if not name:
            raise DataError(f"{path}, line {line}: a {what} without a name")
        if counts[name] > 1:
            places = [
                str(number) for number, other in zip(lines, names, strict=True) if other == name
            ]
            where = f"line {line}" if len({*places}) == 1 else f"lines {', '.join(places[:5])}"
            raise DataError(
                f'{path}, {where}: {what} "{shown(name)}" is given {counts[name]} times; give each '
                "once"
            )


def _some(names: Sequence[str]) -> str:
    return ", ".join(shown(name) for name in names[:8]) + (", ..." if len(names) > 8 else "")
