"""Finding and loading tables with natural clients."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from fedshift.arguments import called
from fedshift.datasets.base import damaged, roots_of
from fedshift.datasets.natural.birdstrikes import BIRD_STRIKES
from fedshift.datasets.natural.entry import Natural, Rows
from fedshift.datasets.natural.flights import FLIGHTS
from fedshift.datasets.natural.mail import MAIL
from fedshift.datasets.natural.penguins import PENGUINS
from fedshift.datasets.natural.rdatasets import CHEM97, STORMS
from fedshift.datasets.natural.table import Names, Table
from fedshift.datasets.natural.watch import WATCH
from fedshift.errors import DataError, InputError, unknown

TABLES = (PENGUINS, CHEM97, BIRD_STRIKES, MAIL, WATCH, FLIGHTS, STORMS)


def natural_table(name: str) -> Natural:
    """The record of the table called `name`.

    Raises InputError for an unknown one, with the nearest match.
    """
    by_name = {one.name: one for one in TABLES}
    if not isinstance(name, str):
        raise InputError(f'name is {called(name)}; give the name of a table, as "penguins"')
    if name not in by_name:
        raise unknown("table", name, by_name)
    return by_name[name]


def find_table(one: Natural, folders: Sequence[Path | str] | None = None) -> Path | None:
    """Where the table's package lies, or None; `folders` replaces the usual search folders."""
    return one.package.find(roots_of(folders))


def load_table(name: str, folders: Sequence[Path | str] | None = None) -> Table:
    """A table with natural clients, without its smallest clients.

    It is read from where its package is installed; npm's packages are looked for in `folders`, or
    in the folders of `base.search_folders`.

    Raises:
        InputError: unknown name, with the nearest match.
        DataError: a package that is absent, with the command that gets it; one that is damaged, or
            has other rows than expected.

    >>> from fedshift.datasets.natural.loading import load_table
    >>> load_table("penguins").clients  # needs: pip install palmerpenguins
    ('Biscoe', 'Dream', 'Torgersen')
    """
    one = natural_table(name)
    place = find_table(one, folders)
    if place is None:
        raise DataError(
            f'"{name}" is part of the package {one.package.name}, which is not on this machine. '
            f"Get it: {one.package.how}."
        )
    source = f"{one.package.name} {one.package.version_at(place)}"
    table = _without_small_clients(one, _read(one, place), source)
    if (len(table), len(table.clients)) != (one.rows, one.clients):
        raise DataError(
            f"{place}: {len(table):,} rows of {len(table.clients)} clients in {source}; {name} has "
            f"{one.rows:,} of {one.clients}. It was written for {one.package.version}: "
            f"{one.package.how}."
        )
    return table


def _read(one: Natural, place: Path) -> Rows:
    try:
        return one.read(place)
    except DataError:
        raise
    # A file that is absent or damaged, and a table that lacks a column.
    except (OSError, ValueError, LookupError, BadZipFile, zlib.error) as error:
        raise damaged(place, f"{one.name} cannot be read ({error})") from error


def _without_small_clients(one: Natural, rows: Rows, source: str) -> Table:
    sizes = Counter(rows.client)
    keep = np.array([sizes[name] >= one.fewest for name in rows.client])
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
