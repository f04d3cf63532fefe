"""Python objects as text that identifies their code, the same in every process."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterable, Mapping
from functools import partial
from types import CodeType, ModuleType
from typing import Any

import numpy as np
from torch import Tensor, nn


def mark_of(made: Any, above: tuple[Any, ...] = ()) -> str:
    """The source of a function, or of an object's class, with the values that it holds.

    For a function it includes outer variables that it uses, and functions of its own module. For a
    network it is the source of its layers' classes; weights and sizes are compared elsewhere.
    If Python has no source (in a console), or an object no text of its own, equal objects may give
    different texts. That errs on the safe side: a run is then trained again, instead of being taken
    for another one.

    above: the objects that this one is a part of, since an object may contain itself.
    """
    if made is None or any(made is one for one in above):
        return ""
    above = (*above, made)
    if isinstance(made, Tensor | np.ndarray):
        return _numbers(made)
    if isinstance(made, Mapping):
        return str({str(key): mark_of(value, above) for key, value in made.items()})
    if isinstance(made, list | tuple):
        return str([mark_of(value, above) for value in made])
    if isinstance(made, partial):
        return f"{mark_of(made.func, above)} {mark_of([made.args, made.keywords], above)}"
    if isinstance(made, nn.Module):
        kinds = {type(layer) for layer in made.modules()}
        return f"{sorted(_code(k, above) for k in kinds if not _of_torch(k))} {made!r}"
    if inspect.isroutine(made) or inspect.isclass(made):
        return _code(made, above)
    inner = getattr(made, "__dict__", None)
    return f"{_code(type(made), above)} {repr(made) if inner is None else mark_of(inner, above)}"


def _numbers(of: Tensor | np.ndarray[Any, Any]) -> str:
    """An array as text, by a hash of all its numbers: its repr would leave most of them out."""
    array = of.detach().cpu().numpy() if isinstance(of, Tensor) else of
    content = repr(array.tolist()).encode() if array.dtype == object else array.tobytes()
    return f"{array.dtype} {array.shape} {hashlib.sha256(content).hexdigest()}"


def _code(of: Any, above: tuple[Any, ...]) -> str:
    """The source, and what it uses: closures, defaults, and global names of its module."""
    parts = [_source(of)]
    functions = vars(of).values() if inspect.isclass(of) else [of]
    for function in filter(inspect.isfunction, map(inspect.unwrap, functions)):
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
        names = sorted(_names(function.__code__) & function.__globals__.keys())
        around = {n: _outer(function.__globals__[n], function.__module__, above) for n in names}
        parts += [mark_of([cells, function.__defaults__, function.__kwdefaults__], above)]
        parts += [str(around)]
    return " ".join(parts)


def _names(code: CodeType) -> set[str]:
    inner: Iterable[CodeType] = (c for c in code.co_consts if isinstance(c, CodeType))
    return set(code.co_names).union(*map(_names, inner))


def _outer(value: Any, module: str, above: tuple[Any, ...]) -> str:
    """A global that a function uses: its `mark_of`, or only the name if another module has it."""
    if isinstance(value, ModuleType):
        return value.__name__
    if inspect.isroutine(value) or inspect.isclass(value):
        same = value.__module__ == module
        return mark_of(value, above) if same else f"{value.__module__}.{value.__qualname__}"
    return mark_of(value, above)


def _of_torch(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "torch"


def _source(code: Any) -> str:
    try:
        return inspect.getsource(code)
    except (OSError, TypeError):
        return repr(code)
