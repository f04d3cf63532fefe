"""What packages beside the core add to it: commands and data sets, as entry points."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fedshift.errors import InputError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

COMMANDS, DATASETS = "fedshift.commands", "fedshift.datasets"
# What pyproject.toml registers for the folders of this package that the core does not import. It
# stands here too, because a source tree may run beside installed metadata of another version.
PACKAGED = {
    COMMANDS: {"reproduce": "fedshift.papers.cli:app"},
    DATASETS: {"papers": "fedshift.papers.datasets.catalogue:ENTRIES"},
}


def registered(group: str) -> dict[str, Any]:
    """The objects that packages register in an entry point group, by name; our own come first.

    Raises InputError where one cannot be loaded, with the package that registers it.
    """
    # Imported here: it takes 10 ms, and most commands need no plugin.
    from importlib.metadata import EntryPoint, entry_points

    # Ours first, and `setdefault` after: no other package can replace what the core ships.
    points = {name: EntryPoint(name, at, group) for name, at in PACKAGED.get(group, {}).items()}
    for point in entry_points(group=group):
        points.setdefault(point.name, point)
    return {name: _loaded(point) for name, point in points.items()}


def _loaded(point: EntryPoint) -> Any:
    try:
        return point.load()
    except Exception as e:  # a plugin may raise anything when it is imported
        package = point.dist.name if point.dist else "fedshift"
        raise InputError(
            f'the package {package} registers "{point.name}" as {point.group}, but {point.value} '
            f"cannot be loaded ({type(e).__name__}: {e}); update or uninstall {package}"
        ) from e
