"""What ARCHITECTURE.md and CONTRIBUTING.md say, where no other test compares it with the sources.

docs/promises.md has a row for each statement, with its tests.
"""

from __future__ import annotations

import importlib
import inspect
import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedshift import recipes
from fedshift.algorithms.fedavg import FedAvg
from fedshift.client.local import Local
from fedshift.client.objectives import CrossEntropy, Proximal
from fedshift.data import Plan
from fedshift.engine.backends import Job
from fedshift.recipes import Setting
from fedshift.record import folder
from fedshift.server.combine import Mean
from fedshift.server.weights import Pals
from fedshift.tree import Params, Parts, flatten, unflatten
from support.federations import TARGET
from support.sources import FILES, PACKAGE, place_of

ROOT = PACKAGE.parent
MAP, GUIDE = ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md"
SOURCES = {place_of(path): path.read_text() for path in FILES}


def words(page: Path) -> str:
    """A page without its line breaks."""
    return " ".join(page.read_text().split())


def between(text: str, start: str, end: str) -> str:
    """What stands on a page from a text on, up to another."""
    assert start in text, start
    return text.partition(start)[2].partition(end)[0]


def importers(module: str) -> set[str]:
    """The rooms that import a module of the package."""
    pattern = re.compile(rf"(from|import) fedshift\.{re.escape(module)}\b")
    parent, _, name = module.rpartition(".")
    other = re.compile(rf"from fedshift\.{re.escape(parent)} import [^\n]*\b{name}\b")
    return {p.split("/")[0] for p, s in SOURCES.items() if pattern.search(s) or other.search(s)}


# ------------------------------------------------------------------ names of files and of commands


def names_of_files(text: str) -> set[str]:
    """The files and folders that a page names in backticks or in a list of a walk."""
    names = re.findall(r"`([\w.\-/]+)`", text) + re.findall(r"[\w/]+\.py", text)
    return {n for n in names if re.search(r"/|\.(py|md|txt|lock)$", n) and not n.isdigit()}


# Names for what a reader makes, and folders outside of the repository.
MADE = {"fedshift/algorithms/NAME.py", "build/site", "../shared/data", "../ARCHITECTURE.md"}
OF_RUNS = {"checkpoints/", "states/", "candidates/", "part/name", "torch.func"}


def missing(page: Path) -> set[str]:
    """Names of files on a page that are not there, in the package, at the root or in a room."""
    places = (ROOT, PACKAGE, ROOT / "docs", PACKAGE / "experiments/sites", ROOT / "tests")
    places += (PACKAGE / "client", PACKAGE / "experiments", ROOT / "tests/docs")
    places += (PACKAGE / "experiments/machines",)
    names = names_of_files(page.read_text()) - MADE - OF_RUNS
    return {n for n in names if not any(any(place.glob(n.lstrip("/"))) for place in places)}


@pytest.mark.parametrize("page", [MAP, GUIDE], ids=lambda page: page.stem)
def test_every_file_that_is_named_is_there(page: Path, tmp_path: Path) -> None:
    assert missing(page) == set()
    odd = tmp_path / "odd.md"
    odd.write_text("`engine/tower.py`, `engine/run.py` and `docs/`")
    assert missing(odd) == {"engine/tower.py"}


def test_every_target_of_make_is_there() -> None:
    makefile = (ROOT / "Makefile").read_text()
    named = set(re.findall(r"`make ([\w-]+)", GUIDE.read_text()))
    assert named <= set(re.findall(r"^([\w-]+):", makefile, re.M)) | {"test", "test-slow"}
    assert named >= {"test", "test-slow", "lint", "format", "docs", "audit", "lock", "test-flower"}
    recipe = between(makefile, "\nlint:", "\n\n")
    assert "ruff" in recipe
    assert "mypy" in recipe
    assert "-m slow -n 3 --dist loadfile" in makefile  # three files of deploy side by side
    assert "pytest -q tests/flower tests/deploy" in makefile
    assert "--extra flower --extra ops --extra report" in between(makefile, "\nlock:", "\n\n")
    assert "--generate-hashes" in makefile
    assert "export FEDSHIFT_DATA ?= $(abspath ../shared/data)" in makefile
    steps = (ROOT / ".ci/run").read_text()
    assert all(f"make {step}\n" in steps for step in ("lint", "docs", "test", "test-slow"))


def test_constants_that_the_guide_names_are_there() -> None:
    """In its table of what to touch, and in its rules. Control: another name."""
    text = GUIDE.read_text()
    named = set(re.findall(r"`([A-Z][A-Z_]{3,})`", text)) - {"FEDSHIFT_DATA", "PATH"}
    everything = "\n".join(SOURCES.values())
    assert named >= {"ONE_BY_ONE", "TABLES"}
    assert {n for n in named if not re.search(rf"^{n}\b", everything, re.M)} == set()
    assert not re.search(r"^TABLES_OF_TEN\b", everything, re.M)


# ------------------------------------------------------------------ methods and what flows


def structures() -> list[type]:
    """The classes of algorithms/ that are methods."""
    modules = [importlib.import_module(f"fedshift.algorithms.{p.stem}") for p in FILES
               if p.parent.name == "algorithms" and p.stem not in ("__init__", "base")]  # fmt: skip
    return [
        one
        for module in modules
        for one in vars(module).values()
        if inspect.isclass(one) and one.__module__ == module.__name__
        if hasattr(one, "client_update") and hasattr(one, "init")
    ]


def test_an_algorithm_is_a_frozen_dataclass_of_three_functions() -> None:
    algorithms = structures()
    assert FedAvg in algorithms
    assert len(algorithms) > 10
    for one in algorithms:
        assert is_dataclass(one), one
        assert one.__dataclass_params__.frozen, one  # type: ignore[attr-defined]
        for name in ("broadcast", "client_update", "server_update"):
            assert callable(getattr(one, name)), (one, name)


def test_axes_are_fields(setting: Setting) -> None:
    """The constructor that is shown has FedAvg's fields, and its example is the recipe."""
    text = MAP.read_text()
    shown = between(text, "**Axes are fields.** `FedAvg(", ")`")
    assert [one.strip() for one in shown.split(",")] == [f.name for f in fields(FedAvg)]
    code = between(text, "```python\nFedAvg(model,", "```")
    names: dict[str, Any] = {
        "FedAvg": FedAvg, "CrossEntropy": CrossEntropy, "Proximal": Proximal, "Mean": Mean,
        "Pals": Pals, "model": setting.model, "target": TARGET,
    }  # fmt: skip
    built = eval(f"FedAvg(model,{code}", names)
    plain = Setting(setting.model, TARGET, Local())
    assert built == recipes.fedpals(plain, ess=0.5, mu=0.1)
    assert built != recipes.fedpals(plain, ess=0.5, mu=0.2)


def test_what_flows() -> None:
    """Two levels of tensors, as a file has them by part/name, and a tree for torch.func."""
    assert dict[str, Tensor] == Params
    assert dict[str, Params] == Parts
    parts = {"part": {"name": torch.ones(2)}}
    assert list(flatten(parts)) == ["part/name"]
    assert list(unflatten(flatten(parts))["part"]) == ["name"]
    assert pytree.tree_leaves(parts) == [parts["part"]["name"]]


def test_how_is_no_part_of_a_plan() -> None:
    assert "how" in Job._fields
    assert "rows" in Plan._fields
    assert "how" not in Plan._fields


def test_branching_on_a_hyper_parameter(setting: Setting) -> None:
    assert recipes.fedprox(setting, mu=0.0) == recipes.fedavg(setting)
    assert recipes.fedprox(setting, mu=0.1) != recipes.fedavg(setting)


def test_imports_stand_in_the_order_that_is_written() -> None:
    """tree, seeds <- data, model <- client, server <- ...: none imports from a later group."""
    chain = between(words(MAP), "checks it): `", "`;")
    groups = [[one.strip() for one in group.split(",")] for group in chain.split("←")]
    assert groups[0] == ["tree", "seeds"]
    assert groups[-1] == ["recipes"]
    for i, later in enumerate(groups):
        for name in later:
            earlier = {one for group in groups[:i] for one in group}
            rooms = {room.removesuffix(".py") for room in importers(name)}
            assert not rooms & earlier, (name, rooms)
    assert importers("client") >= {"algorithms", "recipes"}


def test_the_engine_imports_the_protocol_alone() -> None:
    texts = {p: s for p, s in SOURCES.items() if p.startswith("engine/")}
    names = {n for s in texts.values() for n in re.findall(r"fedshift\.algorithms\.(\w+)", s)}
    assert names == {"base"}


# ------------------------------------------------------------------ engines, folders, charts


def test_two_engines_call_the_same_two_functions() -> None:
    two = re.findall(r"\(`(\w+)`:", between(words(MAP), "**Two engines, one round.**", "Flower's"))
    assert len(two) == 2
    rounds = SOURCES["engine/round.py"]
    for name in two:
        assert f"\ndef {name}(" in rounds
        for caller in ("engine/run.py", "flower/strategy.py"):
            text = SOURCES[caller]
            imported = between(text, "from fedshift.engine.round import (", ")")
            assert re.search(rf"\b{name},", imported), (caller, name)
            assert re.search(rf"\b{name}\(", text), (caller, name)


def test_files_do_what_the_map_says_of_them() -> None:
    """A definition or a word of each file that a paragraph gives a purpose.

    Beside the package there are an image, a compose file and units of systemd.
    """
    for place, text in {
        "experiments/engines.py": "class Engine(",
        "experiments/machines/deployed.py": "ClientApp",
        "experiments/machines/deployable.py": "def check_start(",
        "experiments/machines/deployed_engine.py": "class Deployed",
        "engine/traffic.py": "class Meter",
        "experiments/measures/caps.py": "cap",
        "report/looks.py": "dash",
        "experiments/machines/opening.py": "claim",
        "experiments/sites/rows.py": "rows",
        "experiments/sites/sums.py": "sums",
        "experiments/sites/answering.py": "answer",
        "experiments/sites/asking.py": "ask",
        "experiments/sites/gathering.py": "sites",
        "flower/scoring.py": "scor",
        "flower/routing.py": "router",
        "flower/calibrating.py": "calibrat",
        "deploy/processes.py": "process",
    }.items():
        assert text in SOURCES[place], place
    assert re.search(r"\bdef backend_of\(", SOURCES["experiments/engines.py"])
    assert {"Dockerfile", "compose.yaml", "systemd"} <= {
        p.name for p in (ROOT / "deploy").iterdir()
    }
    walk = between(MAP.read_text(), "**From the command line", "What was called before")
    assert "traffic.py" not in walk


def test_charts_are_described_once() -> None:
    """Drawn from the dataclasses of charts by two files; sweeps and papers use the intervals."""
    for place in ("report/svg.py", "report/printed.py"):
        assert "fedshift.report.charts" in SOURCES[place], place
    assert "@dataclass(frozen=True)" in SOURCES["report/charts.py"]
    assert importers("report.intervals") >= {"report", "sweeps", "papers"}


def run_files(text: str) -> set[str]:
    """The names of files and folders in backticks, without keys of experiment files."""
    names = re.findall(r"`([\w.\-]+/?)`", text)
    return {n for n in names if re.search(r"\.(toml|jsonl?|csv|safetensors|html)$|/$|^in-use$", n)}


def test_the_list_of_a_run_folder_is_whole() -> None:
    """The same names as docs/files.md, and all of those that the record's schema knows."""
    table = between(MAP.read_text(), "| in | files |", "\n\n")
    page = (ROOT / "docs/files.md").read_text()
    rows = between(page, "| file | holds |", "\n\n").splitlines()
    listed = run_files("\n".join(row.split(" | ")[0] for row in rows))
    assert run_files(table) == listed
    names = {v for k, v in vars(folder).items() if k.isupper() and isinstance(v, str)}
    on_page = {name.rstrip("/") for name in listed}
    assert {name for name in names if " " not in name} - on_page == {folder.SERVING}
    assert "lock.json" in on_page


def test_the_results_are_laid_out_as_the_map_says() -> None:
    """One file of run records at most in a folder, each under a folder with a page."""
    folders = {path.parent for path in (ROOT / "results").rglob("runs.jsonl.gz")}
    assert folders
    for place in folders:
        assert [*place.glob("*.gz")] == [place / "runs.jsonl.gz"]
        assert any(p.suffix == ".md" for up in (place, place.parent) for p in up.iterdir()), place


def test_the_navigation_has_every_page() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    pages = {p.relative_to(ROOT / "docs").as_posix() for p in (ROOT / "docs").rglob("*.md")}
    how_to = {page for page in pages if page.startswith("how-to/")}  # its list leads there
    assert {page for page in pages - how_to if page not in navigation} == set()
    assert {"ARCHITECTURE.md", "CONTRIBUTING.md"} <= set(re.findall(r"\.\./(\w+\.md)", navigation))


def test_what_is_locked_is_not_the_build_for_gpus() -> None:
    assert "nvidia" not in (ROOT / "requirements.lock").read_text()
    assert re.match(r"torch==[\d.]+", (ROOT / "torch.lock").read_text())


def test_the_changelog_names_results_that_may_change() -> None:
    assert "### Results may change" in (ROOT / "CHANGELOG.md").read_text()


def test_benchmarks_of_faults_write_their_pages() -> None:
    """Control: a program without the option."""
    for name in ("kills", "faults", "decoders"):
        text = (ROOT / "benchmarks" / f"{name}.py").read_text()
        assert '"--write"' in text
        assert (ROOT / "results" / f"{name}.md").is_file()
    assert '"--write"' not in (ROOT / "benchmarks" / "workloads.py").read_text()


# ------------------------------------------------------------------ every part has its tests


def test_every_part_of_both_pages_has_a_row_of_promises() -> None:
    """By the paragraphs' bold words, and by sections; advice has its place in those named here."""
    table = (ROOT / "docs/promises.md").read_text()
    for page in (MAP, GUIDE):
        promises = re.findall(rf"^\| {page.name} \| (.+?) \|", table, re.M)
        parts = re.split(r"\n(?=\*\*[A-Z]|## )", page.read_text())
        for part in parts:
            text = " ".join(part.split())
            assert any(promise in text for promise in promises), text[:60]
