"""The files in a client's folder for data of its own, and their check by `fedshift deploy`."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedshift.errors import InputError, shown
from fedshift.experiments.config.data import Data
from fedshift.experiments.config.load import load_config, read_section
from fedshift.files import is_file
from fedshift.tasks.names import Coded, Ints, listed, many
from fedshift.tasks.rows import Columns, Numbers
from fedshift_deploy.sites.answering import EXPERIMENT
from fedshift_deploy.sites.rows import FILE, TEMPLATE, SiteError, SiteFile, rows_of_site


def site_files(data: Data, text: str) -> list[dict[str, str]]:
    """For each client with data of its own, the files of its folder; text: the experiment."""
    label = data.label or "label"
    return [
        {EXPERIMENT: text, FILE: TEMPLATE.format(site=name, label=label)}
        for name in data.clients or ()
    ]


def check_site(folder: Path, number: int) -> list[str]:
    """Lines that describe the rows of client `number`. Raises InputError if they do not fit.

    The last line names the client, since a table in the wrong site's folder may fit, too.
    """
    if not is_file(folder / EXPERIMENT):
        return [f"client-{number}: the experiment gives the clients their data"]
    data = load_config(folder / EXPERIMENT).data
    names = data.clients or ()
    if number >= len(names):
        raise InputError(
            f"{folder / EXPERIMENT}: has {many(len(names), 'client')}, and client.json says "
            f"client-{number}; take both files from one federation"
        )
    try:
        rows = rows_of_site(folder, data)
    except SiteError as e:
        raise InputError(e.detail) from None
    counts = np.bincount(rows.codes[rows.codes >= 0], minlength=len(data.classes or ()))
    each = ", ".join(f"{name} {n:,}" for name, n in zip(data.classes or (), counts, strict=True))
    lines = [f"{many(len(rows.codes), 'row')}: {each}; {_without(rows.codes)} without a label"]
    if rows.numbered:
        # The site may have numbered its classes in another order, which only a person can see.
        read = ", ".join(f"{i} is {name}" for i, name in enumerate(data.classes or ()))
        lines.append(f"  {data.label or 'label'}: numbers of classes: {read}")
    if isinstance(rows.inputs, Columns):
        lines += [f"  {name}: {_described(column)}" for name, column in rows.inputs.of.items()]
    source = read_section(folder / FILE, SiteFile).data.source
    return [
        *lines,
        f'client-{number} ("{shown(names[number])}"): {many(len(rows.codes), "row")} of '
        f"{shown(source)}; the data fit the experiment; nothing was sent",
    ]


def _described(column: Numbers | Coded) -> str:
    if isinstance(column, Coded):
        return f"{listed(column.names)}; {_without(column.codes)} missing"
    given = column[~np.isnan(column)]
    span = f"numbers from {given.min():g} to {given.max():g}" if len(given) else "no number"
    return f"{span}; {len(column) - len(given):,} missing"


def _without(codes: Ints) -> str:
    return f"{int((codes < 0).sum()):,}"
