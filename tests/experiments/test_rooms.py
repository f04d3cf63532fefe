"""The rooms of fedshift/experiments, and which may import from which."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import fedshift.experiments
from support.sources import FILES, PACKAGE

PLACE = Path(fedshift.experiments.__file__).parent
IMPORT = re.compile(r"^ *from fedshift\.experiments\.(\w+)(?:\.\w+)? import", re.M)


def rooms_of_the_page() -> list[str]:
    """From the innermost to the outermost, in the order of ARCHITECTURE.md's table."""
    text = (PACKAGE.parent / "ARCHITECTURE.md").read_text()
    table = text.partition("| room of `experiments/` |")[2].partition("\n\n")[0]
    return re.findall(r"^\| (\w+) \|", table, re.M)


ROOMS = rooms_of_the_page()
SOURCES = {
    str(path.relative_to(PLACE)): path.read_text() for path in FILES if path.is_relative_to(PLACE)
}


def outwards(sources: Mapping[str, str]) -> set[tuple[str, str]]:
    """(file, its imports from rooms further out); files beside rooms come last."""
    floor = {room: i for i, room in enumerate(ROOMS)}
    beside = floor["folder"] + 0.5
    return {
        (name, other)
        for name, source in sources.items()
        for other in IMPORT.findall(source)
        if floor.get(other, beside) > floor.get(name.split("/")[0], beside)
    }


def test_the_page_has_every_room() -> None:
    assert set(ROOMS) == {path.parent.name for path in PLACE.glob("*/__init__.py")}


def test_rooms_import_inwards() -> None:
    """Control: a task that reads a run's folder."""
    assert outwards(SOURCES) == set()
    odd = {
        "task/natural.py": "from fedshift.experiments.folder.model_file import read_parts",
        "selection.py": "from fedshift.experiments.folder.model_file import read_parts",
    }
    assert outwards(odd) == {("task/natural.py", "folder")}
