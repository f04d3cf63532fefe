"""What Python objects are, as text: equal for equal code, also in another process."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

from torch import nn


def mark_of(made: Any) -> str:
    """The source of a function or of an object's class, with the values that it was made with.

    Of a network, the source of its layers' classes: their weights and sizes are seen elsewhere.
    Where Python has no source (a console), and of objects without a text of their own, two equal
    ones may differ: a run is then trained again, and not taken for another one.
    """
    if made is None:
        return ""
    if isinstance(made, partial):
        return f"{mark_of(made.func)} {made.args!r} {sorted(made.keywords.items())!r}"
    if isinstance(made, nn.Module):
        kinds = {type(layer) for layer in made.modules()}
        layers = sorted((k.__qualname__, _source(k)) for k in kinds if not _of_torch(k))
        return f"{layers} {made!r}"
    if not (inspect.isroutine(made) or inspect.isclass(made)):
        return f"{_source(type(made))} {made!r}"
    cells = [cell.cell_contents for cell in getattr(made, "__closure__", None) or ()]
    values = [mark_of(cell) if callable(cell) else repr(cell) for cell in cells]
    defaults = [getattr(made, name, None) for name in ("__defaults__", "__kwdefaults__")]
    return f"{_source(made)} {values} {defaults}"


def _of_torch(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "torch"


def _source(code: Any) -> str:
    try:
        return inspect.getsource(code)
    except (OSError, TypeError):
        return repr(code)
