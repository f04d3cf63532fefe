"""Find out which node is which client, in one exchange before round 1.

Flower's node ids are random, and nodes connect in any order. A client is identified by its
partition.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from torch import Tensor

from fedshift.algorithms.base import Algorithm
from fedshift.errors import InputError, from_elsewhere
from fedshift.flower.arriving import Headers, read_arrays
from fedshift.flower.client import digest_of, form_of
from fedshift.flower.records import failure_of, fields_of
from fedshift.tree import Params

COLUMNS = ("n", "labels")
# Bytes of a client's row beside its numbers, and tensors of a model that are compared by name.
ROOM, MOST_LINES = 1 << 16, 100_000


@dataclass(frozen=True, eq=False)
class Met:
    """The registered federation: the node of each client, and the server's table.

    strangers: clients whose first model has the right form but other numbers
    """

    nodes: Mapping[int, int]
    table: Params
    strangers: tuple[int, ...]


@dataclass(frozen=True)
class Expected:
    """What the server expects: numbers of clients and classes, the columns, the first model."""

    clients: int
    classes: int
    columns: tuple[str, ...]
    params: Params
    buffers: Params


def columns_read(
    algorithm: Algorithm, params: Params, buffers: Params, clients: int, classes: int
) -> tuple[str, ...]:
    """The columns of the clients' table that the method reads; no other column leaves a client.

    Found by starting the method on a table of ones; all columns if it refuses that table.
    """
    table = _Watched({"n": (clients,), "labels": (clients, classes)})
    try:
        algorithm.init(params, buffers, cast(Params, table))
    except InputError:
        return COLUMNS
    return tuple(c for c in COLUMNS if c == "n" or c in table.read)


class _Watched(Mapping[str, Tensor]):
    """Columns of ones that remember which of them were read."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.shapes = shapes
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Tensor:
        # Ones: a method that divides by sizes gets no zeros.
        column = torch.ones(self.shapes[name], dtype=torch.float64)
        self.read.add(name)
        return column

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


def meet(grid: Grid, expected: Expected, *, patience: float) -> Met:
    """Wait for all clients, and ask each for its id and its row of the table.

    patience: seconds to wait for the nodes, and again for their answers. Raises InputError for
    fewer clients than expected, two nodes of one partition, partitions that do not exist, and
    clients with another model or another number of classes.
    """
    ids = _wait(grid, expected.clients, patience)
    request = ConfigRecord({"columns": list(expected.columns), "classes": expected.classes})
    messages = [
        Message(RecordDict({"ask": request}), message_type="query.register", dst_node_id=node)
        for node in ids
    ]
    names = names_of(grid)
    replies = list(grid.send_and_receive(messages, timeout=patience))
    registered = _by_client(
        [_registration(reply, names, expected) for reply in replies], expected.clients, names
    )
    if missing := sorted(set(range(expected.clients)) - registered.keys()):
        raise InputError(
            f"{len(registered)} of {expected.clients} clients answered within {patience:g} s; no "
            f"word from partitions {missing}"
        )
    return _federation([registered[i] for i in range(expected.clients)], expected)


def names_of(grid: Grid) -> dict[int, str]:
    """The names that operators gave to nodes on registration; nodes without one are left out."""
    return {node.node_id: node.name for node in grid.get_nodes() if node.name}


def named(node: int, names: Mapping[int, str]) -> str:
    """A node in messages: its id and, where it has one, its name."""
    return f'node {node} ("{names[node]}")' if node in names else f"node {node}"


def _wait(grid: Grid, clients: int, patience: float) -> list[int]:
    """The ids of all nodes, once there are as many as clients."""
    end = time.monotonic() + patience
    while len(ids := sorted(grid.get_node_ids())) < clients:
        if time.monotonic() > end:
            names = sorted(names_of(grid).values())
            connected = f" ({', '.join(names)})" if names else ""
            raise InputError(
                f"{len(ids)} of {clients} clients are connected after {patience:g} s{connected}; "
                "start the others, or expect fewer"
            )
        time.sleep(0.05)  # Flower has no event for a new node
    return ids


class _Registration(NamedTuple):
    """What a node registered with."""

    node: int
    client: int
    form: list[str]
    digest: str
    row: Params


def _registration(reply: Message, names: Mapping[int, str], expected: Expected) -> _Registration:
    """A node's registration. Raises InputError, naming it, where it cannot be read."""
    node = reply.metadata.src_node_id
    try:
        if (why := failure_of(reply)) is None:
            identity = fields_of(reply.content, "who")
            most = ROOM + 8 * (1 + expected.classes)
            row = read_arrays(reply.content.array_records, most, Headers())["table"]
            form = [str(line) for line in identity["form"][:MOST_LINES]]
            return _Registration(node, int(identity["client"]), form, str(identity["digest"]), row)
    except Exception as e:
        # The bytes come from another machine: any exception means that they are bad.
        problem = f"its answer cannot be read: {type(e).__name__}: {e}"
        why = str(e) if isinstance(e, InputError) else problem
    raise InputError(f"{named(node, names)} cannot take part: {from_elsewhere(why)}")


def _by_client(
    registrations: Iterable[_Registration], clients: int, names: Mapping[int, str]
) -> dict[int, _Registration]:
    by_client: dict[int, _Registration] = {}
    for one in sorted(registrations, key=lambda one: one.node):
        node, client = one.node, one.client
        if not 0 <= client < clients:
            raise InputError(
                f"{named(node, names)} has partition-id {client}; with {clients} clients they are "
                f"0..{clients - 1}"
            )
        if client in by_client:
            other = by_client[client].node
            raise InputError(
                f"{named(other, names)} and {named(node, names)} both have partition-id "
                f"{client}; give each node one of its own"
            )
        by_client[client] = one
    return by_client


def _federation(registrations: Sequence[_Registration], expected: Expected) -> Met:
    form = form_of(expected.params, expected.buffers)
    digest, strangers, rows = digest_of(expected.params, expected.buffers), [], []
    for i, one in enumerate(registrations):
        _check_form(i, one.form, form)
        if one.digest != digest:
            strangers.append(i)
        rows.append(_row(i, one.row, expected))
    table = {c: torch.stack([row[c] for row in rows]) for c in expected.columns}
    nodes = {i: one.node for i, one in enumerate(registrations)}
    return Met(nodes, table, tuple(strangers))


def _check_form(client: int, theirs: Sequence[str], ours: Sequence[str]) -> None:
    if list(theirs) == list(ours):
        return
    extra = [from_elsewhere(line, 100) for line in theirs if line not in ours] or [
        "nothing of its own"
    ]
    missing = [line for line in ours if line not in theirs] or ["nothing else"]
    raise InputError(
        f"client {client} has another model than the server: {'; '.join(extra[:3])}, where the "
        f"server has {'; '.join(missing[:3])}. Give both the same network and number of classes"
    )


def _row(client: int, row: Params, expected: Expected) -> Params:
    """The client's row, checked: sizes and counts are finite, whole and not negative."""
    shapes = {"n": (), "labels": (expected.classes,)}
    for c in expected.columns:
        v = row.get(c)
        if v is None or tuple(v.shape) != shapes[c] or v.dtype != torch.float64:
            raise InputError(f'client {client} registered with a misshapen "{c}"')
        if not bool(torch.isfinite(v).all()) or bool((v < 0).any()) or bool((v != v.round()).any()):
            raise InputError(f'client {client} registered with "{c}" = {v.tolist()}: no counts')
    if "labels" in expected.columns and float(row["labels"].sum()) != float(row["n"]):
        raise InputError(
            f"client {client} registered {row['labels'].sum():g} labels for {row['n']:g} examples"
        )
    return row
