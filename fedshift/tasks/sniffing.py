"""Finding out a CSV file's encoding, separator, header and decimal sign from its first lines."""

from __future__ import annotations

import csv
import gzip
import io
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fedshift.errors import DataError, InputError, nearest, shown
from fedshift.tasks.names import as_number, listed, many

# How many bytes, and how many lines of them, are looked at.
SAMPLE, LINES = 1 << 18, 200
# The line that names the columns is looked for in the first TITLE lines.
TITLE = 20
SEPARATORS = {",": "a comma", ";": "a semicolon", "\t": "a tab", "|": "a bar", " ": "a space"}
_POINT = re.compile(r"[+-]?\d+\.\d+", re.ASCII)
_COMMA = re.compile(r"[+-]?(\d+|\d{1,3}(\.\d{3})+),\d+", re.ASCII)
_GROUPS = re.compile(r"[+-]?\d{1,3}(\.\d{3})+(,\d+)?", re.ASCII)
# Groups of thousands with a decimal point, as in 1,234.50; 0,123 is not one of them.
_ENGLISH = re.compile(r"[+-]?[1-9]\d{0,2}(,\d{3})+(\.\d+)?", re.ASCII)


@dataclass(frozen=True)
class Format:
    """The format of a CSV file; header: names of its columns; first: lines above the data."""

    separator: str
    decimal: str
    thousands: str | None
    encoding: str
    header: tuple[str, ...]
    first: int

    @property
    def notes(self) -> list[str]:
        """A sentence if the format is unusual."""
        odd = [f"{SEPARATORS.get(self.separator, self.separator)} between columns"]
        odd = odd if self.separator != "," else []
        odd += ["a decimal comma"] if self.decimal == "," else []
        odd += ["commas between thousands"] if self.thousands == "," else []
        odd += (
            [f"{many(self.first - 1, 'line')} above the names of columns"] if self.first > 1 else []
        )
        odd += [f"encoding {self.encoding}"] if not self.encoding.startswith("utf-8") else []
        return [f"Read with {', '.join(odd)}."] if odd else []

    @property
    def options(self) -> dict[str, Any]:
        """The options of `pandas.read_csv` for this format."""
        return {
            "sep": self.separator,
            "decimal": self.decimal,
            "thousands": self.thousands,
            "encoding": self.encoding,
            "names": self.header,
            "header": None,
            "skiprows": self.first,
            "skipinitialspace": True,
            "index_col": False,
        }

    def number(self, text: str) -> float:
        """A text as a number, by the signs of this file; NaN if it is none."""
        groups = _ENGLISH if self.thousands == "," else _GROUPS
        if self.thousands and groups.fullmatch(text):
            text = text.replace(self.thousands, "")
        return as_number(text.replace(self.decimal, "."))


class Row(NamedTuple):
    """The cells of a row, and the number of the line on which it ends."""

    line: int
    cells: list[str]


def sniffed(
    path: Path,
    wanted: Sequence[str] = (),
    *,
    separator: str | None = None,
    decimal: str | None = None,
    encoding: str | None = None,
    header: Sequence[str] | None = None,
) -> Format:
    """The format of a file; arguments that are given are not guessed. wanted: required columns.

    Raises DataError for a file that cannot be read or is empty, that lacks a wanted column or has
    two columns of one name, and for lines of different lengths.
    """
    text, encoding = _decoded(path, encoding)
    for name, value, allowed in (("separator", separator, None), ("decimal", decimal, (".", ","))):
        if value is not None and (len(value) != 1 or (allowed and value not in allowed)):
            raise InputError(f'{name}="{shown(value)}": give one sign, as "," or None to find it')
    separator = separator or _separator(path, text, wanted)
    rows = _rows(path, text, separator)
    if not rows:
        raise DataError(f"{path} is empty; its first line must name the columns")
    at = 0 if header is not None else _header(rows, wanted)
    names = _names(rows[at].cells if header is None else header)
    cells = rows if header is not None else rows[at + 1 :]
    _check_names(path, names, wanted, rows[at].cells if header is None else None)
    if header is not None and (tuple(rows[0].cells) == names or _names_all(rows[0], wanted)):
        raise DataError(
            f"{path}, line {rows[0].line} names the columns, and header= is for files without such "
            "a line; leave header= out"
        )
    if not cells:
        raise DataError(f"{path} names columns and has no rows")
    for row in cells:
        if len(row.cells) != len(names):
            raise DataError(
                f"{path}, line {row.line}: {len(row.cells)} cells; the first line names "
                f"{len(names)} columns, with {SEPARATORS.get(separator, separator)} between them. "
                'If it is another sign, give separator="..."'
            )
    decimal, thousands = _decimal([row.cells for row in cells], separator, decimal)
    first = 0 if header is not None else rows[at].line
    return Format(separator, decimal, thousands, encoding, names, first)


def _decoded(path: Path, encoding: str | None) -> tuple[str, str]:
    """(the file's first lines, its encoding)."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            sample = file.read(SAMPLE)
    except FileNotFoundError:
        folder = path.parent
        beside = os.listdir(folder) if folder.is_dir() else []
        beside = [name for name in beside if name.endswith(path.suffix)]
        near = nearest(path.name, beside)
        raise DataError(f"there is no file {path}.{near}") from None
    except OSError as e:
        raise DataError(f"cannot read {path}: {e.strerror or e}") from None
    if sample.startswith((b"PK\x03\x04", b"\xd0\xcf\x11\xe0", b"PAR1")):
        cure = "read it with Task.from_parquet" if sample[:3] == b"PAR" else "save it as CSV"
        raise DataError(f"{path} is no CSV file but a packed table; {cure}")
    if not sample.strip():
        raise DataError(f"{path} is empty; its first line must name the columns")
    whole = len(sample) < SAMPLE
    if not whole:  # the last line may be cut
        sample = sample[: sample.rfind(b"\n") + 1] or sample
    if encoding is None and sample.startswith((b"\xff\xfe", b"\xfe\xff")):
        encoding = "utf-16"
    for name in (encoding,) if encoding else ("utf-8-sig", "cp1252"):
        try:
            text = sample.decode(name, errors="ignore" if name == "utf-16" else "strict")
        except (UnicodeDecodeError, LookupError):
            continue
        if "\0" not in text:
            return text, name
    raise DataError(
        f"{path} is not {encoding or 'text in UTF-8 or Windows-1252'}; give its "
        'encoding="...", or save it as UTF-8'
    )


def _rows(path: Path, text: str, separator: str) -> list[Row]:
    """The first rows that are not empty."""
    rows: list[Row] = []
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator)
    try:
        for cells in reader:
            if len(cells) > 1 or any(map(str.strip, cells)):
                rows.append(Row(reader.line_num, [cell.strip() for cell in cells]))
            if len(rows) > LINES:
                break
    except csv.Error as e:
        raise DataError(f"{path}, line {reader.line_num}: {shown(str(e), 100)}") from None
    return rows


def _header(rows: Sequence[Row], wanted: Sequence[str]) -> int:
    """The index of the row that names the columns: the first row, or one below a title."""
    for at, row in enumerate(rows[:TITLE]):
        if _names_all(row, wanted):
            return at
    return 0


def _names_all(row: Row, wanted: Sequence[str]) -> bool:
    """Whether the cells of a row are the wanted columns' names, and perhaps others."""
    return bool(wanted) and set(wanted) <= set(row.cells)


def _names(cells: Sequence[str]) -> tuple[str, ...]:
    texts = [str(cell).strip() for cell in cells]
    return tuple(text or f"unnamed: {i}" for i, text in enumerate(texts))


def _separator(path: Path, text: str, wanted: Sequence[str]) -> str:
    """The separator that gives the wanted columns, or else equal and long rows in most lines."""

    def quality(sign: str) -> tuple[int, float, int]:
        rows = [row.cells for row in _rows(path, text, sign)]
        cells, lines = Counter(map(len, rows)).most_common(1)[0] if rows else (1, 0)
        named = max((sum(name in row for name in wanted) for row in rows[:TITLE]), default=0)
        return (named, 0.0 if cells == 1 else lines / len(rows), cells)

    return max(SEPARATORS, key=quality)  # the first of equals


def _check_names(
    path: Path, names: tuple[str, ...], wanted: Sequence[str], first: Sequence[str] | None
) -> None:
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise DataError(
            f'{path}: {names.count(twice[0])} columns are named "{shown(twice[0])}"; give each its '
            "own name in the first line"
        )
    for name in wanted:
        if name not in names:
            data = first is not None and any(map(_is_number, first))
            cure = " Its first line looks like data: give header=[names of the columns]."
            raise DataError(
                f'{path} has no column "{shown(str(name))}"; it has {listed(names, 12)}.'
                f"{cure if data else nearest(str(name), names)}"
            )


def _is_number(cell: str) -> bool:
    return bool(re.fullmatch(r"[+-]?(\d+[.,]?\d*|[.,]\d+)([eE][+-]?\d+)?", cell.strip(), re.ASCII))


def _decimal(
    rows: Sequence[Sequence[str]], separator: str, decimal: str | None
) -> tuple[str, str | None]:
    """(the decimal sign, the sign between thousands or None)."""
    cells = [cell for row in rows for cell in row]
    english = any(map(_ENGLISH.fullmatch, cells))
    commas = any(_COMMA.fullmatch(cell) and not _ENGLISH.fullmatch(cell) for cell in cells)
    # 1.234 counts as a number with a decimal point, unless other cells have decimal commas.
    points = any(
        ("," in cell and "." in cell and _ENGLISH.fullmatch(cell))
        or (_POINT.fullmatch(cell) and not _GROUPS.fullmatch(cell))
        for cell in cells
    )
    if decimal is None:
        # Cells like 1,234 may be either. With semicolons between cells, commas are decimal.
        by_sign = english and separator == ";"
        decimal = "," if (commas or by_sign) and not points else "."
    if decimal == ",":
        return decimal, "." if any(map(_GROUPS.fullmatch, cells)) else None
    return decimal, "," if english and not commas else None
