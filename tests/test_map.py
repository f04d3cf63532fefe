"""What ARCHITECTURE.md and CONTRIBUTING.md name is there: files, targets of make, fields."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from fedshift.algorithms.fedavg import FedAvg
from support.sources import PACKAGE

ROOT = PACKAGE.parent
MAP, GUIDE = ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md"
# Names for what a reader makes, files of runs, and folders outside of the repository.
ELSEWHERE = {"fedshift/algorithms/NAME.py", "build/site", "../shared/data", "../ARCHITECTURE.md"}
ELSEWHERE |= {"checkpoints/", "states/", "candidates/", "part/name", "torch.func"}


def missing(page: Path) -> set[str]:
    """Names of files in backticks that are nowhere in the repository."""
    text = page.read_text()
    names = set(re.findall(r"`([\w.\-/]+)`", text)) | set(re.findall(r"[\w/]+\.py", text))
    files = {n for n in names if re.search(r"/|\.(py|md|txt|lock)$", n) and not n.isdigit()}
    paths = [
        p.relative_to(ROOT).as_posix()
        for p in ROOT.rglob("*")
        if not {".venv", ".git"} & {*p.parts}
    ]
    ends = {path[i:] for path in paths for i in range(len(path)) if not i or path[i - 1] == "/"}
    return {n for n in files - ELSEWHERE if n.strip("/") not in ends and not n.startswith("..")}


@pytest.mark.parametrize("page", [MAP, GUIDE], ids=lambda page: page.stem)
def test_every_file_that_is_named_is_there(page: Path, tmp_path: Path) -> None:
    assert missing(page) == set()
    odd = tmp_path / "odd.md"
    odd.write_text("`engine/tower.py`, `engine/run.py` and `docs/`")
    assert missing(odd) == {"engine/tower.py"}


def test_every_target_of_make_is_there() -> None:
    targets = set(re.findall(r"^([\w -]+):", (ROOT / "Makefile").read_text(), re.M))
    named = set(re.findall(r"`make ([\w-]+)", GUIDE.read_text()))
    assert named <= {one for line in targets for one in line.split()}
    assert "test" in named


def test_the_constructor_that_is_shown_has_the_fields_of_fedavg() -> None:
    shown = re.search(r"`FedAvg\(([^`]*)\)`", MAP.read_text())
    assert shown is not None
    assert [one.split("=")[0].strip() for one in shown[1].split(",")] == [
        f.name for f in fields(FedAvg)
    ]
