"""Finding and loading tables with natural clients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedshift.datasets.base import search_folders
from fedshift.datasets.natural.entry import FEWEST_ROWS, Natural, Rows
from fedshift.datasets.natural.penguins import PENGUINS
from fedshift.datasets.natural.table import Names, Table
from fedshift.errors import DataError, unknown

TABLES = (PENGUINS,)


def natural(name: str) -> Natural:
    """The table called `name`; raises InputError for an unknown one, with the nearest match."""
    by_name = {one.name: one for one in TABLES}
    if name not in by_name:
        raise unknown("table", name, by_name)
    return by_name[name]


def find_table(one: Natural, folders: Sequence[Path | str] | None = None) -> Path | None:
    """Where the table's package lies, or None; `folders` replaces the usual search folders."""
    return one.package.find(search_folders() if folders is None else [Path(f) for f in folders])


def load_table(name: str, folders: Sequence[Path | str] | None = None) -> Table:
    """A table with natural clients, without clients of fewer than 20 rows.

    It is read from where its package is installed; npm's packages are looked for in `folders`, or
    in the folders of `base.search_folders`.

    Raises:
        InputError: unknown name, with the nearest match.
        DataError: a package that is absent, with the command that gets it; one that is damaged, or
            has other rows than expected.

    >>> load_table("penguins").clients  # needs: pip install palmerpenguins
    ('Biscoe', 'Dream', 'Torgersen')
    """
    one = natural(name)
    place = find_table(one, folders)
    if place is None:
        raise DataError(
            f'"{name}" is part of the package {one.package.name}, which is not on this machine. '
            f"Get it: {one.package.how}."
        )
    source = f"{one.package.name} {one.package.version_at(place)}"
    table = _without_small_clients(one, one.read(place), source)
    if (len(table), len(table.clients)) != (one.rows, one.clients):
        raise DataError(
            f"{place}: {len(table):,} rows of {len(table.clients)} clients in {source}; {name} has "
            f"{one.rows:,} of {one.clients}. It was written for {one.package.version}: "
            f"{one.package.how}."
        )
    return table


def _without_small_clients(one: Natural, rows: Rows, source: str) -> Table:
    sizes = Counter(rows.client)
    keep = np.array([sizes[name] >= FEWEST_ROWS for name in rows.client])
    whole = isinstance(rows.inputs, np.ndarray)
    inputs = rows.inputs[keep] if whole else rows.inputs[keep].reset_index(drop=True)
    return Table(
        name=one.name,
        inputs=inputs,
        y=_names(rows.y)[keep],
        client=_names(rows.client)[keep],
        time=None if rows.time is None else _names(rows.time)[keep],
        classes=one.classes,
        label=one.label,
        by=one.by,
        licence=one.licence,
        source=source,
    )


def _names(values: list[str]) -> Names:
    return np.array(values, dtype=object)
