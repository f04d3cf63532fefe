"""Rules for tests: their folders, and what they may import, replace and read."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Sequence
from pathlib import Path

import pytest

from support.sources import FILES, PACKAGE, TESTS, names_given

# Folders of tests/ beside those that have the name of a room.
NO_ROOMS = {"docs", "golden", "support"}
TEST_MODULES = {path.stem for path in TESTS if path.parent.name != "support"}


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
    """Shared helpers are in tests/support."""
    assert {path.name: odd for path in TESTS if (odd := imports_of_tests(path.read_text()))} == {}
    assert imports_of_tests("def late():\n    from test_core import x") == {"test_core"}
    assert imports_of_tests("import conftest") == {"conftest"}


def private_replacements(source: str) -> list[str]:
    """The private names that a test file replaces: `_x`, alone or in a dotted name, not `__x__`."""
    private = []
    for node in ast.walk(ast.parse(source)):
        call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name)
        name = ast.unparse(node.func).rpartition(".")[2] if call else ""
        if name in ("setattr", "delattr", "__setattr__"):
            # The object and the name, or the dotted name; not the value that comes last.
            values = node.args[:2] if len(node.args) > 2 or name == "delattr" else node.args[:1]
            texts = (v.value if isinstance(v, ast.Constant) else ast.unparse(v) for v in values)
            parts = (part for text in texts for part in re.findall(r"[A-Za-z_]\w*", str(text)))
            private += [part for part in parts if re.match(r"_[a-zA-Z]", part)]
    return private


def test_no_test_replaces_a_private_name() -> None:
    """Tests look at results; they may replace the outside world and public names."""
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
    """Such tests would fix how a thing is done, not its result."""
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


class Case:
    """A case of a test as pytest's hooks see it."""

    def __init__(self, i: int, marks: Sequence[pytest.MarkDecorator]) -> None:
        self.path, self.name = Path(__file__), f"test_some[{i}]"
        self.marks = [mark.mark for mark in marks]

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        """The mark of this name, if it has it."""
        return next((mark for mark in self.marks if mark.name == name), None)

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        """Give it another one."""
        self.marks.append(mark.mark)


def test_few_leaves_some_cases_in_the_default_run(pytestconfig: pytest.Config) -> None:
    """And makes the others slow, so that both runs together have all. Control: no such mark."""
    conftest = str(Path(__file__).parent / "conftest.py")
    plugins = pytestconfig.pluginmanager.get_plugins()
    (ours,) = (one for one in plugins if getattr(one, "__file__", None) == conftest)
    for marks, quick in (([pytest.mark.few(3)], 3), ([], 10)):
        cases = [Case(i, marks) for i in range(10)]
        ours.pytest_collection_modifyitems(cases)
        assert sum(not case.get_closest_marker("slow") for case in cases) == quick
