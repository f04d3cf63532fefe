"""Targets that vary: which clients are held out in turn, and notes on their rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedshift.errors import InputError
from fedshift.tasks.names import listed, many
from fedshift.tasks.task import Task


def targets_of(task: Task, names: Sequence[str] | None) -> tuple[str, ...]:
    """The clients to hold out: those named, or else all that have a labelled row.

    Raises InputError for a name that is no client's or is given twice, and for an empty list.
    """
    if isinstance(names, str):
        raise InputError(f'targets = "{names}": give a list of clients, as ["{names}"]')
    chosen = task.labelled if names is None else tuple(names)
    if len(set(chosen)) < len(chosen):
        raise InputError("targets: a client is there twice; give each once")
    for name in chosen:
        task.held_out(name)  # its result is not needed: it raises for a name that is no client's
    if not chosen:
        raise InputError("targets is empty; give at least one client, or leave it out")
    return chosen


def about_targets(task: Task, names: Sequence[str]) -> tuple[str, ...]:
    """Sentences: how many rows test, and which targets have labels that no other client has."""
    counts = np.zeros((len(task.places.names), max(len(task.labels.names), 1)), dtype=np.int64)
    rows = (task.labels.codes >= 0) & (task.places.codes >= 0)
    np.add.at(counts, (task.places.codes[rows], task.labels.codes[rows]), 1)
    places = [task.places.names.index(name) for name in names]
    sizes = sorted(int(counts[i].sum()) for i in places)
    few = many(sizes[0], "row")
    size = few if sizes[0] == sizes[-1] else f"{sizes[0]:,} to {sizes[-1]:,} rows"
    notes = (f"Each target is tested on {size}.",)
    if task.kind != "classification":
        return notes
    # A label belongs to one client alone if all rows with it are that client's.
    alone = (counts > 0) & (counts.sum(0) == counts)
    hard = [name for i, name in zip(places, names, strict=True) if alone[i].any()]
    if not hard:
        return notes
    verb = "has" if len(hard) == 1 else "have"
    return (
        *notes,
        f"Of these, {listed(hard)} {verb} a label that no other client has: no model is trained "
        "on it there.",
    )
