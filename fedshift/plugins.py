"""What packages beside the core add to it: commands and data sets, as entry points."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fedshift.errors import InputError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint
    from types import UnionType

COMMANDS, DATASETS = "fedshift.commands", "fedshift.datasets"
# What pyproject.toml registers for the folders of this package that the core does not import. It
# stands here too, because a source tree may run beside installed metadata of another version.
PACKAGED = {
    COMMANDS: {"reproduce": "fedshift.papers.cli:app"},
    DATASETS: {"papers": "fedshift.papers.datasets.catalogue:ENTRIES"},
}


def registered(group: str) -> dict[str, EntryPoint]:
    """What packages register in an entry point group, by name; our own come first."""
    # Imported here: it takes 10 ms, and most commands need no plugin.
    from importlib.metadata import EntryPoint, entry_points

    # Ours first, and `setdefault` after: no other package can replace what the core ships.
    points = {name: EntryPoint(name, at, group) for name, at in PACKAGED.get(group, {}).items()}
    for point in entry_points(group=group):
        points.setdefault(point.name, point)
    return points


def loaded(point: EntryPoint, kind: type | UnionType, wanted: str) -> Any:
    """The registered object, of class `kind`; `wanted` says in words what it has to be.

    Raises InputError where it cannot be loaded or is something else, with the package's name.
    """
    package = point.dist.name if point.dist else "fedshift"
    entry = f'the package {package} registers "{point.name}" as {point.group}, but {point.value}'
    cure = f"update or uninstall {package}"
    try:
        plugin = point.load()
    except Exception as e:  # a plugin may raise anything when it is imported
        raise InputError(f"{entry} cannot be loaded ({type(e).__name__}: {e}); {cure}") from e
    if not isinstance(plugin, kind):
        raise InputError(f"{entry} is no {wanted} ({type(plugin).__name__}); {cure}")
    return plugin
