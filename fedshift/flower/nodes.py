"""Which node is which client: the one exchange before round 1.

Flower's node ids are drawn at random, and nodes come when they come. A client is its partition.
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
from fedshift.errors import InputError, shown
from fedshift.flower.arriving import Headers, read_arrays
from fedshift.flower.client import digest_of, form_of
from fedshift.flower.records import failure_of, fields_of
from fedshift.tree import Params

COLUMNS = ("n", "labels")
# Of a client's row: a million labels, and some.
MOST_BYTES = 1 << 23


@dataclass(frozen=True, eq=False)
class Met:
    """The federation as it registered: the node of each client, and the server's table.

    strangers: clients whose first model has the right form and other numbers
    """

    nodes: Mapping[int, int]
    table: Params
    strangers: tuple[int, ...]


@dataclass(frozen=True)
class Expected:
    """What the server expects: how many clients and classes, which columns, which first model."""

    clients: int
    classes: int
    columns: tuple[str, ...]
    params: Params
    buffers: Params


def columns_read(
    algorithm: Algorithm, params: Params, buffers: Params, clients: int, classes: int
) -> tuple[str, ...]:
    """The columns of the clients' table that the method reads, so that no other leaves a client.

    Found by letting it start on a table of ones; all, where it refuses that one.
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
        found = torch.ones(self.shapes[name], dtype=torch.float64)
        self.read.add(name)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


def meet(grid: Grid, expected: Expected, *, patience: float) -> Met:
    """Wait for all clients, and ask each who it is and for its row of the table.

    patience: seconds to wait for the nodes, and again for their answers. Raises InputError for
    fewer clients than expected, two nodes of one partition, partitions that do not exist, and
    clients with another model or another number of classes.
    """
    ids = _wait(grid, expected.clients, patience)
    asked = ConfigRecord({"columns": list(expected.columns), "classes": expected.classes})
    messages = [
        Message(RecordDict({"ask": asked}), message_type="query.register", dst_node_id=node)
        for node in ids
    ]
    names = names_of(grid)
    replies = list(grid.send_and_receive(messages, timeout=patience))
    found = _by_client([_told(reply, names) for reply in replies], expected.clients, names)
    if missing := sorted(set(range(expected.clients)) - found.keys()):
        raise InputError(
            f"{len(found)} of {expected.clients} clients answered within {patience:g} s; no word "
            f"from partitions {missing}"
        )
    return _met([found[i] for i in range(expected.clients)], expected)


def names_of(grid: Grid) -> dict[int, str]:
    """What operators called the nodes when they registered them, where they did."""
    return {node.node_id: node.name for node in grid.get_nodes() if node.name}


def _named(node: int, names: Mapping[int, str]) -> str:
    return f'node {node} ("{names[node]}")' if node in names else f"node {node}"


def _wait(grid: Grid, clients: int, patience: float) -> list[int]:
    """The ids of all nodes, once there are as many as clients."""
    end = time.monotonic() + patience
    while len(ids := sorted(grid.get_node_ids())) < clients:
        if time.monotonic() > end:
            known = sorted(names_of(grid).values())
            named = f" ({', '.join(known)})" if known else ""
            raise InputError(
                f"{len(ids)} of {clients} clients are connected after {patience:g} s{named}; "
                "start the others, or expect fewer"
            )
        time.sleep(0.05)
    return ids


class _Told(NamedTuple):
    """What a node registered with."""

    node: int
    client: int
    form: list[str]
    digest: str
    row: Params


def _told(reply: Message, names: Mapping[int, str]) -> _Told:
    """A node's registration. Raises InputError, naming it, where it cannot be read."""
    node = reply.metadata.src_node_id
    try:
        if (why := failure_of(reply)) is None:
            who = fields_of(reply.content, "who")
            row = read_arrays(reply.content.array_records, MOST_BYTES, Headers())["table"]
            form = [str(line) for line in who["form"]]
            return _Told(node, int(who["client"]), form, str(who["digest"]), row)
    except Exception as e:
        # Bytes from elsewhere: whatever they make a decoder raise is the reason.
        odd = f"its answer cannot be read: {type(e).__name__}: {e}"
        why = str(e) if isinstance(e, InputError) else shown(" ".join(odd.split()), 300)
    raise InputError(f"{_named(node, names)} cannot take part: {why}")


def _by_client(told: Iterable[_Told], clients: int, names: Mapping[int, str]) -> dict[int, _Told]:
    found: dict[int, _Told] = {}
    for one in sorted(told, key=lambda one: one.node):
        node, client = one.node, one.client
        if not 0 <= client < clients:
            raise InputError(
                f"{_named(node, names)} has partition-id {client}; with {clients} clients they are "
                f"0..{clients - 1}"
            )
        if client in found:
            other = found[client].node
            raise InputError(
                f"{_named(other, names)} and {_named(node, names)} both have partition-id "
                f"{client}; give each node one of its own"
            )
        found[client] = one
    return found


def _met(told: Sequence[_Told], expected: Expected) -> Met:
    own = form_of(expected.params, expected.buffers)
    digest, strangers, rows = digest_of(expected.params, expected.buffers), [], []
    for i, one in enumerate(told):
        _check_form(i, one.form, own)
        if one.digest != digest:
            strangers.append(i)
        rows.append(_row(i, one.row, expected))
    table = {c: torch.stack([row[c] for row in rows]) for c in expected.columns}
    nodes = {i: one.node for i, one in enumerate(told)}
    return Met(nodes, table, tuple(strangers))


def _check_form(client: int, theirs: Sequence[str], ours: Sequence[str]) -> None:
    if list(theirs) == list(ours):
        return
    odd = [line for line in theirs if line not in ours] or ["nothing of its own"]
    lost = [line for line in ours if line not in theirs] or ["nothing else"]
    raise InputError(
        f"client {client} has another model than the server: {'; '.join(odd[:3])}, where the "
        f"server has {'; '.join(lost[:3])}. Give both the same network and number of classes"
    )


def _row(client: int, row: Params, expected: Expected) -> Params:
    """The client's row, if it is one. A table is sizes and counts: finite, whole, not negative."""
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
