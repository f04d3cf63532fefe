"""Who may import whom, how long files and functions may be, and what may not be written."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from fedshift import recipes
from fedshift.experiments.engines import Engine
from support.sources import FILES, PACKAGE, nodes_of, place_of

TESTS = sorted(Path(__file__).parent.rglob("*.py"))
# Folders of tests/ beside those that have the name of a room.
NO_ROOMS = {"docs", "golden", "support"}
TEST_MODULES = {path.stem for path in TESTS if path.parent.name != "support"}
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
    | {"algorithms.base", "kernels", "moved"},
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
    "experiments": LIBRARY - {"report"} | {"__version__", "moved"},
    "sweeps": {"errors", "files", "seeds", "recipes", "record", "report", "experiments", "tasks"}
    | {"engine.ways", "engine.quicker", "server.pals"},
    "fitting": LIBRARY | {"experiments", "sweeps"},
    "cli": LIBRARY
    | {"fedshift", "experiments", "sweeps", "fitting", "deploy", "diagnose", "diagnosis"}
    | {"plugins"},
    "papers": LIBRARY | {"experiments", "sweeps", "cli", "__version__"},
    "__main__": {"cli"},
    "__init__": (LIBRARY | {"fitting", "sweeps.table"}) - {"report"},
}


@pytest.fixture(scope="module", autouse=True)
def forgotten() -> Iterator[None]:
    """The nodes take much memory, and what follows in this process is slower for it."""
    yield
    nodes_of.cache_clear()


def rooms_table() -> list[tuple[list[str], list[str]]]:
    """(rooms, those that they must not know), by row of ARCHITECTURE.md's table."""
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
    """`fedshift.x.y` for every import of the package in a module."""
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
    found = []
    for name in imported(source):
        inner = name.removeprefix("fedshift.")
        allowed = MAY[group] | {group}
        if inner.split(".")[0] not in allowed and inner not in allowed:
            found.append(f"{path.name} imports {name}")
    return found


def test_imports_point_inwards() -> None:
    assert [breach for path in FILES for breach in breaches(path, path.read_text())] == []


def test_the_import_rule_can_fail() -> None:
    engine = PACKAGE / "engine" / "run.py"
    assert breaches(engine, "from fedshift.algorithms.fedavg import FedAvg")
    assert breaches(PACKAGE / "tree.py", "import fedshift.data")


def test_the_core_does_not_know_papers() -> None:
    """Control: the plugins it ships with, and former places of what is there now, are texts."""
    texts = {name for name, source in SOURCES.items() if "fedshift.papers" in source}
    core = {name for name in texts if not name.startswith("fedshift.papers")}
    places = ("heart", "iwildcam", "pacs", "retina")
    former = {"fedshift.datasets", "fedshift.shifts", *(f"fedshift.datasets.{p}" for p in places)}
    assert core == {"fedshift.plugins"} | former


# What reads alone, without any lever of speed; how a job is done is a field of the job.
REFERENCE = ("algorithms/fedavg.py", "client/local.py", "data.py", "model.py")
LEVERS = re.compile(r"vmap|stack(ed|ing)|channels.last|client\.dense|dense/|engine")


def test_the_reference_path_reads_alone() -> None:
    """Control: the loop that stacked clients train by names them."""
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
        found = {
            node.value
            for node in nodes_of(path.read_text())
            if isinstance(node, ast.Constant) and node.value in recipes.__all__
        }
        if found:
            texts[place_of(path)] = found
    beside = {p: n for p, n in texts.items() if not p.startswith(("recipes/", "papers/"))}
    assert beside == NAMED
    assert texts["recipes/routed.py"] >= {"feddrm", "feddrm_shared_head"}


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
    """Controls: one of files, and one of folders whose files make none."""
    odd = SOURCES | {"fedshift.tree": "def later():\n    from fedshift.engine.run import run"}
    assert "fedshift.tree" in circle(graph(odd))
    files = {"a.one": {"b.one"}, "b.one": set[str](), "b.two": {"a.two"}, "a.two": set[str]()}
    assert not circle(files)
    assert circle(by_folder(files, {"a.one": "a", "a.two": "a", "b.one": "b", "b.two": "b"}))


def test_every_room_has_its_rule() -> None:
    assert {path.relative_to(PACKAGE).with_suffix("").parts[0] for path in FILES} == set(MAY)


def floors(drawing: str) -> dict[str, int]:
    """By room of ARCHITECTURE.md's picture, its floor from above; comments stand on the right."""
    lines = [re.findall(r"\w+", line[:50]) for line in drawing.splitlines()]
    return {room: i for i, words in enumerate(lines) for room in words if room in MAY}


def upwards(files: Mapping[str, set[str]], floor: Mapping[str, int]) -> set[tuple[str, str]]:
    """(room, room above it that it imports from)."""
    pairs = {
        (a.split(".")[1], b.split(".")[1]) for a in files for b in files[a] if "." in a and "." in b
    }
    return {(a, b) for a, b in pairs if {a, b} <= floor.keys() and floor[b] < floor[a]}


def test_imports_never_point_to_a_higher_floor() -> None:
    """Of the picture, which has every folder. Controls: two imports that it has no room for."""
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


def too_long(path: Path, source: str) -> list[str]:
    """The file, where it has more than 450 lines, and its functions of more than 40."""
    lines = len(source.splitlines())
    long = [f"{path.name} has {lines} lines"] if lines > 450 else []
    for node in nodes_of(source):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            docs = ast.get_docstring(node, clean=False) or ""
            length = (node.end_lineno or 0) - node.lineno + 1 - len(docs.splitlines())
            if length > 40:
                long.append(f"{path.name}: {node.name} has {length} lines")
    return long


def test_files_and_functions_are_short() -> None:
    assert [long for path in FILES for long in too_long(path, path.read_text())] == []


def test_long_files_and_functions_are_seen() -> None:
    body = "def f():\n" + "    pass\n" * 40
    for source in (body, f"async {body}"):
        assert too_long(PACKAGE / "a.py", source) == ["a.py: f has 41 lines"]
    assert too_long(PACKAGE / "a.py", "x = 1\n" * 451) == ["a.py has 451 lines"]


# Words of stories; a name of the package says what the value is, or what the function does.
OF_STORIES = {"found", "told", "held", "own", "known", "whoever", "nobody", "said"}
# Those that users write: fields, keys of messages, arguments; and what is left. Only to shrink.
STORIES_LEFT = {
    "algorithms/tuning.py": {"nobody", "said", "told"},
    "datasets/registry.py": {"found", "known"},
    "evaluation/scores.py": {"own"},
    "experiments/measures/served.py": {"own"},
    "flower/strategy.py": {"own"},
    "randomness.py": {"own"},
}


def names_given(source: str) -> set[str]:
    """The names that a file gives: to values, arguments, attributes, functions and classes."""
    names = set[str]()
    for node in nodes_of(source):
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.id if isinstance(node, ast.Name) else node.attr)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
    return names


def test_names_say_what_things_are() -> None:
    for path in FILES:
        left = STORIES_LEFT.get(path.relative_to(PACKAGE).as_posix(), set())
        assert names_given(path.read_text()) & OF_STORIES <= left, path
    source = "class A:\n    own: int\ndef known(told):\n    a.held = said = [x for found in y]"
    assert names_given(source) & OF_STORIES == OF_STORIES - {"whoever", "nobody"}


def imports_of_tests(source: str) -> set[str]:
    """The test files and conftests that a test file imports, by its lines: parsing takes long."""
    lines = " ".join(re.findall(r"^ *(?:from|import) (.*)", source, re.M))
    names = re.findall(r"[\w.]+", lines)
    return {name for name in names if name.rpartition(".")[2] in TEST_MODULES}


def folders(place: Path) -> set[str]:
    """The folders in a folder that hold files, other than compiled ones."""
    inner = (path.relative_to(place).parts for path in place.rglob("*.*") if path.is_file())
    return {parts[0] for parts in inner if len(parts) > 1 and "__pycache__" not in parts}


def test_tests_lie_in_folders_like_the_packages() -> None:
    """Every room has tests of its own, each module of them a name of its own, as pytest needs."""
    here = Path(__file__).parent
    assert folders(here) == folders(PACKAGE) | NO_ROOMS
    for room in folders(PACKAGE):
        assert any((here / room).glob("test_*.py")), room
    stems = [path.stem for path in TESTS if path.name.startswith("test_")]
    assert len(stems) == len(set(stems))


def test_no_test_file_imports_another() -> None:
    """What tests share lies in tests/support."""
    assert {path.name: odd for path in TESTS if (odd := imports_of_tests(path.read_text()))} == {}
    assert imports_of_tests("def late():\n    from test_core import x") == {"test_core"}
    assert imports_of_tests("import conftest") == {"conftest"}


def classes(source: str) -> dict[str, set[str]]:
    """By class, those that it inherits from; of other packages as `package.Name`."""
    nodes = nodes_of(source)
    foreign = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in nodes
        if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("fedshift")
        for alias in node.names
    }
    bases = {
        node.name: {ast.unparse(base).split("[")[0] for base in node.bases}  # no type arguments
        for node in nodes
        if isinstance(node, ast.ClassDef)
    }
    return {name: {foreign.get(one, one) for one in of} for name, of in bases.items()}


def concrete_bases(sources: Collection[str]) -> set[tuple[str, str]]:
    """(class, base) where the base is concrete; errors and sections of a configuration may be."""
    known = {name: bases for source in sources for name, bases in classes(source).items()}
    return {
        (name, base)
        for name, bases in known.items()
        for base in bases & known.keys()
        if not known[base] & {"abc.ABC", "typing.Protocol"}
        and not base.endswith(("Error", "Section"))
    }


def test_no_class_inherits_from_a_concrete_one() -> None:
    assert concrete_bases(SOURCES.values()) == set()
    assert concrete_bases(["class A: pass", "class B(A): pass"]) == {("B", "A")}


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


def private_replacements(source: str) -> list[str]:
    """The private names that a test file replaces: `_x`, alone or in a dotted name, not `__x__`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name)
        name = ast.unparse(node.func).rpartition(".")[2] if call else ""
        if name in ("setattr", "delattr", "__setattr__"):
            # The object and the name, or the dotted name; not the value that comes last.
            values = node.args[:2] if len(node.args) > 2 or name == "delattr" else node.args[:1]
            texts = (v.value if isinstance(v, ast.Constant) else ast.unparse(v) for v in values)
            parts = (part for text in texts for part in re.findall(r"[A-Za-z_]\w*", str(text)))
            found += [part for part in parts if re.match(r"_[a-zA-Z]", part)]
    return found


def test_no_test_replaces_a_private_name() -> None:
    """Tests look at results; what they may replace is the outside, and public names."""
    sources = {path.name: path.read_text() for path in TESTS if path != Path(__file__)}
    some = {name: text for name, text in sources.items() if "setattr" in text or "delattr" in text}
    assert {name: odd for name, text in some.items() if (odd := private_replacements(text))} == {}
    assert private_replacements('patch.setattr(module._Moved, "data", f)') == ["_Moved"]
    assert private_replacements('patch.setattr("fedshift.pool._answer", f)') == ["_answer"]
    assert not private_replacements('patch.setattr(sys, "argv", _words)')
    assert not private_replacements('patch.setattr(builtins, "__import__", without)')


# What tests may read all the same: fields of named tuples, and what notebooks ask for.
PUBLIC_ALL_THE_SAME = {"_replace", "_asdict", "_fields", "_repr_html_"}
# Private names of the package that tests still read. Only to shrink: a name that several tests
# need becomes public, and what one test reads becomes a check of results.
PRIVATE_LEFT = {
    "test_labelset_methods.py": {"_by_label"},
    "test_plain.py": {"_NAMES"},
    "test_references_labelsets.py": {"_batches"},
    "test_tuning.py": {"_batches"},
    "test_tuning_options.py": {"_batches"},
    # Of pickle and of torch, where the package has the same name for something else.
    "poison.py": {"_Unpickler"},
    "test_contract.py": {"_version"},
}


def is_private(name: str) -> bool:
    return bool(re.match(r"_[a-zA-Z]", name)) and name not in PUBLIC_ALL_THE_SAME


def private_reads(source: str, names: Collection[str]) -> set[str]:
    """Those of the package's private names that a test file imports, or reads of an object.

    What its own classes define under such a name is its own.
    """
    nodes = list(ast.walk(ast.parse(source)))
    ours = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    reads = set[str]()
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fedshift"):
            parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            reads |= set(filter(is_private, parts))
        elif isinstance(node, ast.Attribute) and node.attr in names:
            reads |= set() if isinstance(node.ctx, ast.Store) else {node.attr}
    return reads - ours


def test_tests_read_no_private_names() -> None:
    """They would hold how a thing is done, and not what comes of it."""
    given = {name for path in FILES for name in names_given(path.read_text()) if is_private(name)}
    for path in TESTS:
        text = path.read_text()
        # Parsing takes long: most files have no such name at all.
        if path != Path(__file__) and any(map(is_private, re.findall(r"\b_\w+", text))):
            assert private_reads(text, given) <= PRIVATE_LEFT.get(path.name, set()), path
    assert private_reads("from fedshift.pool import _share", {"_x"}) == {"_share"}
    assert private_reads("from fedshift._pool import share", {"_x"}) == {"_pool"}
    assert private_reads("made._x + made._y", {"_x"}) == {"_x"}
    assert not is_private("_replace")
    assert not private_reads("class A:\n    def _x(self): self._y\nA()._x()", {"_x"})
