"""results/house.md: its rooms, its sums, and cells that nothing has measured yet."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest

from support.benchmark_files import load_benchmark
from support.sources import FILES, place_of

ROOT = Path(__file__).parents[2]


@pytest.fixture
def house(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The program that writes the page."""
    return load_benchmark("house.py", monkeypatch)


def numbers(row: str) -> list[int]:
    """The whole numbers in a row of a table, from its second cell on."""
    cells = [cell.strip().replace(",", "") for cell in row.split("|")[2:-1]]
    return [int(cell) for cell in cells if cell.isdigit()]


def test_every_file_is_in_one_room(house: ModuleType) -> None:
    rooms = {place_of(path): house.room_of(place_of(path)) for path in FILES}
    assert rooms["papers/protocols/study.py"] == "papers"
    assert rooms["client/dense/nets.py"] == "client/dense"
    assert rooms["client/local.py"] == "client"
    assert {"tasks", "fitting", "sweeps"} <= set(rooms.values())
    lines = house.lines_by_room({"fedshift/tree.py": "a\nb\n", "fedshift/client/local.py": "c\n"})
    assert (lines["tree, seeds, errors, files"], lines["client"], sum(lines.values())) == (2, 1, 3)


def test_the_pages_sums_are_those_of_its_rooms(house: ModuleType) -> None:
    """Of both commits; what rooms have grown by, and new ones, make the difference."""
    text = (ROOT / "results" / "house.md").read_text()
    rows = {line.split("|")[1].strip(): numbers(line) for line in text.splitlines() if "|" in line}
    rooms = [rows[room.name][-2:] for room in house.ROOMS]
    assert [sum(column) for column in zip(*rooms, strict=True)] == rows["lines of the package"]
    core = rows["of them core"]
    assert core[1] + rows["of them papers"][1] == rows["lines of the package"][1]
    grew = re.findall(r"^- ([\d,]+) lines", text, re.M)
    assert sum(int(one.replace(",", "")) for one in grew) == core[1] - core[0]


def test_what_is_not_measured_says_so(house: ModuleType) -> None:
    assert house.cell(None) == "not measured"
    table = (
        "| W1 | loop | a1 | b2 | 9 | 0.989 | 1 to 2 |\n| W5 | dense | a1 | b2 | 5 | 1.1 | 1 to 2 |"
    )
    rows = house.ratios(table)
    assert list(rows.values()) == [[1, 0.989], [1, 1.1]]
    assert ["W1, loop" in row or "W5, dense" in row for row in rows] == [True, True]
    assert house.with_given({"W4": [1, None]}, ["W4=-,0.98"]) == {"W4": [None, 0.98]}
    with pytest.raises(SystemExit, match="NAME=BEFORE,NOW"):
        house.with_given({}, ["W4=1"])
    source = "def f(a: Config): pass\ndef g(b: Section): pass"
    assert house.takers_of_config({"a.py": source}) == 1
