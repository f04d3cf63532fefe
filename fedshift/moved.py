"""Names that moved to another module: the former place still gives them, with a warning."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, cast

# Former modules, and what they are now.
MODULES = {
    "fedshift.datasets.heart": "fedshift.papers.datasets.heart",
    "fedshift.datasets.iwildcam": "fedshift.papers.datasets.iwildcam",
    "fedshift.datasets.pacs": "fedshift.papers.datasets.pacs",
    "fedshift.datasets.retina": "fedshift.papers.datasets.retina",
    "fedshift.engine.gate": "fedshift.engine.checks.gate",
    "fedshift.engine.levers": "fedshift.engine.trainers",
    "fedshift.engine.rounds": "fedshift.engine.run",
    "fedshift.engine.shelf": "fedshift.engine.storage.client_states",
    "fedshift.engine.stacked": "fedshift.engine.stacking.stacked",
    "fedshift.engine.workers": "fedshift.engine.processes.pool",
    "fedshift.experiments.deployed": "fedshift.experiments.machines.deployed",
    "fedshift.experiments.load": "fedshift.experiments.config.load",
    "fedshift.experiments.routers": "fedshift.experiments.folder.routers",
    "fedshift.experiments.run_models": "fedshift.experiments.folder.run_models",
}


def moved(module: str, **places: str) -> Callable[[str], Any]:
    """A `__getattr__` for `module`, which gives each name from the module where it is now."""

    def get(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        # A module's `__getattr__` is asked only for names that it does not have.
        _warn(f"{module}.{name}", f"{places[name]}.{name}")
        return getattr(import_module(places[name]), name)

    return get


def find_former_modules() -> None:
    """Let `import` find the modules of `MODULES`, which have no files any more."""
    # At the end: Python asks only for what it has not found itself, so present modules cost nothing.
    if _FormerModules not in sys.meta_path:
        sys.meta_path.append(_FormerModules)


class _FormerModules:
    """Finds and loads former modules; what Python's import system asks for are these methods."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, cast(Any, _FormerModules)) if name in MODULES else None

    @staticmethod
    def create_module(spec: ModuleSpec) -> None:
        """None: Python makes an empty module."""

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        """Put the present module in the place of the former one."""
        place = MODULES[module.__name__]
        _warn(module.__name__, place)
        # Python gives what stands in sys.modules after a module has run.
        sys.modules[module.__name__] = import_module(place)


def _warn(before: str, now: str) -> None:
    # Shown for the third frame, the one that imports: Python skips frames of its import system.
    warnings.warn(f"{before} is {now} now", DeprecationWarning, stacklevel=3)
