"""Rooms keep the budgets of lines in pyproject.toml; run as a script, this prints the table."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
BUDGETS: dict[str, int] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["fedshift"][
    "budgets"
]


def lines(room: str) -> int:
    """Lines of the Python files of a folder, or of one file."""
    place = ROOT / room
    files = [place] if place.is_file() else place.rglob("*.py")
    return sum(len(path.read_text().splitlines()) for path in files)


def test_rooms_keep_their_budgets() -> None:
    over = {room: lines(room) for room, most in BUDGETS.items() if lines(room) > most}
    assert over == {}, "shorten these rooms, or say in the change why a budget grows"
    assert all(lines(room) for room in BUDGETS), "a room that is not there"
    assert lines("fedshift") > lines("fedshift/engine") > 0


if __name__ == "__main__":
    for room, most in BUDGETS.items():
        print(f"{room:32} {lines(room):7,} of {most:7,}")
