"""Who may import whom, how long files and functions may be, and what may not be written."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "fedshift"
FILES = sorted(PACKAGE.rglob("*.py"))
# A module may import from its own group and from those named here.
CORE = {"tree", "seeds", "errors", "arguments", "real", "sketch"}
MAY = {
    "tree": {"errors", "arguments"},
    "arguments": {"errors", "real"},
    "real": {"errors"},
    "sketch": set(),
    "seeds": {"arguments"},
    "layout": {"errors"},
    "examples": {"errors"},
    "data": CORE | {"layout", "examples"},
    "pooling": set(),
    "stateless": {"tree", "errors"},
    "randomness": set(),
    "repeating": {"errors", "randomness"},
    "modules": {"errors", "arguments"},
    "model": CORE | {"modules", "pooling", "randomness", "repeating", "stateless"},
    "first_look": CORE | {"model", "randomness", "repeating", "stateless"},
    "outputs": CORE | {"model"},
    "estimate": {"errors", "arguments", "real", "sketch"},
    "files": {"errors"},
    "client": CORE | {"data", "model"},
    "server": CORE,
    "algorithms": CORE | {"data", "model", "outputs", "client", "server"},
    "recipes": CORE | {"data", "model", "client", "server", "algorithms", "models.made"},
    "router": CORE | {"data", "model", "client.origin", "algorithms.base"},
    "models": CORE,
    "shifts": CORE,
    "holdout": CORE,
    "datasets": CORE | {"holdout"},
    "engine": CORE
    | {"data", "model", "first_look", "outputs", "randomness", "repeating", "client", "server"}
    | {"algorithms.base"},
    "flower": CORE | {"data", "examples", "engine", "server", "algorithms.base", "repeating"},
    "diagnose": {"diagnosis", "verdict", "server", "errors", "real", "seeds"},
}


def imported(tree: ast.AST) -> set[str]:
    """`fedshift.x.y` for every import of the package in a module."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "fedshift":
            bare = node.module == "fedshift"
            names |= {f"fedshift.{a.name}" for a in node.names} if bare else {node.module or ""}
        elif isinstance(node, ast.Import):
            names |= {a.name for a in node.names if a.name.startswith("fedshift")}
    return names


def breaches(path: Path, source: str) -> list[str]:
    group = path.relative_to(PACKAGE).with_suffix("").parts[0]
    if group not in MAY:
        return []
    found = []
    for name in imported(ast.parse(source)):
        inner = name.removeprefix("fedshift.")
        allowed = MAY[group] | {group}
        if inner.split(".")[0] not in allowed and inner not in allowed:
            found.append(f"{path.name} imports {name}")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_inwards(path: Path) -> None:
    assert not breaches(path, path.read_text())


def test_the_import_rule_can_fail() -> None:
    engine = PACKAGE / "engine" / "rounds.py"
    assert breaches(engine, "from fedshift.algorithms.fedavg import FedAvg")
    assert breaches(PACKAGE / "tree.py", "import fedshift.data")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_files_and_functions_are_short(path: Path) -> None:
    source = path.read_text()
    assert len(source.splitlines()) <= 350
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            docs = ast.get_docstring(node, clean=False) or ""
            length = (node.end_lineno or 0) - node.lineno + 1 - len(docs.splitlines())
            assert length <= 40, f"{node.name} has {length} lines"


def test_no_pickle_and_no_global_generator() -> None:
    """Bytes from elsewhere never reach pickle; the one unpickler that exists admits no object.

    What `engine/wire.py` reads, another process of the same program wrote (test_no_pickle.py).
    """
    for path in FILES:
        if path.name == "safe_pickle.py":
            continue
        banned = {"pickle.load", "pickle.loads", "torch.load"}
        banned -= {"pickle.loads"} if path.as_posix().endswith("fedshift/engine/wire.py") else set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                dotted = ast.unparse(node)
                assert dotted not in banned
                if dotted in {"torch.manual_seed", "np.random.seed", "random.seed"}:
                    assert path.name == "randomness.py"  # which puts them back


def test_public_functions_have_docstrings() -> None:
    for path in FILES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                assert ast.get_docstring(node), f"{path.name}: {node.name}"
