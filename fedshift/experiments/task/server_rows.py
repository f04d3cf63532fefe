"""The server's own training examples: unlabeled ones to tune on, labelled ones to choose by."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedshift import shifts
from fedshift.errors import InputError, shown
from fedshift.experiments.config.schema import ServerData
from fedshift.seeds import numpy_generator
from fedshift.shifts.base import largest_remainder
from fedshift.tasks.cutting import client_rows
from fedshift.tasks.names import Coded
from fedshift.tasks.task import Task

Indices = NDArray[np.int64]


class ServerRows(NamedTuple):
    """Rows of the training file, each ascending: the server's two sets, then the clients'."""

    unlabeled: Indices
    validation: Indices
    others: Indices

    def following(self, y: Tensor, target: NDArray[np.float64], seed: int) -> ServerRows:
        """The largest subsets of the server's two sets whose labels follow T [K] = `target`.

        Raises InputError if a label of T is missing, or if nothing is left.
        """
        one, two = (
            _following(name, rows, y, target, seed)
            for name, rows in (("unlabeled", self.unlabeled), ("validation", self.validation))
        )
        return ServerRows(one, two, self.others)


def reserve(y: Tensor, classes: int, wanted: ServerData, seed: int) -> ServerRows:
    """Set rows apart for the server before any client gets one; y [n]: the training labels.

    Each set has the file's label proportions, rounded by largest remainders. The rows are drawn by
    `seed` alone, so that they do not depend on the clients. Raises InputError if there are too few.
    """
    labels = y.numpy()
    # The second set is drawn from what the first leaves, so that no example is in both.
    remaining, sets = np.arange(len(labels)), []
    for name, size in (("unlabeled", wanted.unlabeled), ("validation", wanted.validation)):
        if size >= len(remaining):
            raise InputError(
                f"server.{name} = {size}, and {len(remaining)} training examples are left; clients "
                "need some too"
            )
        counts = largest_remainder(
            np.bincount(labels[remaining], minlength=classes) * size / len(remaining)
        )
        # A random stream for each set, so that the size of one does not change the other's draws.
        order = numpy_generator(seed, "server", name).permutation(remaining)
        ranked = [order[labels[order] == c][:n] for c, n in enumerate(counts)]
        sets.append(np.sort(np.concatenate(ranked)))
        remaining = np.setdiff1d(remaining, sets[-1], assume_unique=True)
    return ServerRows(sets[0], sets[1], remaining)


def set_apart(task: Task, wanted: ServerData, seed: int) -> tuple[Task, ServerRows]:
    """Take rows for the server from a task's clients, as `reserve` draws them.

    Returns (the task without these rows, the rows). Raises InputError if there are too few rows,
    if a client would lose all of its own, and for labelled rows if the task is no classification.
    """
    rows = np.sort(np.concatenate(client_rows(task)))
    if wanted == ServerData():
        return task, ServerRows(rows[:0], rows[:0], rows)
    if wanted.validation and task.kind != "classification":
        raise InputError(
            f'server.validation = {wanted.validation} is for classes, and data.kind is "{task.kind}'
            '"; leave server.validation out'
        )
    labels = torch.from_numpy(task.labels.codes[rows])
    reserved = reserve(labels, len(task.labels.names), wanted, seed)
    apart = ServerRows(*(rows[places] for places in reserved))
    codes = task.places.codes.copy()
    codes[np.concatenate([apart.unlabeled, apart.validation])] = -1  # of no client
    left = replace(task, places=Coded(codes, task.places.names))
    for name, of in zip(task.clients, client_rows(left), strict=True):
        if not len(of):
            keys = _keys(wanted)
            sizes = " and ".join(f"{key} = {size}" for key, size in keys.items())
            raise InputError(
                f'{sizes} take{"s" * (len(keys) == 1)} every row of client "{shown(name)}"; give '
                "fewer"
            )
    return left, apart


def validating(task: Task, rows: Indices, target: NDArray[np.float64], seed: int) -> Indices:
    """Those of the server's labelled `rows` that validate: their labels follow T [K] = `target`.

    If T is that of the clients' own rows, all of them do, for they were drawn so. task: the one
    that still has these rows. Raises InputError if a label of T is missing.
    """
    if not len(rows) or task.target.kind in ("clients", "pooled"):
        return rows
    at_clients = task.labels.counts(np.concatenate(client_rows(task)))
    if len(alone := np.flatnonzero((target > 0) & (at_clients == 0))):
        raise InputError(
            f"server.validation = {len(rows)}: rows of clients cannot follow the target, whose "
            f'label "{shown(task.labels.names[alone[0]])}" no client has; leave server.validation '
            "out"
        )
    return _following("validation", rows, torch.from_numpy(task.labels.codes), target, seed)


def about_rows(apart: ServerRows, used: int) -> tuple[str, ...]:
    """Notes on the rows that `set_apart` took; used: how many of the labelled ones validate."""
    notes, (unlabeled, labelled) = [], map(len, apart[:2])
    if unlabeled:
        notes.append(f"{unlabeled:,} of the clients' rows are the server's, without their labels.")
    if labelled:
        these = "they validate" if used == labelled else f"{used:,} of them follow T and validate"
        notes.append(
            f"{labelled:,} of the clients' rows are the server's, with their labels; {these}."
        )
    return tuple(notes)


def lost_labels(task: Task, left: Task, wanted: ServerData) -> tuple[str, ...]:
    """A note on each client that `set_apart` has left without one of its labels."""
    codes, names, notes = task.labels.codes, task.labels.names, []
    for client, before, after in zip(
        task.clients, client_rows(task), client_rows(left), strict=True
    ):
        gone = np.setdiff1d(codes[before], codes[after])
        if len(gone):
            of = ", ".join(f'"{shown(names[y])}"' for y in gone)
            notes.append(
                f'The server has all rows of client "{shown(client)}" with label {of}; lower '
                f"{' or '.join(_keys(wanted))} if the client is to have it."
            )
    return tuple(notes)


def _keys(wanted: ServerData) -> dict[str, int]:
    """The keys of [server] that ask for rows."""
    return {f"server.{name}": size for name, size in wanted if size}


def _following(
    name: str, rows: Indices, y: Tensor, target: NDArray[np.float64], seed: int
) -> Indices:
    if not len(rows):
        return rows
    rng = numpy_generator(seed, "server follows", name)
    try:
        positions = shifts.resample_to(y.numpy()[rows], target, len(target), rng)
    except InputError as e:
        raise InputError(f"server.{name} = {len(rows)}: {e} Raise server.{name}.") from None
    return np.asarray(rows[positions])
