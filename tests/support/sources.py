"""The package's files and their syntax trees, for tests that read the source."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "fedshift"
FILES = sorted(PACKAGE.rglob("*.py"))


@cache
def nodes_of(source: str) -> tuple[ast.AST, ...]:
    """All nodes of a file; the whole package is parsed once, as parsing costs most here."""
    return tuple(ast.walk(ast.parse(source)))


def place_of(path: Path) -> str:
    """Its path in the package, as engine/run.py."""
    return path.relative_to(PACKAGE).as_posix()
