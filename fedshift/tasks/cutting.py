"""Which rows of a task are for training, for validation and for testing."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from fedshift.holdout import hold_out_by_label
from fedshift.tasks.fields import TaskFields
from fedshift.tasks.names import Ints


class Cut(NamedTuple):
    """Rows of each client by their use, and the rows that are the target's."""

    trains: list[Ints]
    validations: list[Ints]
    tests: list[Ints]
    target: Ints

    @property
    def rows(self) -> list[Ints]:
        """The sets that a federation keeps of its clients' rows, in the order of their storage."""
        return [*self.trains, *self.validations]


def client_rows(task: TaskFields) -> list[Ints]:
    """Rows of each training client that have a label, ascending."""
    n = len(task.places.codes) - task.outside
    order = np.argsort(task.places.codes[:n], kind="stable")
    ends = np.searchsorted(task.places.codes[order], np.arange(len(task.places.names) + 1))
    rows = [order[a:b] for a, b in pairwise(ends)]
    by_name = dict(zip(task.places.names, rows, strict=True))
    return [part[task.labels.codes[part] >= 0] for part in (by_name[c] for c in task.clients)]


def target_rows(task: TaskFields) -> Ints:
    """Labelled rows that are the target's: a client's that is held out, or those of a test set."""
    n = len(task.places.codes)
    rows = np.arange(n - task.outside, n)
    if task.target.kind == "client":
        rows = np.flatnonzero(task.places.codes == task.places.names.index(task.target.name))
    return rows[task.labels.codes[rows] >= 0]


def cut_rows(task: TaskFields, seed: int) -> Cut:
    """Tests and then validation of each client, by label; no label is looked at for more."""
    parts, y = client_rows(task), task.labels.codes
    tests: list[Ints] = []
    if task.target.cuts:
        parts, tests = hold_out_by_label(y, parts, task.test, seed, "test")
    trains, validations = hold_out_by_label(y, parts, task.validation, seed)
    return Cut(trains, validations, tests, target_rows(task))
