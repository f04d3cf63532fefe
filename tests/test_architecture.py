"""Which rooms may import which, and what none may know: ARCHITECTURE.md against the sources."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from fedshift import recipes
from fedshift.engine.backend_names import ONE_BY_ONE
from fedshift.experiments.engines import Engine
from support.sources import FILES, PACKAGE, nodes_of, place_of

# A module may import from its own group and from those named here.
CORE = {"tree", "seeds", "errors", "arguments", "real", "sketch"}
MAY = {
    "tree": {"errors", "arguments"},
    "arguments": {"errors", "real"},
    "calls": {"errors"},
    "real": {"errors"},
    "sketch": set(),
    "seeds": {"arguments"},
    "kernels": {"tree", "errors"},
    "examples": {"errors"},
    "data": CORE | {"kernels", "examples"},
    "randomness": {"kernels.torch_private"},
    "repeating": {"errors", "randomness"},
    "modules": {"errors", "arguments", "kernels.torch_private"},
    "model": CORE | {"modules", "kernels", "randomness", "repeating"},
    "outputs": CORE | {"model"},
    "estimate": {"errors", "arguments", "real", "sketch"},
    "files": {"errors"},
    "csv_counts": {"errors"},
    "client": CORE | {"data", "model", "kernels"},
    "server": CORE,
    "algorithms": CORE | {"data", "model", "outputs", "client", "server", "moved"},
    "recipes": CORE | {"data", "model", "client", "server", "algorithms", "models.made"},
    "router": CORE
    | {"data", "model", "client.origin", "algorithms.base", "shifts.measures", "server.cap"},
    "models": CORE,
    "moved": set(),
    "shifts": CORE | {"moved"},
    "holdout": CORE,
    "datasets": CORE | {"holdout", "moved", "plugins"},
    "engine": CORE
    | {"data", "model", "outputs", "randomness", "repeating", "client", "server"}
    | {"algorithms.base", "kernels"},
    "evaluation": CORE | {"data", "model", "randomness", "repeating", "server.prior"},
    "flower": CORE
    | {"data", "examples", "engine", "evaluation", "server", "algorithms.base", "repeating"}
    | {"router"},
    "pooled": CORE | {"data"},
    "tasks": CORE | {"calls", "data", "holdout", "datasets", "shifts", "diagnose", "diagnosis"},
    "errors": set(),
    "plugins": {"errors"},
    "audit": {"errors"},
    "diagnosis": {"files", "errors"},
    "verdict": {"diagnosis", "errors"},
    "diagnose": {"diagnosis", "verdict", "server", "errors", "real", "seeds"},
    "deploy": {"errors", "files", "flower", "record"},
    "record": {"errors", "files"},
    "report": {"diagnosis", "errors", "files", "record"},
    "testing": CORE | {"algorithms", "engine", "flower"},
}
# Whatever runs experiments and draws pages needs the library, and the library needs none of it.
LIBRARY = set(MAY) - {"deploy", "testing", "moved", "plugins", "diagnose", "diagnosis", "verdict"}
MAY |= {
    "experiments": LIBRARY - {"report"} | {"__version__"},
    "sweeps": {"errors", "files", "seeds", "recipes", "record", "report", "experiments", "tasks"}
    | {"engine.backend_names", "engine.choosing.loop_or_workers", "server.pals"},
    "fitting": LIBRARY | {"experiments", "sweeps"},
    "cli": LIBRARY
    | {"fedshift", "experiments", "sweeps", "fitting", "deploy", "diagnose", "diagnosis"}
    | {"plugins"},
    "papers": LIBRARY | {"experiments", "sweeps", "cli", "__version__"},
    "__main__": {"cli"},
    "__init__": (LIBRARY | {"fitting", "sweeps.table", "moved"}) - {"report"},
}


def rooms_table() -> list[tuple[list[str], list[str]]]:
    """(rooms, rooms that they must not import), by row of ARCHITECTURE.md's table."""
    text = (PACKAGE.parent / "ARCHITECTURE.md").read_text()
    rows = [line.split("|")[1:4] for line in text.splitlines() if line.startswith("| `")]
    return [(re.findall(r"`(\w+)/?`", row[0]), re.findall(r"[\w.]+", row[2])) for row in rows]


def test_rooms_do_not_know_what_the_table_says() -> None:
    rows = rooms_table()
    named = {room for rooms, _ in rows for room in rooms}
    assert named >= set(MAY) - {"__init__", "__main__"}
    for rooms, others in rows:
        assert others, rooms
        for other in others:
            assert other.split(".")[0] in MAY, other
            allowed = [room for room in rooms if {other, other.split(".")[0]} & MAY[room]]
            assert not allowed, other


def imported(source: str) -> set[str]:
    """`fedshift.x.y` for every import of the package in one module."""
    names: set[str] = set()
    for node in nodes_of(source):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "fedshift":
            bare = node.module == "fedshift"
            names |= {f"fedshift.{a.name}" for a in node.names} if bare else {node.module or ""}
        elif isinstance(node, ast.Import):
            names |= {a.name for a in node.names if a.name.startswith("fedshift")}
    return names


def breaches(path: Path, source: str) -> list[str]:
    group = path.relative_to(PACKAGE).with_suffix("").parts[0]
    faults = []
    for name in imported(source):
        inner = name.removeprefix("fedshift.")
        allowed = MAY[group] | {group}
        if inner.split(".")[0] not in allowed and inner not in allowed:
            faults.append(f"{path.name} imports {name}")
    return faults


def test_imports_point_inwards() -> None:
    assert [breach for path in FILES for breach in breaches(path, path.read_text())] == []


def test_the_import_rule_can_fail() -> None:
    engine = PACKAGE / "engine" / "run.py"
    assert breaches(engine, "from fedshift.algorithms.fedavg import FedAvg")
    assert breaches(PACKAGE / "tree.py", "import fedshift.data")


def test_the_core_does_not_know_papers() -> None:
    """Control: its entry points and the former names of its modules are texts."""
    texts = {name for name, source in SOURCES.items() if "fedshift.papers" in source}
    core = {name for name in texts if not name.startswith("fedshift.papers")}
    former = {"fedshift.datasets", "fedshift.shifts", "fedshift.moved"}
    assert core == {"fedshift.plugins"} | former


# What reads alone, without any lever of speed; how a job is done is a field of the job.
REFERENCE = ("algorithms/fedavg.py", "client/local.py", "data.py", "model.py")
LEVERS = re.compile(r"vmap|stack(ed|ing)|channels.last|client\.dense|dense/|engine")


def test_the_reference_path_reads_alone() -> None:
    """Control: the training loop of stacked clients names them."""
    for name in REFERENCE:
        assert not LEVERS.search((PACKAGE / name).read_text()), name
    assert LEVERS.search((PACKAGE / "engine/stacking/stacked.py").read_text())


# Those whose look in charts is listed, in the order of the alphabet; others have one by checksum.
LOOKS = (
    "afl balanced_softmax ccvr ccvr_target confree ditto fedadam fedala fedas "
    "fedavg fedavgft fedavgm fedbabu feddecorr feddisco feddisco_target feddisk "
    "feddrm feddrm_shared_head feddyn fedetf fedgela fedlc fedmedian fednova fedntd "
    "fedpac fedpals fedpals_joint fedper fedprox fedproxft fedrep fedrs fedsam "
    "fedsamft fedtrimmed fedvls fedyogi iwerm krum local_only made moon multikrum "
    "oracle rfa scaffold"
)
# Methods that are named elsewhere than in recipes: defaults and the demo's, and words that are
# names of methods as well (a rule that selects, a purpose of random draws).
NAMED = {
    "experiments/config/schema.py": {"fedavg"},
    "fitting/fit.py": {"fedavg"},
    "experiments/demo.py": {"fedavg", "oracle"},
    "experiments/selection.py": {"oracle"},
    "experiments/task/preparing.py": {"oracle"},
    "cli/results.py": {"oracle"},
    "report/selection.py": {"oracle"},
    # Looks that pages have had, and the weights of a diagnosis, which look like FedPALS.
    "report/looks.py": set(LOOKS.split()),
    "report/diagnosis_page.py": {"fedpals"},
    "models/made.py": {"made"},
    "server/confree.py": {"confree"},
}


def test_methods_are_known_by_name_in_recipes_alone() -> None:
    """Control: recipes name their own."""
    texts: dict[str, set[str]] = {}
    for path in FILES:
        names = {
            node.value
            for node in nodes_of(path.read_text())
            if isinstance(node, ast.Constant) and node.value in recipes.__all__
        }
        if names:
            texts[place_of(path)] = names
    beside = {p: n for p, n in texts.items() if not p.startswith(("recipes/", "papers/"))}
    assert beside == NAMED
    assert "feddrm" in texts["recipes/routed.py"]


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
    inner = path.relative_to(PACKAGE).with_suffix("")
    beside = path.name != "__init__.py" and any(path.parent.glob("*/__init__.py"))
    return str(inner if beside else inner.parent)


SOURCES = {name_of(path): path.read_text() for path in FILES}
FOLDERS = {name_of(path): folder_of(path) for path in FILES}


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


def test_every_room_has_its_rule() -> None:
    assert {path.relative_to(PACKAGE).with_suffix("").parts[0] for path in FILES} == set(MAY)


def floors(drawing: str) -> dict[str, int]:
    """The floor, from above, of each room in ARCHITECTURE.md's picture; without its comments."""
    lines = [re.findall(r"\w+", line[:50]) for line in drawing.splitlines()]
    return {room: i for i, words in enumerate(lines) for room in words if room in MAY}


def upwards(files: Mapping[str, set[str]], floor: Mapping[str, int]) -> set[tuple[str, str]]:
    """(room, a room above it from which it imports)."""
    pairs = {
        (a.split(".")[1], b.split(".")[1]) for a in files for b in files[a] if "." in a and "." in b
    }
    return {(a, b) for a, b in pairs if {a, b} <= floor.keys() and floor[b] < floor[a]}


def test_imports_never_point_to_a_higher_floor() -> None:
    """The picture has every folder. Controls: two imports that it forbids."""
    drawing = (PACKAGE.parent / "ARCHITECTURE.md").read_text().split("```")[1]
    floor = floors(drawing)
    assert floor.keys() >= {p.name for p in PACKAGE.iterdir() if (p / "__init__.py").is_file()}
    assert upwards(graph(SOURCES), floor) == set()
    odd = SOURCES | {"fedshift.tree": "def later():\n    from fedshift.engine.run import run"}
    assert upwards(graph(odd), floor) == {("tree", "engine")}
    odd = SOURCES | {"fedshift.experiments.claims": "from fedshift.report import looks"}
    assert upwards(graph(odd), floor) == {("experiments", "report")}


def test_an_engine_is_what_the_page_says() -> None:
    text = " ".join((PACKAGE.parent / "ARCHITECTURE.md").read_text().split())
    sentence = text[text.index("An engine plays the") :].partition(".")[0]
    members = {name for name in vars(Engine) if not name.startswith("_")}
    assert set(re.findall(r"`(\w+)`", sentence)) == members
    assert "rounds" in members


def test_the_engine_has_the_rooms_and_files_of_the_page() -> None:
    """But for modules of further backends, which their list names. Control: rooms are seven."""
    text = (PACKAGE.parent / "ARCHITECTURE.md").read_text()
    _, _, table = text.partition("| room of `engine/` |")
    rows, _, beside = table.partition("Files beside these rooms:")
    rooms = set(re.findall(r"^\| (\w+) \|", rows, re.M))
    files = set(re.findall(r"`(\w+)`", beside.partition("`tests/")[0]))
    folder = PACKAGE / "engine"
    assert rooms == {path.parent.name for path in folder.glob("*/__init__.py")}
    further = {made.partition(":")[0].rpartition(".")[2] for made in ONE_BY_ONE.values()}
    present = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    assert files <= present
    assert present - files <= further
    assert len(rooms) == 7


def test_flower_is_imported_where_the_page_says() -> None:
    """Control: it is imported there."""
    rooms = set[str]()
    for path in FILES:
        for node in nodes_of(path.read_text()):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(name.split(".")[0] == "flwr" for name in names):
                rooms.add(path.relative_to(PACKAGE).parts[0])
    text = " ".join((PACKAGE.parent / "ARCHITECTURE.md").read_text().split())
    sentence = text[text.index("Flower is imported in") :].partition(" only when asked for")[0]
    assert rooms == set(re.findall(r"`(\w+)/`", sentence))
