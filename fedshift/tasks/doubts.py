"""Warnings about a table: columns that reveal the label, numbers that stand for missing ones."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from fedshift.errors import shown
from fedshift.tasks.names import Coded, Ints, coded
from fedshift.tasks.rows import Columns, Numbers

# With fewer rows there are no warnings. A column with more values is hardly the label in disguise.
FEWEST, MOST = 20, 50
# A sample of so many rows is checked first, which is enough to clear most columns.
SAMPLE = 2_000
# Numbers that people write for "not measured".
STAND_INS = re.compile(r"-1|-?9{2,}")


def doubts(table: Columns, client: str, label: str, learned: Sequence[str]) -> list[str]:
    """Warnings to look at before training; learned: the columns that a model gets.

    >>> table = Columns({name: coded([*text] * 20) for name, text in
    ...                  {"site": "aabb", "y": "0101", "x": "stst"}.items()})
    >>> doubts(table, "site", "y", ["x"])[0].partition(".")[0]
    'Column "x" tells the label "y" in every row'
    """
    names = coded(table.of[client]).names
    made = [f'All rows are of one client, "{shown(names[0])}".'] if len(names) == 1 else []
    if len(table) >= FEWEST:
        made += _about_copies(table, [*learned, label])
        made += _about_columns(table, client, label, learned)
    return made


def _about_copies(table: Columns, names: Sequence[str]) -> list[str]:
    """A sentence on rows that are alike in all columns, where chance would hardly make any.

    By chance, n rows of independent columns make n^2/2 * prod_c q_c pairs of equals, where q_c is
    the share of pairs of different rows that are alike in column c. Columns that follow each other
    make more. So nothing is said of a table of few values, whose rows stand there four times or
    more in the mean; nor below 1 % of the rows, since few copies do little harm.
    """
    import pandas as pd

    values = [_values(table.of[name]) for name in names]
    rows = pd.DataFrame(dict(enumerate(values)))
    different = rows[~rows.duplicated()]
    n, m = len(rows), len(different)
    counts = [different[i].value_counts(dropna=False).to_numpy() for i in different]
    pairs = [float((k * (k - 1.0)).sum()) / max(1, m * (m - 1)) for k in counts]
    copies, by_chance = n - m, n * n / 2 * float(np.prod(pairs))
    if m < n / 4 or copies < max(FEWEST / 4, n / 100) or copies <= 10 * by_chance:
        return []
    return [
        f"Rows that repeat another one in every column that is learned from, and its label: "
        f"{copies:,}. If they are copies, remove them: among training, validation and test rows "
        "they make a model look better than it is."
    ]


def _about_columns(
    table: Columns, client: str, label: str, learned: Sequence[str]
) -> Iterator[str]:
    every = np.arange(len(table))
    looks = every[:: max(1, len(every) // SAMPLE)], every
    for name in learned:
        column = table.of[name]
        start, drop = f'Column "{shown(name)}"', f'give drop=["{shown(name)}"]'
        if all(_tells(column, table.of[label], rows) for rows in looks):
            what = f'tells the label "{shown(label)}" in every row'
            yield f"{start} {what}. If it is the label by another name, {drop}."
        elif all(_follow_each_other(column, table.of[client], rows) for rows in looks):
            yield f"{start} names the clients once more; {drop}."
        elif not isinstance(column, Coded) and (odd := _stand_in(column)):
            yield (
                f"{start} holds {odd} several times, far from its other values. If that stands for "
                "a missing one, empty these cells."
            )


def _values(column: Numbers | Coded) -> np.ndarray[Any, np.dtype[Any]]:
    return column.codes if isinstance(column, Coded) else column


def _tells(column: Numbers | Coded, label: Numbers | Coded, rows: Ints) -> bool:
    """Whether the column determines the label, by its values or by thresholds between them."""
    given, due = _values(column)[rows], _values(label)[rows]
    some = due >= 0 if isinstance(label, Coded) else ~np.isnan(due)
    if not isinstance(column, Coded):
        some &= ~np.isnan(given)
    given, due = given[some], due[some]
    if len(due) < FEWEST or _follows(given, due) or isinstance(column, Coded):
        return _follows(given, due)
    classes = len(np.unique(due))
    if classes > MOST:
        return not isinstance(label, Coded) and _is_linear(given, due)
    order = np.lexsort((due, given))
    changes = np.diff(due[order]) != 0
    once = 0 < changes.sum() == classes - 1
    return bool(once and (np.diff(given[order])[changes] > 0).all())


def _follows(given: np.ndarray[Any, Any], due: np.ndarray[Any, Any]) -> bool:
    """Whether `given` determines `due`, with so few different values that this is no chance."""
    values, place = np.unique(given, return_inverse=True)
    if not len(values) or len(values) > MOST or 5 * len(values) > len(given):
        return False
    return len(np.unique(np.stack([place, due]), axis=1).T) == len(values) and np.ptp(due) > 0


def _follow_each_other(column: Numbers | Coded, client: Numbers | Coded, rows: Ints) -> bool:
    one, other = _values(column)[rows], _values(client)[rows]
    return _follows(one, other) and _follows(other, one)


def _is_linear(one: Numbers, other: Numbers) -> bool:
    both = np.stack([one, other]).astype(np.float64)
    both -= both.mean(1, keepdims=True)
    xy, xx, yy = (float(both[i] @ both[j]) for i, j in ((0, 1), (0, 0), (1, 1)))
    return xx * yy > 0 and xy * xy > (1 - 1e-9) * xx * yy


def _stand_in(v: Numbers) -> str:
    """A smallest or largest number such as -999, far from the other values; "" if there is none."""
    v = v[~np.isnan(v)]
    for end, sign in ((v.min(), 1), (v.max(), -1)) if len(v) else ():
        if not STAND_INS.fullmatch(f"{end:g}"):
            continue
        rest = sign * np.unique(v[v != end])
        below = end < 0 <= rest.min()
        apart = rest.min() - sign * end > np.ptp(rest) or below
        if len(rest) > FEWEST // 2 and apart and np.count_nonzero(v == end) > 1:
            return f"{end:g}"
    return ""
