"""A first look at a table: kinds of columns, and which may be the client or the label."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fedshift.tasks.columns import is_free_text
from fedshift.tasks.names import Coded
from fedshift.tasks.rows import Columns

Kind = Literal["numbers", "categories", "text", "constant"]
# Column names that suggest the client of a row, or the label.
CLIENTS = re.compile(
    "client|hospital|clinic|site|cent(er|re)|region|state|island|school|user|subject|device|origin",
    re.IGNORECASE,
)
LABELS = re.compile(
    r"label|outcome|target|class|diagnos|result|score|species|grade|\by\b|dead|death", re.IGNORECASE
)
# The most values that classes may have, the fewest rows per client, the most candidates to name.
MOST_CLASSES, LEAST_ROWS, MOST_NAMED = 50, 5, 8


@dataclass(frozen=True)
class ColumnLook:
    """A column: how many different values it has, and in how many rows the value is missing.

    kind: "text" for texts that hardly repeat, such as free text and names; "constant" for a single
    value. whole: no value is a fraction.
    """

    name: str
    kind: Kind
    values: int
    missing: int
    whole: bool


def look(table: Columns) -> tuple[ColumnLook, ...]:
    """All columns of a table, in order.

    >>> from fedshift.tasks.look import look
    >>> from fedshift.tasks.rows import inputs_of
    >>> [c.kind for c in look(inputs_of({"age": [30.0, None], "site": ["a", "b"]}))]
    ['constant', 'categories']
    """
    return tuple(_column(table, name) for name in table.of)


def _column(table: Columns, name: str) -> ColumnLook:
    column = table.of[name]
    if isinstance(column, Coded):
        values, missing = int((column.counts() > 0).sum()), int((column.codes < 0).sum())
        kind = _kind(values, "text" if is_free_text(values, len(table)) else "categories")
        return ColumnLook(name, kind, values, missing, whole=True)
    given = column[~np.isnan(column)]
    values, whole = len(np.unique(given)), bool((given == np.rint(given)).all())
    return ColumnLook(name, _kind(values, "numbers"), values, len(column) - len(given), whole)


def _kind(values: int, kind: Kind) -> Kind:
    return kind if values > 1 else "constant"


def candidates(table: Columns, what: str) -> list[ColumnLook]:
    """Columns that may be the "client" or the "label" (`what`), the likeliest first.

    They have few values. Columns with a suggestive name come first, then text before numbers, then
    those with fewer values.
    """
    hint = CLIENTS if what == "client" else LABELS
    most = MOST_CLASSES if what == "label" else max(2, len(table) // LEAST_ROWS)

    def order(column: ColumnLook) -> tuple[bool, bool, int]:
        return hint.search(column.name) is None, column.kind == "numbers", column.values

    few = [c for c in look(table) if c.whole and 2 <= c.values <= most]
    return sorted(few, key=order)[:MOST_NAMED]
