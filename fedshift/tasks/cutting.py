"""Cutting a task's rows into training, validation and test rows."""

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
        """The clients' training rows and then their validation rows, in the order of storage."""
        return [*self.trains, *self.validations]


def client_rows(task: TaskFields) -> list[Ints]:
    """The labelled rows of each training client, ascending."""
    n = len(task.places.codes) - task.outside
    # Sorted by client, so that each client's rows are one slice. A single pass is enough for any
    # number of clients.
    order = np.argsort(task.places.codes[:n], kind="stable")
    ends = np.searchsorted(task.places.codes[order], np.arange(len(task.places.names) + 1))
    rows = [order[a:b] for a, b in pairwise(ends)]
    by_name = dict(zip(task.places.names, rows, strict=True))
    return [part[task.labels.codes[part] >= 0] for part in (by_name[c] for c in task.clients)]


def target_rows(task: TaskFields) -> Ints:
    """The labelled rows of the target: those of the client that is held out, or of the test set."""
    n = len(task.places.codes)
    rows = np.arange(n - task.outside, n)
    if task.target.kind == "client":
        rows = np.flatnonzero(task.places.codes == task.places.names.index(task.target.name))
    return rows[task.labels.codes[rows] >= 0]


def cut_rows(task: TaskFields, seed: int) -> Cut:
    """Hold out each client's test rows and then its validation rows, stratified by label."""
    parts, y = client_rows(task), task.labels.codes
    tests: list[Ints] = []
    if task.target.cuts:
        parts, tests = hold_out_by_label(y, parts, task.test, seed, "test")
    trains, validations = hold_out_by_label(y, parts, task.validation, seed)
    return Cut(trains, validations, tests, target_rows(task))
