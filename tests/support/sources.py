"""The package's files and their syntax trees, for tests that read the source."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "fedshift"
BESIDE = ("fedshift_papers", "fedshift_deploy")
CORE = sorted(PACKAGE.rglob("*.py"))
FILES = CORE + sorted(path for name in BESIDE for path in (PACKAGE.parent / name).rglob("*.py"))


@cache
def nodes_of(source: str) -> tuple[ast.AST, ...]:
    """All nodes of a file; the whole package is parsed once, as parsing costs most here."""
    return tuple(ast.walk(ast.parse(source)))


def place_of(path: Path) -> str:
    """Its path in the core, as engine/run.py, or in a package beside it: fedshift_papers/cli.py."""
    inside = path.is_relative_to(PACKAGE)
    return path.relative_to(PACKAGE if inside else PACKAGE.parent).as_posix()
