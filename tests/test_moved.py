"""Moved modules can still be imported by their former names, with a warning."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from fedshift import engine
from fedshift.algorithms import steps
from fedshift.client import local
from fedshift.engine.checks import gate
from fedshift.moved import MODULES, SPLIT
from support.sources import PACKAGE

NAMES = ("context_of", "train_locally", "train_phases")
MOVED = [
    ("fedshift.engine.rounds", "fedshift.engine.run", ("Federation", "Round", "run")),
    ("fedshift.engine.gate", "fedshift.engine.checks.gate", ("Gate",)),
    ("fedshift.engine.workers", "fedshift.engine.processes.pool", ("workers",)),
    ("fedshift.engine.stacked", "fedshift.engine.stacking.stacked", ("Stacked",)),
    ("fedshift.engine.levers", "fedshift.engine.one_by_one", ("dense", "channels_last")),
    ("fedshift.engine.trainers", "fedshift.engine.one_by_one", ("dense", "channels_last")),
    ("fedshift.engine.ways", "fedshift.engine.backend_names", ("NAMES", "ONE_BY_ONE")),
    ("fedshift.engine.fastest", "fedshift.engine.choosing.fastest", ("check_fit", "probe")),
    ("fedshift.engine.quicker", "fedshift.engine.choosing.loop_or_workers", ("Quicker",)),
    ("fedshift.engine.checks.room", "fedshift.engine.checks.reply_bytes", ("check_room",)),
    ("fedshift.engine.custom_backend", "fedshift.engine.backend_checks", ("watched",)),
    (
        "fedshift.experiments.load",
        "fedshift.experiments.config.load",
        ("dumps", "load_config", "validate"),
    ),
    ("fedshift.experiments.deployed", "fedshift_deploy.machines.deployed", ("server_app",)),
    ("fedshift.experiments.routers", "fedshift.experiments.folder.routers", ("load_router",)),
    ("fedshift.experiments.run_models", "fedshift.experiments.folder.run_models", ("load_models",)),
    (
        "fedshift.experiments.folder.stored",
        "fedshift.experiments.folder.model_file",
        ("read_parts",),
    ),
    ("fedshift.engine.shelf", "fedshift.engine.storage.client_states", ("Shelf",)),
    (
        "fedshift.experiments.config.prepared",
        "fedshift.experiments.task.prepared",
        ("Prepared",),
    ),
    (
        "fedshift.experiments.config.settings",
        "fedshift.experiments.config.training_objects",
        ("local_of",),
    ),
    ("fedshift.experiments.measured", "fedshift.experiments.evaluation", ("Evaluation",)),
    (
        "fedshift.experiments.measures.measuring",
        "fedshift.experiments.measures.task_scores",
        ("few_tests",),
    ),
    (
        "fedshift.experiments.measures.played",
        "fedshift.experiments.measures.round_weights",
        ("ess_of",),
    ),
    ("fedshift.experiments.training", "fedshift.experiments.first_checks", ("check_first_round",)),
    ("fedshift.sweeps.measured", "fedshift.sweeps.results", ("rows_of",)),
]


@pytest.mark.parametrize(("old", "new", "names"), MOVED, ids=[old for old, *_ in MOVED])
def test_the_former_path_warns_and_gives_the_same(
    old: str, new: str, names: tuple[str, ...]
) -> None:
    sys.modules.pop(old, None)
    with pytest.warns(DeprecationWarning, match=f"{old} is {new} now"):
        former = import_module(old)
    assert former is import_module(new)
    assert all(hasattr(former, name) for name in names)


def test_every_former_module_is_tried() -> None:
    """Here, or, those of papers, in `test_plugins.py`."""
    elsewhere = {name for name in MODULES if name.startswith("fedshift.datasets.")}
    assert {old: new for old, new, _ in MOVED} == {
        old: new for old, new in MODULES.items() if old not in elsewhere
    }


@pytest.mark.parametrize("old", SPLIT)
def test_names_of_a_module_that_was_split_warn_and_are_the_same(old: str) -> None:
    sys.modules.pop(old, None)
    former = import_module(old)
    for name, place in SPLIT[old].items():
        with pytest.warns(DeprecationWarning, match=f"{old}.{name} is {place}.{name} now"):
            assert getattr(former, name) is getattr(import_module(place), name)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = former.nothing
    names: dict[str, Any] = {}
    with pytest.warns(DeprecationWarning, match=f"{old}.*is .* now"):
        exec(f"from {old} import *", names)
    assert {name for name in names if not name.startswith("__")} == SPLIT[old].keys()


def test_former_modules_are_found_however_they_are_imported() -> None:
    """Control: a module that never was is not found."""
    texts = (
        "from fedshift.engine import gate as former",
        "import fedshift.engine.gate as former",
        "from fedshift.engine.gate import Gate\nimport sys\nformer = sys.modules[Gate.__module__]",
    )
    for text in texts:
        sys.modules.pop("fedshift.engine.gate", None)
        vars(engine).pop("gate", None)
        names: dict[str, Any] = {}
        with pytest.warns(DeprecationWarning, match="is fedshift.engine.checks.gate now"):
            exec(text, names)
        assert names["former"] is gate
        assert gate.__name__ == gate.__spec__.name == "fedshift.engine.checks.gate"
    with pytest.raises(ModuleNotFoundError, match="No module named 'fedshift.engine.never'"):
        import_module("fedshift.engine.never")


@pytest.mark.slow
def test_former_modules_are_found_in_a_zip_file(tmp_path: Path) -> None:
    """As where Python imports from one, and no file of the package lies in a folder."""
    with zipfile.ZipFile(tmp_path / "package.zip", "w") as packed:
        for path in PACKAGE.rglob("*.py"):
            packed.write(path, path.relative_to(PACKAGE.parent))
    lines = "import fedshift, fedshift.engine.gate as g; print(fedshift.__file__, g.__name__)"
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "package.zip")}
    done = subprocess.run(
        [sys.executable, "-c", lines],
        capture_output=True, text=True, check=True, env=environment, cwd=tmp_path,
    )  # fmt: skip
    assert "package.zip" in done.stdout
    assert "fedshift.engine.checks.gate" in done.stdout


@pytest.mark.slow
def test_a_program_is_shown_its_own_line(tmp_path: Path) -> None:
    """Python hides this kind of warning unless it points to the program's own file."""
    lines = ["from fedshift.engine.rounds import run", "from fedshift.datasets import gaussians"]
    program = tmp_path / "program.py"
    program.write_text("\n".join([*lines, "from fedshift.engine.run import run"]))
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, check=True
    )
    shown = [line for line in done.stderr.splitlines() if " now" in line]
    assert [line.partition(": ")[0] for line in shown] == [f"{program}:1", f"{program}:2"]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_moved_warns_and_is_the_same(name: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"is fedshift.client.local.{name} now"):
        assert getattr(steps, name) is getattr(local, name)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        steps.__getattr__("nothing")
