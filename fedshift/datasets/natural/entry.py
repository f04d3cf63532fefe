"""The record of a table: its package, its sizes, and how its rows are read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedshift.datasets.natural.package import Package

if TYPE_CHECKING:
    import pandas as pd


class Rows(NamedTuple):
    """The rows that a loader reads, before small clients are left out; columns as in `Table`."""

    inputs: pd.DataFrame | NDArray[np.float32]
    y: list[str]
    client: list[str]
    time: list[str] | None = None


@dataclass(frozen=True)
class Natural:
    """One table with natural clients.

    Clients with fewer than `fewest` rows are left out, since they say too little of their label
    shares; `rows` and `clients` are what must be left. `read` takes the package's folder or
    archive.
    """

    name: str
    summary: str
    classes: tuple[str, ...]
    label: str
    by: str
    rows: int
    clients: int
    inputs: str
    licence: str
    package: Package
    read: Callable[[Path], Rows]
    fewest: int = 20
