"""The call of `fit` as text, for the report of its run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedshift.fitting.methods import Method

# A longer value would not help a reader: its type is shown instead.
LONGEST = 120


def call_of(net: Any, method: Any, keys: Mapping[str, Any], **others: Any) -> str:
    """The arguments of a call without the seed: 'task, Net, method="fedprox", mu=0.1, rounds=20'.

    others: arguments that are left out if they are None or empty. Functions and networks are shown
    by their names.

    >>> from fedshift.fitting.calls import call_of
    >>> call_of("mlp", "fedprox", {"mu": 0.1, "rounds": 20}, loss=None)
    'task, "mlp", method="fedprox", mu=0.1, rounds=20'
    """
    given = {k: v for k, v in others.items() if v is not None and not _empty(v)}
    named = [f"{k}={_words(v)}" for k, v in {"method": method, **keys, **given}.items()]
    return ", ".join(["task", *([] if net is None else [_words(net)]), *named])


def _empty(value: Any) -> bool:
    return isinstance(value, tuple | list | dict) and not value


def _words(value: Any) -> str:
    if isinstance(value, Method):
        name = value.recipe.name if value.custom else f'"{value.recipe.name}"'
        options = "".join(f", {k}={_words(v)}" for k, v in value.options.items())
        return f"fs.method({name}{options})" if options else name
    if isinstance(value, Mapping):
        return "{" + ", ".join(f'"{k}": {_words(v)}' for k, v in value.items()) + "}"
    if isinstance(value, str) and value.isprintable() and not set(value) & {'"', "\\"}:
        return f'"{value}"'
    plain = isinstance(value, bool | int | float | str | tuple | list)
    if plain and len(text := repr(value)) <= LONGEST:
        return text
    if callable(value) and hasattr(value, "__qualname__"):
        return str(value.__qualname__).rpartition(".<locals>.")[2]
    return f"{type(value).__name__}(...)"
