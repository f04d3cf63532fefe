"""Plugins: commands, data sets and methods that other packages register as entry points."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fedshift.errors import InputError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint
    from types import UnionType

COMMANDS, DATASETS, METHODS = "fedshift.commands", "fedshift.datasets", "fedshift.methods"
# The entry points of the packages beside the core, which it does not import. They are also in
# pyproject.toml, but a source tree may run beside installed metadata of another version.
PACKAGED = {
    COMMANDS: {"reproduce": "fedshift_papers.cli:app", "deploy": "fedshift_deploy.cli:app"},
    DATASETS: {"papers": "fedshift_papers.datasets.catalogue:ENTRIES"},
    METHODS: {
        name: f"fedshift_papers.recipes:{name}"
        for name in (
            "confree_drm_repo",
            "ditto_drm_repo",
            "fedala_drm_repo",
            "fedas_drm_repo",
            "fedavg_uniform",
            "fedbabu_drm_repo",
            "fedpac_drm_repo",
            "fedrep_drm_repo",
            "moon_uniform",
        )
    },
}


def registered(group: str) -> dict[str, EntryPoint]:
    """The entry points in a group, by name. Those of this package win over others."""
    # Imported here: it takes 10 ms, and most commands need no plugin.
    from importlib.metadata import EntryPoint, entry_points

    # Ours first, and `setdefault` after: no other package can replace what the core ships.
    points = {name: EntryPoint(name, at, group) for name, at in PACKAGED.get(group, {}).items()}
    for point in entry_points(group=group):
        points.setdefault(point.name, point)
    return points


def loaded(point: EntryPoint, kind: type | UnionType, wanted: str) -> Any:
    """Load a registered object, which must be of class `kind`; `wanted` is its kind in words.

    Raises InputError, with the package's name, if it cannot be loaded or is something else.
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
