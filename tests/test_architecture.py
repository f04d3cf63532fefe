"""Who may import whom, how long files and functions may be, and what may not be written."""

from __future__ import annotations

import ast
from collections.abc import Collection, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from fedshift import recipes

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
    "moved": set(),
    "shifts": CORE | {"moved"},
    "holdout": CORE,
    "datasets": CORE | {"holdout", "moved", "plugins"},
    "engine": CORE
    | {"data", "model", "first_look", "outputs", "randomness", "repeating", "client", "server"}
    | {"algorithms.base"},
    "flower": CORE | {"data", "examples", "engine", "server", "algorithms.base", "repeating"},
    "pooled": CORE | {"data"},
    "errors": set(),
    "plugins": {"errors"},
    "audit": {"errors"},
    "diagnosis": {"errors"},
    "verdict": {"diagnosis", "errors"},
    "diagnose": {"diagnosis", "verdict", "server", "errors", "real", "seeds"},
    "deploy": {"errors", "files", "flower"},
    "report": {"diagnosis", "errors", "files"},
    "testing": CORE | {"algorithms", "engine", "flower"},
}
# Whatever runs experiments and draws pages needs the library, and the library needs none of it.
LIBRARY = set(MAY) - {"deploy", "testing", "moved", "plugins", "diagnose", "diagnosis", "verdict"}
MAY |= {
    "experiments": LIBRARY | {"__version__"},
    "cli": LIBRARY | {"fedshift", "experiments", "deploy", "diagnose", "diagnosis", "plugins"},
    "papers": LIBRARY | {"experiments", "cli", "__version__"},
    "__main__": {"cli"},
    "__init__": LIBRARY - {"report"},
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


def test_the_core_does_not_know_papers() -> None:
    """Control: the plugins it ships with, and former places of what is there now, are texts."""
    texts = {name for name, source in SOURCES.items() if "fedshift.papers" in source}
    core = {name for name in texts if not name.startswith("fedshift.papers")}
    places = ("heart", "iwildcam", "pacs", "retina")
    former = {"fedshift.datasets", "fedshift.shifts", *(f"fedshift.datasets.{p}" for p in places)}
    assert core == {"fedshift.plugins"} | former


# Methods that are named elsewhere than in recipes: defaults and the demo's, and words that are
# names of methods as well (a rule that selects, a purpose of random draws).
NAMED = {
    "experiments/config.py": {"fedavg"},
    "experiments/demo.py": {"fedavg", "oracle"},
    "experiments/selection.py": {"oracle"},
    "experiments/task.py": {"oracle"},
    "cli/results.py": {"oracle"},
    "report/sections.py": {"oracle"},
    "models/made.py": {"made"},
    "server/confree.py": {"confree"},
}


def test_methods_are_known_by_name_in_recipes_alone() -> None:
    """Control: recipes name their own."""
    texts: dict[str, set[str]] = {}
    for path in FILES:
        found = {
            node.value
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Constant) and node.value in recipes.__all__
        }
        if found:
            texts[path.relative_to(PACKAGE).as_posix()] = found
    beside = {p: n for p, n in texts.items() if not p.startswith(("recipes/", "papers/"))}
    assert beside == NAMED
    assert texts["recipes/routed.py"] >= {"feddrm", "feddrm_shared_head"}


def used(source: str, modules: Collection[str]) -> set[str]:
    """The package's modules that a file imports, also where it only speaks of their types."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module:
            for one in node.names:
                whole = f"{node.module}.{one.name}"
                names.add(whole if whole in modules else node.module)
        elif isinstance(node, ast.Import):
            names |= {one.name for one in node.names}
    return names & set(modules)


def graph(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """By module, those that it imports; sources by module."""
    return {name: used(source, sources) - {name} for name, source in sources.items()}


def by_folder(files: Mapping[str, set[str]], folders: Mapping[str, str]) -> dict[str, set[str]]:
    """By folder, those that its files import from; a file beside all folders is one of its own."""
    found: dict[str, set[str]] = {folder: set() for folder in folders.values()}
    for name, others in files.items():
        found[folders[name]] |= {folders[other] for other in others} - {folders[name]}
    return found


def circle(arrows: Mapping[str, set[str]]) -> list[str]:
    """A way from a node back to itself; empty where there is none."""
    try:
        TopologicalSorter(arrows).prepare()
    except CycleError as e:
        return list(e.args[1])
    return []


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(
        ".__init__"
    )


SOURCES = {name_of(path): path.read_text() for path in FILES}
FOLDERS = {
    name_of(path): path.stem if path.parent == PACKAGE else str(path.parent.relative_to(PACKAGE))
    for path in FILES
}


def test_no_imports_in_circles() -> None:
    files = graph(SOURCES)
    assert not circle(files)
    assert not circle(by_folder(files, FOLDERS))


def test_circles_are_seen() -> None:
    """Controls: one of files, and one of folders whose files make none."""
    odd = SOURCES | {"fedshift.tree": "def later():\n    from fedshift.engine.rounds import run"}
    assert "fedshift.tree" in circle(graph(odd))
    files = {"a.one": {"b.one"}, "b.one": set[str](), "b.two": {"a.two"}, "a.two": set[str]()}
    assert not circle(files)
    assert circle(by_folder(files, {"a.one": "a", "a.two": "a", "b.one": "b", "b.two": "b"}))


def test_every_room_has_its_rule() -> None:
    assert {path.relative_to(PACKAGE).with_suffix("").parts[0] for path in FILES} == set(MAY)


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
