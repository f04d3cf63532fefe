"""Spreadsheets: the cells that are read, and archives that are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fedshift_papers.datasets.sheet import read_sheet
from support.dataset_fixtures import refuses
from support.site_fixtures import OPEN, write_parts, write_xlsx

SHEET = "xl/worksheets/sheet1.xml"


@pytest.mark.parametrize("inline", [False, True])
def test_sheets_with_shared_and_inline_texts_are_read_alike(tmp_path: Path, inline: bool) -> None:
    rows = [("a", "b c"), ("one", 1), (), ("two & a half".replace("&", "&amp;"), 2.5), ("", 3.0)]
    path = write_xlsx(tmp_path / "sheet.xlsx", rows, inline)
    read = read_sheet(path.read_bytes(), path, ("b c", "a"))
    assert read == {"b c": ["1", "2.5", "3"], "a": ["one", "two & a half", ""]}


def test_cells_may_be_left_out_and_lie_in_any_column(tmp_path: Path) -> None:
    cells = '<row r="1"><c r="B1" t="str"><v>a</v></c><c r="AA1" t="str"><v>b</v></c></row>'
    cells += '<row r="2"><c r="AA2" t="b"><v>1</v></c></row>'
    sheet = {"xl/worksheets/sheet1.xml": f'<s:x xmlns:s="{OPEN}" xmlns="{OPEN}">{cells}</s:x>'}
    path = write_parts(tmp_path / "sheet.xlsx", sheet)
    assert read_sheet(path.read_bytes(), path, ("b", "a")) == {"b": ["1"], "a": [""]}


CASES: dict[str, Callable[[Path], object]] = {
    "not a CSV file": lambda path: path.write_bytes(b"\xff\xfe\x00"),
    "has no column a; it has b": lambda path: write_xlsx(path, [("b",), (1,)]),
    "has no rows": lambda path: write_xlsx(path, [("a",)]),
    "has no column a; it has none": lambda path: write_xlsx(path, []),
    "not a readable .xlsx file": lambda path: path.write_bytes(path.read_bytes()[:300]),
    "holds no worksheet": lambda path: write_parts(path, {"xl/workbook.xml": "<a/>"}),
    "its worksheet cannot be understood (mismatched": lambda path: write_parts(
        path, {SHEET: "<a><b></a>"}
    ),
    "its worksheet cannot be understood (list index": lambda path: write_parts(
        path, {SHEET: '<a><row><c t="s"><v>3</v></c></row></a>'}
    ),
    'its worksheet cannot be understood (a text is called "-1")': lambda path: write_parts(
        path, {SHEET: '<a><row><c t="s"><v>-1</v></c></row></a>'}
    ),
    "its worksheet cannot be understood (could not convert": lambda path: write_parts(
        path, {SHEET: "<a><row><c><v>one</v></c></row></a>"}
    ),
    f"{SHEET} has a document type declaration": lambda path: write_parts(
        path, {SHEET: '<!DOCTYPE a [<!ENTITY b "bbbb">]><row>&b;</row>'}
    ),
    f"{SHEET} holds more than 16,777,216 bytes": lambda path: write_parts(
        path, {SHEET: " " * (1 << 24)}
    ),
}


@pytest.mark.parametrize("message", CASES)
def test_damaged_spreadsheets_are_refused(tmp_path: Path, message: str) -> None:
    path = write_xlsx(tmp_path / "sheet.xlsx", [("a",), (1,)])
    assert read_sheet(path.read_bytes(), path, ("a",)) == {"a": ["1"]}
    CASES[message](path)
    with refuses(path, message):
        read_sheet(path.read_bytes(), path, ("a",))
