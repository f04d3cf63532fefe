"""Clients that join after the first round: add their rows to the server's state.

Weights come from the table of what clients registered. A client that is absent at the start has
rows of 0 there, and is left out of every round like one that drops out, so that these rows are not
read until it joins. For that, a method's state before round 1 may depend on a client's counts only
in this client's rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedshift.algorithms.method import Method
from fedshift.engine.round import Round, before_rounds
from fedshift.errors import DataError, InputError
from fedshift.flower.nodes import Met
from fedshift.tree import Params, Parts


def with_rows(server: Parts, before: Parts, after: Parts, clients: Sequence[int]) -> Parts:
    """`server`, with these clients' rows taken from `after` where it differs from `before`.

    Both are states before round 1. Raises InputError if they differ in more than these rows.

    >>> one, two = {"table": {"n": torch.tensor([3, 0])}}, {"table": {"n": torch.tensor([3, 5])}}
    >>> with_rows(one, one, two, [1])["table"]["n"].tolist()
    [3, 5]
    """
    changed = {part: dict(tree) for part, tree in server.items()}
    for part, tree in after.items():
        for name, new in tree.items():
            old = before[part][name]
            if old.shape == new.shape and torch.equal(old, new):
                continue
            if not (old.shape == new.shape and torch.equal(_patch_rows(old, new, clients), new)):
                raise InputError(
                    f'this method mixes the counts of all clients before round 1 ("{part}/{name}"),'
                    " so that none can join late"
                )
            changed[part][name] = _patch_rows(server[part][name], new, clients)
    return changed


def _patch_rows(column: Tensor, new: Tensor, clients: Sequence[int]) -> Tensor:
    """The column with these clients' rows taken from `new`, if it has a row for each client."""
    if not column.dim() or len(column) <= max(clients):
        return column
    rows = list(clients)
    return column.index_copy(0, torch.tensor(rows), new[rows])


def check_can_wait(algorithm: Method, absent: Sequence[int]) -> None:
    """Raise InputError for a method that cannot begin without the counts of `absent` clients."""
    mixes = algorithm.mixes_counts()
    if absent and mixes:
        raise InputError(
            f"clients {list(absent)} have not joined, and rounds of this method depend on the "
            "counts of all clients: leave out --min-clients, or start the others"
        )


def adopt(
    algorithm: Method, params: Params, buffers: Params, current: Round | None, met: Met
) -> Round:
    """The current state with the rows of clients that are new in it; if it is None, a first state.

    Raises DataError if a client registered other counts before.
    """
    first = algorithm.init(params, buffers, met.table)
    if current is None:
        return before_rounds(first)
    late = _without_rows(current.server.get("table", {}), first.get("table", {}), met)
    if not late:
        return current
    # The first state without them shows which entries their counts change.
    rows = torch.tensor(late)
    table = {name: column.index_fill(0, rows, 0.0) for name, column in met.table.items()}
    before = algorithm.init(params, buffers, table)
    return current._replace(server=with_rows(current.server, before, first, late))


def _without_rows(saved: Params, fresh: Params, met: Met) -> list[int]:
    """Clients that have registered counts, but have none in the saved table."""
    late = set()
    for name in sorted(saved.keys() | fresh.keys()):
        same = name in saved and name in fresh
        for i in met.nodes:
            if same and torch.equal(saved[name][i], fresh[name][i]):
                continue
            # A saved row of 0 means that the client had not joined.
            if not same or saved[name][i].any():
                raise DataError(
                    f'client {i} registered another "{name}" than when this run began: its data '
                    "have changed; bring them back, or start a new run"
                )
            late.add(i)
    return sorted(late)
