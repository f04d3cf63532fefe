"""Names and modules that moved: the former place still gives them, with a warning."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, cast

# Former modules, and what they are now.
MODULES = {
    "fedshift.datasets.heart": "fedshift_papers.datasets.heart",
    "fedshift.datasets.iwildcam": "fedshift_papers.datasets.iwildcam",
    "fedshift.datasets.pacs": "fedshift_papers.datasets.pacs",
    "fedshift.datasets.retina": "fedshift_papers.datasets.retina",
    "fedshift.engine.checks.room": "fedshift.engine.checks.reply_bytes",
    "fedshift.engine.custom_backend": "fedshift.engine.backend_checks",
    "fedshift.engine.fastest": "fedshift.engine.choosing.fastest",
    "fedshift.engine.gate": "fedshift.engine.checks.gate",
    "fedshift.engine.levers": "fedshift.engine.one_by_one",
    "fedshift.engine.quicker": "fedshift.engine.choosing.loop_or_workers",
    "fedshift.engine.rounds": "fedshift.engine.run",
    "fedshift.engine.shelf": "fedshift.engine.storage.client_states",
    "fedshift.engine.stacked": "fedshift.engine.stacking.stacked",
    "fedshift.engine.trainers": "fedshift.engine.one_by_one",
    "fedshift.engine.ways": "fedshift.engine.backend_names",
    "fedshift.engine.workers": "fedshift.engine.processes.pool",
    "fedshift.experiments.config.prepared": "fedshift.experiments.task.prepared",
    "fedshift.experiments.config.settings": "fedshift.experiments.config.training_objects",
    "fedshift.experiments.deployed": "fedshift_deploy.machines.deployed",
    "fedshift.experiments.folder.stored": "fedshift.experiments.folder.model_file",
    "fedshift.experiments.load": "fedshift.experiments.config.load",
    "fedshift.experiments.measured": "fedshift.experiments.evaluation",
    "fedshift.experiments.measures.measuring": "fedshift.experiments.measures.task_scores",
    "fedshift.experiments.measures.played": "fedshift.experiments.measures.round_weights",
    "fedshift.experiments.routers": "fedshift.experiments.folder.routers",
    "fedshift.experiments.run_models": "fedshift.experiments.folder.run_models",
    "fedshift.experiments.training": "fedshift.experiments.first_checks",
    "fedshift.sweeps.measured": "fedshift.sweeps.results",
}
# Former modules whose names are in several modules now: name -> module.
SPLIT = {
    "fedshift.engine.inputs": {
        "check_after": "fedshift.engine.preflight.arguments",
        "check_backend": "fedshift.engine.backend_checks",
        "check_gate": "fedshift.engine.preflight.arguments",
        "check_run": "fedshift.engine.preflight.arguments",
        "check_sizes": "fedshift.engine.preflight.arguments",
        "check_workers": "fedshift.engine.processes.pool",
    },
    "fedshift.engine.trial": {
        "BATCH": "fedshift.engine.preflight.network",
        "check_company": "fedshift.engine.preflight.method",
        "check_features": "fedshift.engine.preflight.method",
        "check_model": "fedshift.engine.preflight.network",
        "check_router": "fedshift.engine.preflight.method",
        "check_schedule": "fedshift.engine.preflight.method",
        "check_training": "fedshift.engine.preflight.method",
        "check_whole_models": "fedshift.engine.preflight.method",
        "look": "fedshift.engine.preflight.network",
        "objectives_of": "fedshift.engine.preflight.method",
        "pals_of": "fedshift.engine.preflight.method",
        "UntriedError": "fedshift.engine.preflight.network",
        "warn_of_ess": "fedshift.engine.preflight.method",
    },
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
    """Let `import` find the former modules, which have no files any more."""
    # At the end of the list: Python asks only for what it has not found itself, so that imports of
    # present modules cost nothing more.
    if _FormerModules not in sys.meta_path:
        sys.meta_path.append(_FormerModules)


class _FormerModules:
    """Finds and loads former modules; what Python's import system asks for are these methods."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """How to load a former module; None for all others."""
        if name in SPLIT:
            return ModuleSpec(name, cast(Any, _FormerModules))
        if name not in MODULES:
            return None
        # Flower looks for an app in the file of its module, before it imports the module.
        present = importlib.util.find_spec(MODULES[name])
        origin = None if present is None else present.origin
        return ModuleSpec(name, cast(Any, _FormerModules), origin=origin)

    @staticmethod
    def create_module(spec: ModuleSpec) -> None:
        """None: Python makes an empty module."""

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        """Put the present module in the place of the former one, or its names one by one."""
        name = module.__name__
        if name in SPLIT:
            module.__dict__["__getattr__"] = moved(name, **SPLIT[name])
            module.__dict__["__all__"] = sorted(SPLIT[name])  # for `import *`
            return
        _warn(name, MODULES[name])
        # The importer gets what stands in sys.modules after the module has run.
        sys.modules[name] = import_module(MODULES[name])


def _warn(before: str, now: str) -> None:
    # Shown for the third frame, the one that imports: Python skips frames of its import system.
    warnings.warn(f"{before} is {now} now", DeprecationWarning, stacklevel=3)
