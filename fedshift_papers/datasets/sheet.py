"""Columns of a spreadsheet: the first worksheet of an .xlsx file, or a CSV file.

An .xlsx file is a zip archive of XML parts (ECMA-376, part 1, section 18); of it, texts, numbers
and truth values are read, formulas by their stored result.
"""

from __future__ import annotations

import csv
import io
import re
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from fedshift.datasets.base import damaged
from fedshift.datasets.images import read_table

# The sheets read here hold some hundred rows; a part of more than 16 MB is a forged archive.
_LARGEST_PART = 1 << 24
_STRINGS = "xl/sharedStrings.xml"
_SHEET = re.compile(r"xl/worksheets/[^/]+\.xml")
_CELL = re.compile(r"([A-Z]{1,3})[0-9]+")


def read_sheet(raw: bytes, where: Path, columns: Sequence[str]) -> dict[str, list[str]]:
    """The named columns as text; the first row that is not empty holds the names.

    Whole numbers are written without a point: 1.0 gives "1". Rows without any value are left out.

    Raises DataError for a damaged archive, a part that is no XML or too large, and what
    `images.read_table` refuses.
    """
    return read_table(_as_csv(raw, where) if raw[:2] == b"PK" else raw, where, columns)


def _as_csv(raw: bytes, where: Path) -> bytes:
    try:
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            sheets = sorted(n for n in archive.namelist() if _SHEET.fullmatch(n))
            if not sheets:
                raise damaged(where, "holds no worksheet")
            texts = _texts(archive, where)
            rows = [
                _row(row, texts) for row in _part(archive, sheets[0], where).findall(".//{*}row")
            ]
    # RuntimeError: encrypted; NotImplementedError: a compression that Python does not know.
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError) as error:
        raise damaged(where, f"not a readable .xlsx file ({error})") from error
    except (ElementTree.ParseError, ValueError, IndexError) as error:
        raise damaged(where, f"its worksheet cannot be understood ({error})") from error
    rows = [row for row in rows if any(row)]
    # A note beside the table is none of its columns.
    width = len(rows[0]) if rows else 0
    out = io.StringIO()
    csv.writer(out).writerows(row[:width] for row in rows)
    return out.getvalue().encode("utf-8")


def _part(archive: zipfile.ZipFile, name: str, where: Path) -> ElementTree.Element:
    with archive.open(name) as stream:
        raw = stream.read(_LARGEST_PART + 1)
    if len(raw) > _LARGEST_PART:
        raise damaged(where, f"{name} holds more than {_LARGEST_PART:,} bytes")
    # Spreadsheets declare no entities; a file that does is made to fill the memory.
    if b"<!DOCTYPE" in raw:
        raise damaged(where, f"{name} has a document type declaration")
    return ElementTree.fromstring(raw)


def _texts(archive: zipfile.ZipFile, where: Path) -> list[str]:
    if _STRINGS not in archive.namelist():
        return []
    return [_text(entry) for entry in _part(archive, _STRINGS, where).findall("{*}si")]


def _text(element: ElementTree.Element) -> str:
    # Directly, or in runs of one format each; phonetic hints (rPh) are no part of the text.
    parts = [*element.findall("{*}t"), *element.findall("{*}r/{*}t")]
    return "".join(part.text or "" for part in parts)


def _row(row: ElementTree.Element, texts: list[str]) -> list[str]:
    """The row's cells as text; cells that are left out are empty."""
    cells: dict[int, str] = {}
    for cell in row.findall("{*}c"):
        place = _CELL.fullmatch(cell.get("r", ""))
        column = _number(place.group(1)) if place else max(cells, default=-1) + 1
        cells[column] = _value(cell, texts).strip()
    return [cells.get(column, "") for column in range(max(cells, default=-1) + 1)]


def _number(letters: str) -> int:
    """The column's number from 0: A, B, ..., Z, AA, ..."""
    number = 0
    for letter in letters:
        number = 26 * number + ord(letter) - ord("A") + 1
    return number - 1


def _value(cell: ElementTree.Element, texts: list[str]) -> str:
    kind, inline = cell.get("t", "n"), cell.find("{*}is")
    if inline is not None:
        return _text(inline)
    value = cell.findtext("{*}v") or ""
    if kind == "s":
        if not value.isdecimal():
            raise ValueError(f'a text is called "{value}"')
        return texts[int(value)]
    whole = kind == "n" and value and float(value).is_integer()
    return str(int(float(value))) if whole else value
