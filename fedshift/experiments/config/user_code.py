"""Functions of the user's: where they are written, and where they failed."""

from __future__ import annotations

import inspect
import traceback
from functools import partial
from pathlib import Path
from typing import Any

from fedshift.errors import FedshiftError, shown


def place_of(function: Any) -> str:
    """ "mine.py, line 3", where it is written; "" for one of this library, or of no file."""
    while isinstance(function, partial):
        function = function.func
    path = file_of(function)
    ours = str(getattr(function, "__module__", "")).partition(".")[0] == "fedshift"
    return "" if path is None or ours else f"{path}, line {line_of(function)}"


def file_of(function: Any) -> Path | None:
    """The file that a function, a class or an object's class is written in."""
    try:
        return Path(inspect.getsourcefile(_written(function)) or "") or None
    except TypeError:
        return None


def line_of(function: Any) -> int:
    """Where it is defined in its file; 1 for what is not written there."""
    try:
        return max(1, inspect.getsourcelines(_written(function))[1])
    except (OSError, TypeError):
        return 1


def _written(function: Any) -> Any:
    made = inspect.unwrap(function)
    return made if inspect.isroutine(made) or inspect.isclass(made) else type(made)


def raised(error: BaseException, path: Path | None) -> str:
    """ "net.py, line 3: NameError: ...": the last line that is the user's, and the error.

    path: of a file in the user's folder.
    """
    what = str(error) if isinstance(error, FedshiftError) else f"{type(error).__name__}: {error}"
    if isinstance(error, SyntaxError) and error.filename:
        what = f"{type(error).__name__}: {error.msg}"
        return f"{error.filename}, line {error.lineno}: {shown(what, 300)}"
    if isinstance(error, ImportError) and "relative import" in what:
        what += "; files beside it are imported by their names alone, as in import other"
    return line_in(path, error) + shown(what, 300)


def line_in(path: Path | None, error: BaseException) -> str:
    """ "net.py, line 3: ", of the last line that is the user's; "" where there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f for f in frames if path is not None and Path(f.filename).parent == path.parent]
    return f"{lines[-1].filename}, line {lines[-1].lineno}: " if lines else ""


def described(value: object) -> str:
    """What a function returned, in a few words."""
    return "nothing (None)" if value is None else f"{type(value).__name__} {shown(repr(value))}"
