"""Keys of a file that mean something else once a name is another: they are never carried over."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fedshift import recipes
from fedshift.errors import InputError, shown
from fedshift.experiments.config import Config

# What an option of one key is -> the names under which it is that.
Meanings = Mapping[str, tuple[str, ...]]

# The key that names what a section's options belong to.
NAMES = {"method": "name", "model": "name", "shift": "kind"}
# Options that are not the same under all names of a section; those of methods stand in recipes.
OTHERWISE: Mapping[str, Meanings] = {
    "model.projection": {
        "the width of a linear layer before the classifier": ("resnet18", "resnet50"),
        "the width of the projection head": ("lenet-moon", "mlp-moon"),
    },
    "shift.beta": {
        "how evenly a client's examples are shared among the labels": ("dirichlet-per-client",),
        "how evenly a label's examples are shared among the clients": ("dirichlet-per-class",),
        "how even the clients' sizes are": ("quantity",),
    },
}


def name_in(tables: Mapping[str, Any], section: str) -> Any:
    """The name in a section of a parsed file; the default where none is written."""
    table, key = tables.get(section), NAMES[section]
    default = getattr(getattr(Config(), section), key)
    return table.get(key, default) if isinstance(table, dict) else default


def check_carried(
    written: Mapping[str, Any], tables: Mapping[str, Any], given: Sequence[str]
) -> None:
    """Refuse, with InputError, a file's option that -c has left under a name of another meaning.

    `written` are the file's tables, `tables` those with -c, `given` the keys that -c has set.
    """
    problems = [
        problem
        for section in NAMES
        if section not in given
        for problem in _changed_meanings(section, written, tables, given)
    ]
    if problems:
        raise InputError("\n".join(problems))


def _changed_meanings(
    section: str, written: Mapping[str, Any], tables: Mapping[str, Any], given: Sequence[str]
) -> Iterator[str]:
    old, new = name_in(written, section), name_in(tables, section)
    options = written.get(section)
    for option, value in options.items() if isinstance(options, dict) else ():
        key = f"{section}.{option}"
        before, after = _meaning(key, old), _meaning(key, new)
        if key not in given and before and after and before != after:
            yield (
                f"-c {section}.{NAMES[section]}={new}: {key} = {shown(str(value))} is {before} in "
                f"{old}, and {after} in {new}; set it as well with -c {key}=VALUE, or leave it out "
                f"with -c {key}="
            )


def _meaning(key: str, name: Any) -> str | None:
    """The option's meaning under a name; None if it is the same for all, or not an option."""
    section, _, option = key.partition(".")
    if section == "method":
        return recipes.recipe(name).meanings.get(option) if name in recipes.__all__ else None
    meanings = OTHERWISE.get(key, {})
    return next((what for what, names in meanings.items() if name in names), None)
