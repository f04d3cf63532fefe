"""Every promise of docs/promises.md stands on its page, and its tests are there."""

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
    known = [c for c in cells if len(c) == 3 and c[0].endswith(".md")]
    return [(page, promise, re.findall(r"`([^`]+)`", tests)) for page, promise, tests in known]


def words(text: str) -> str:
    """The text with its line breaks taken away."""
    return " ".join(text.split())


@cache
def functions(name: str) -> frozenset[str]:
    """The functions of a file of tests."""
    tree = ast.parse((ROOT / "tests" / name).read_text())
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def broken(page: str, promise: str, tests: list[str]) -> str | None:
    """What is wrong with a row; None where nothing is."""
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
