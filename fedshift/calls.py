"""Errors for calls whose arguments do not fit a function: they show how to write the call.

Python's own TypeErrors count arguments; these name the ones that the user gave.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from fedshift.errors import InputError, nearest, shown

P = ParamSpec("P")
R = TypeVar("R")


def called_as(example: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator: the function raises InputError for arguments that it does not take.

    example: a call of the function, to show in the message, as `fs.fit(task, net)`.

    >>> from fedshift.calls import called_as
    >>> from fedshift.calls import called_as
    >>> @called_as("half(x=2)")
    ... def half(*, x):
    ...     return x / 2
    >>> half(x=3)
    1.5
    """

    def decorated(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)

        @wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                signature.bind(*args, **kwargs)
            except TypeError as e:
                raise InputError(_misfit(signature, args, kwargs, example, str(e))) from None
            return function(*args, **kwargs)

        return checked

    return decorated


def _misfit(
    signature: inspect.Signature, args: Sequence[Any], named: Mapping[str, Any], example: str,
    reason: str,
) -> str:  # fmt: skip
    """The message: what does not fit, and the call that was most likely meant."""
    name, given = example.partition("(")[0], list(signature.parameters.values())
    if given[0].name in ("self", "cls"):
        given, args = given[1:], args[1:]
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    places = [p.name for p in given if p.kind in by_place]
    names = [p.name for p in given if p.kind is p.KEYWORD_ONLY]
    if extra := args[len(places) :]:
        return too_many(name, places, extra, [n for n in names if n not in named])
    allowed, takes_any = [*places, *names], any(p.kind is p.VAR_KEYWORD for p in given)
    if not takes_any and (odd := [key for key in named if key not in allowed]):
        hint = nearest(odd[0], allowed) or f" It takes {', '.join(allowed)}."
        return f'{name} has no argument "{shown(odd[0])}".{hint}'
    filled = {*places[: len(args)], *named}
    needed = [p.name for p in given if p.name in allowed and p.default is p.empty]
    if lacking := [one for one in needed if one not in filled]:
        return f"{name} needs {' and '.join(lacking)} as well, as in {example}"
    return f"{name}: {reason}; write it as in {example}"


def too_many(name: str, places: Sequence[str], extra: Sequence[Any], names: Sequence[str]) -> str:
    """The message for more positional arguments than the function has places for."""
    likely = [f"{n}={_short(v)}" for n, v in zip(names, extra, strict=False)]
    takes = f"takes {', '.join(places)} by place" if places else "takes its arguments by name"
    rest = "the others" if places else "them"
    cure = f"give {rest} by name, as {', '.join(likely)}" if likely else f"leave out {rest}"
    return f"{name} {takes}, got {len(extra)} more; {cure}"


def _short(value: object) -> str:
    """A value as it is typed, if that is short."""
    return shown(repr(value), 30) if isinstance(value, str | int | float | None) else "..."
