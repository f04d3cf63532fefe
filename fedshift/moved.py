"""Names and modules that moved: the former place still gives them, with a warning."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any


def moved(module: str, **places: str) -> Callable[[str], Any]:
    """A `__getattr__` for `module`, which gives each name from the module where it is now."""

    def get(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        # Python calls a module's `__getattr__` only for names that the module does not have.
        _warn(f"{module}.{name}", f"{places[name]}.{name}", 3)
        return getattr(import_module(places[name]), name)

    return get


def replaced(module: str, place: str) -> None:
    """Make the module that is being imported another name for the module at `place`."""
    # One frame further out than in `moved`: the module itself stands between here and its importer.
    # Python shows this warning only where the program's own file is to blame.
    _warn(module, place, 4)
    # The import system returns what stands in sys.modules after the module has run.
    sys.modules[module] = import_module(place)


def _warn(before: str, now: str, level: int) -> None:
    warnings.warn(f"{before} is {now} now", DeprecationWarning, stacklevel=level)
