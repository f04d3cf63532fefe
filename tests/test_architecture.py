"""Imports point inwards: the floors of ARCHITECTURE.md's picture, and no circles."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from support.sources import BESIDE, CORE, FILES, PACKAGE, nodes_of

PICTURE = (PACKAGE.parent / "ARCHITECTURE.md").read_text().split("```")[1]
ROOMS = {path.relative_to(PACKAGE).with_suffix("").parts[0] for path in CORE}


def used(source: str, modules: Collection[str]) -> set[str]:
    """The package's modules that a file imports, also where it only speaks of their types."""
    names: set[str] = set()
    for node in nodes_of(source):
        if isinstance(node, ast.ImportFrom) and node.module:
            for one in node.names:
                whole = f"{node.module}.{one.name}"
                names.add(whole if whole in modules else node.module)
        elif isinstance(node, ast.Import):
            names |= {one.name for one in node.names}
    return names & set(modules)


def graph(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """The imports of each module; sources by module."""
    return {name: used(source, sources) - {name} for name, source in sources.items()}


def by_folder(files: Mapping[str, set[str]], folders: Mapping[str, str]) -> dict[str, set[str]]:
    """The folders that each folder's files import from; a file beside all folders counts as one."""
    imports: dict[str, set[str]] = {folder: set() for folder in folders.values()}
    for name, others in files.items():
        imports[folders[name]] |= {folders[other] for other in others} - {folders[name]}
    return imports


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


def folder_of(path: Path) -> str:
    """Its folder; a file beside folders, as in engine/, is one of its own."""
    inner = path.relative_to(PACKAGE.parent).with_suffix("")
    beside = path.name != "__init__.py" and any(path.parent.glob("*/__init__.py"))
    return str(inner if beside else inner.parent)


SOURCES = {name_of(path): path.read_text() for path in FILES}
FOLDERS = {name_of(path): folder_of(path) for path in FILES}
INSIDE = {name: text for name, text in SOURCES.items() if name.split(".")[0] == "fedshift"}


def test_no_imports_in_circles() -> None:
    files = graph(SOURCES)
    assert not circle(files)
    assert not circle(by_folder(files, FOLDERS))


def test_circles_are_seen() -> None:
    """Controls: a circle of files, and one of folders whose files have none."""
    odd = SOURCES | {"fedshift.tree": "def later():\n    from fedshift.engine.run import run"}
    assert "fedshift.tree" in circle(graph(odd))
    files = {"a.one": {"b.one"}, "b.one": set[str](), "b.two": {"a.two"}, "a.two": set[str]()}
    assert not circle(files)
    assert circle(by_folder(files, {"a.one": "a", "a.two": "a", "b.one": "b", "b.two": "b"}))


def floors(drawing: str) -> dict[str, int]:
    """The floor, from above, of each room in ARCHITECTURE.md's picture; without its comments."""
    lines = [re.findall(r"\w+", line[:50]) for line in drawing.splitlines()]
    return {room: i for i, words in enumerate(lines) for room in words if room in ROOMS}


def upwards(files: Mapping[str, set[str]], floor: Mapping[str, int]) -> set[tuple[str, str]]:
    """(room, a room above it from which it imports)."""
    pairs = {
        (a.split(".")[1], b.split(".")[1]) for a in files for b in files[a] if "." in a and "." in b
    }
    return {(a, b) for a, b in pairs if {a, b} <= floor.keys() and floor[b] < floor[a]}


def test_imports_never_point_to_a_higher_floor() -> None:
    """The picture has every folder. Controls: two imports that it forbids."""
    floor = floors(PICTURE)
    assert floor.keys() >= {p.name for p in PACKAGE.iterdir() if (p / "__init__.py").is_file()}
    assert upwards(graph(INSIDE), floor) == set()
    odd = INSIDE | {"fedshift.tree": "def later():\n    from fedshift.engine.run import run"}
    assert upwards(graph(odd), floor) == {("tree", "engine")}
    odd = INSIDE | {"fedshift.experiments.claims": "from fedshift.report import looks"}
    assert upwards(graph(odd), floor) == {("experiments", "report")}


def test_the_engine_imports_the_protocol_alone() -> None:
    """It knows no method: what trains is an argument."""
    texts = [source for name, source in SOURCES.items() if name.startswith("fedshift.engine")]
    seen = {name for text in texts for name in re.findall(r"fedshift\.algorithms\.(\w+)", text)}
    assert len(seen) == 1


# What the packages beside the core import from it, other than names that docs/reference has:
# rooms of the outer half, and modules of others.
USES = {
    "fedshift_papers": {"cli", "datasets", "experiments", "record", "report", "sweeps", "shifts"}
    | {"__version__", "arguments", "csv_counts", "errors", "files", "recipes", "seeds", "sketch"}
    | {"algorithms.fedavg", "algorithms.weighing", "client.importance"}
    | {"client.local", "engine.backend_names", "server.combine"}
    | {"server.confree", "tree"}
    | {"engine.run", "server.pals"},
    "fedshift_deploy": {"cli", "experiments", "flower", "record", "tasks"}
    | {"arguments", "data", "datasets.base", "errors", "files", "holdout", "recipes", "tree"}
    | {"engine.checks.gate", "engine.checks.reply_bytes", "engine.preflight.method"}
    | {"engine.preflight.network", "engine.run", "engine.traffic", "evaluation.scores"}
    | {"server.cap", "server.prior", "shifts.target"},
}


def others_used(package: str, sources: Mapping[str, str]) -> set[str]:
    """What a package beside the core imports from it, less docs/reference and its list."""
    pages = (PACKAGE.parent / "docs/reference").glob("*.md")
    public = {name for page in pages for name in re.findall(r"^::: (\S+)", page.read_text(), re.M)}
    allowed = public | {f"fedshift.{name}" for name in USES[package]}
    names = {
        f"{node.module}.{alias.name}"
        for name, source in sources.items()
        for node in nodes_of(source)
        if name.split(".")[0] == package and isinstance(node, ast.ImportFrom)
        if (node.module or "").split(".")[0] == "fedshift"
        for alias in node.names
    }
    return {name for name in names if not any(f"{name}.".startswith(f"{a}.") for a in allowed)}


def test_packages_beside_the_core_import_public_names_and_few_others() -> None:
    """Control: a module that is not in the list."""
    assert set(USES) == set(BESIDE)
    for package in BESIDE:
        assert others_used(package, SOURCES) == set()
        odd = {f"{package}.odd": "from fedshift.kernels import allocator"}
        assert others_used(package, odd) == {"fedshift.kernels.allocator"}


def test_packages_beside_the_core_are_known_to_none() -> None:
    """Control: entry points and a client's default app are texts."""
    for package in BESIDE:
        (other,) = {*BESIDE} - {package}
        assert not [name for name in SOURCES if name.startswith(package) and other in SOURCES[name]]
        imports = re.compile(rf"(from|import) {package}\b")
        assert not [name for name, source in INSIDE.items() if imports.search(source)]
        assert package in INSIDE["fedshift.plugins"]
