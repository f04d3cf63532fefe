"""A table whose rows come from natural clients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fedshift.errors import InputError
from fedshift.sketch import sketched

if TYPE_CHECKING:
    import pandas as pd

Names = NDArray[np.object_]


@sketched
@dataclass(frozen=True, eq=False)
class Table:
    """Rows of features, each with a label and a client, by name.

    inputs   a pandas DataFrame of feature columns (numbers, and texts for categories; missing
             values are NaN), or float32 [n, ...] for signals and hashed words
    y        label of each row, one of `classes`; object [n] of str
    client   client of each row; object [n] of str
    time     year ("1975") or month ("2002-06") of each row, or None; object [n] of str
    classes  names of the labels, in their order where they have one
    label    what the label is called, such as "species"; `by` what a client is, such as "island"
    source   package and version, such as "palmerpenguins 0.1.6"

    Raises:
        InputError: inputs, labels, clients or times of unequal length, or a label without a class.

    >>> from fedshift.datasets import load_table
    >>> load_table("penguins").classes  # needs: pip install palmerpenguins
    ('Adelie', 'Chinstrap', 'Gentoo')
    """

    name: str
    inputs: pd.DataFrame | NDArray[np.float32]
    y: Names
    client: Names
    time: Names | None
    classes: tuple[str, ...]
    label: str
    by: str
    licence: str
    source: str

    def __post_init__(self) -> None:
        columns = {"inputs": self.inputs, "client": self.client, "time": self.time}
        for name, column in columns.items():
            if column is not None and len(column) != len(self.y):
                raise InputError(
                    f"table {self.name}: {name} has {len(column):,} rows and y has "
                    f"{len(self.y):,}; both need one row for each example"
                )
        if odd := set(self.y) - set(self.classes):
            raise InputError(
                f'table {self.name}: label "{min(odd)}" is not among the classes: '
                f"{', '.join(self.classes)}"
            )

    def __len__(self) -> int:
        return len(self.y)

    @property
    def clients(self) -> tuple[str, ...]:
        """Names of the clients, in the order of the alphabet; whole numbers by their value."""
        number = {name: int(name) if name.isdecimal() else 0 for name in set(self.client)}
        return tuple(sorted(number, key=lambda name: (number[name], name)))

    @property
    def counts(self) -> NDArray[np.int64]:
        """How many rows of each class each client has: [clients, classes]."""
        of_client = {name: i for i, name in enumerate(self.clients)}
        of_class = {name: k for k, name in enumerate(self.classes)}
        table = np.zeros((len(of_client), len(of_class)), dtype=np.int64)
        for client, label in zip(self.client, self.y, strict=True):
            table[of_client[client], of_class[label]] += 1
        return table
