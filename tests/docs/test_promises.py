"""Every promise of docs/promises.md is on its page, and its tests exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "promises.md"


def rows(text: str) -> list[tuple[str, str, list[str]]]:
    """(page, promise, tests) of each row of the tables."""
    cells = [line.strip("|\n ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    complete = [c for c in cells if len(c) == 3 and c[0].endswith(".md")]
    return [(page, promise, re.findall(r"`([^`]+)`", tests)) for page, promise, tests in complete]


def words(text: str) -> str:
    """The text without its line breaks."""
    return " ".join(text.split())


@cache
def functions(name: str) -> frozenset[str]:
    """The functions of a file of tests."""
    tree = ast.parse((ROOT / "tests" / name).read_text())
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def broken(page: str, promise: str, tests: list[str]) -> str | None:
    """What is wrong with a row; None if nothing is."""
    if words(promise) not in words((ROOT / page).read_text()):
        return f"{page} no longer says: {promise}"
    if not tests:
        return f"no test for: {promise}"
    for test in tests:
        name, _, function = test.partition("::")
        if not function or function not in functions(name):
            return f"there is no {test}"
    return None


ROWS = rows(PAGE.read_text())


@pytest.mark.few(27)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[1][:40])
def test_promises_have_tests(row: tuple[str, str, list[str]]) -> None:
    assert broken(*row) is None


def test_a_broken_row_is_seen() -> None:
    page, promise, tests = ROWS[0]
    assert broken(page, promise + " not", tests)
    assert broken(page, promise, ["docs/test_promises.py::test_nothing"])
    assert broken(page, promise, [])


def test_the_whole_table_is_read() -> None:
    assert len(ROWS) == sum(".md | " in line for line in PAGE.read_text().splitlines())


THREATS = ROOT / "docs" / "threat-model.md"


def untested(text: str) -> list[str]:
    """Claims without a test, and missing tests."""
    cells = [line.strip("|\n ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    claims = [c for c in cells if len(c) == 2 and c[0] not in ("claim", "---")]
    faults = []
    for claim, tests in claims:
        names = re.findall(r"`([^`]+)`", tests)
        faults += [claim] if not names else []
        for name in names:
            file, _, function = name.partition("::")
            if not (ROOT / "tests" / file).is_file() or function not in functions(file):
                faults.append(name)
    return faults


def test_every_claim_of_the_threat_model_has_its_tests() -> None:
    text = THREATS.read_text()
    assert text.count("\n| claim | tests |") == text.count("\n## ") - 1 == 5
    assert untested(text) == []
    assert untested(text.replace("test_what_travels", "test_what_walks")) == [
        "algorithms/test_labelsets.py::test_what_walks"
    ]
    assert untested("| claim | tests |\n| nothing can happen | none |") == ["nothing can happen"]
