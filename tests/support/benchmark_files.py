"""Files of benchmarks/, which are no package, as modules."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def load_benchmark(path: str, monkeypatch: pytest.MonkeyPatch | None = None) -> ModuleType:
    """The module of a file, as in "traps/run.py", beside the files that it imports.

    With monkeypatch it is forgotten after the test.
    """
    place = BENCHMARKS / path
    name = f"benchmark_{place.stem}"
    spec = importlib.util.spec_from_file_location(name, place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if monkeypatch is None:
        sys.modules[name] = module  # dataclasses look their module up
    else:
        monkeypatch.syspath_prepend(str(place.parent))
        monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module
