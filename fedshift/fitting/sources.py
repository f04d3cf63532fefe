"""What Python objects are, as text: equal for equal code, also in another process."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any


def mark_of(made: Any) -> str:
    """The source of a function or of an object's class, with what a function holds on to.

    Where Python has no source (a console), what `repr` says, which may differ where nothing does: a
    run is then trained again, and not taken for another one.
    """
    if made is None:
        return ""
    if isinstance(made, partial):
        return f"{mark_of(made.func)} {made.args!r} {sorted(made.keywords.items())!r}"
    code = made if inspect.isroutine(made) or inspect.isclass(made) else type(made)
    try:
        text = inspect.getsource(code)
    except (OSError, TypeError):
        text = repr(made)
    cells = [cell.cell_contents for cell in getattr(made, "__closure__", None) or ()]
    held = [mark_of(cell) if inspect.isroutine(cell) else repr(cell) for cell in cells]
    defaults = (getattr(made, "__defaults__", None), getattr(made, "__kwdefaults__", None))
    fields = "" if code is made or hasattr(made, "named_parameters") else repr(made)
    return f"{text}{held}{defaults}{fields}"
