"""Printed tables as CSV files in this folder."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from importlib.resources import files

from fedshift.papers.protocols.study import Place, Printed


def printed_rows(name: str) -> list[dict[str, str]]:
    """The rows of NAME.csv as they are."""
    path = files("fedshift.papers.protocols") / f"{name}.csv"
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def printed(name: str, place: Callable[[Mapping[str, str]], Place]) -> dict[Place, Printed]:
    """The cells of NAME.csv; `place` says where a row belongs: (column title, split, row label).

    A cell's mean is under "mean" or "value", its deviation under "std" where there is one.
    """
    cells = {}
    for row in printed_rows(name):
        sd = row.get("std")
        cells[place(row)] = Printed(
            float(row.get("mean") or row["value"]), float(sd) if sd else None
        )
    return cells
