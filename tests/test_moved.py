"""Moved modules can still be imported by their former names, with a warning."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from fedshift.algorithms import steps
from fedshift.client import local

NAMES = ("context_of", "train_locally", "train_phases")
MOVED = [
    ("fedshift.engine.rounds", "fedshift.engine.run", ("Federation", "Round", "run")),
    ("fedshift.engine.gate", "fedshift.engine.checks.gate", ("Gate",)),
    ("fedshift.engine.workers", "fedshift.engine.processes.pool", ("workers",)),
    ("fedshift.engine.stacked", "fedshift.engine.stacking.stacked", ("Stacked",)),
    ("fedshift.engine.levers", "fedshift.engine.trainers", ("dense", "channels_last")),
    (
        "fedshift.experiments.load",
        "fedshift.experiments.config.load",
        ("dumps", "load_config", "validate"),
    ),
    ("fedshift.experiments.deployed", "fedshift.experiments.machines.deployed", ("server_app",)),
    ("fedshift.experiments.routers", "fedshift.experiments.folder.routers", ("load_router",)),
    ("fedshift.experiments.run_models", "fedshift.experiments.folder.run_models", ("load_models",)),
    (
        "fedshift.experiments.folder.stored",
        "fedshift.experiments.folder.model_file",
        ("read_parts",),
    ),
    ("fedshift.engine.shelf", "fedshift.engine.storage.client_states", ("Shelf",)),
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
