"""Find out which node is which client, in one exchange before round 1.

Flower's node ids are random, and nodes connect in any order. A client is identified by its
partition.
"""

from __future__ import annotations

import logging
import time
from collections import UserDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

import torch
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from torch import Tensor

from fedshift.algorithms.method import Method
from fedshift.arguments import check_whole
from fedshift.errors import InputError, from_elsewhere
from fedshift.flower.arriving import read_arrays
from fedshift.flower.client import digest_of, form_of
from fedshift.flower.records import failure_of, fields_of
from fedshift.flower.scoring import MOST_EXAMPLES
from fedshift.flower.waiting import Attendance, Tell
from fedshift.tree import Params

LOG = logging.getLogger("fedshift.flower")
COLUMNS = ("n", "labels")
# Bytes that a client's row may have besides its numbers; most tensors of a model that are compared.
ROOM, MOST_LINES = 1 << 16, 100_000


@dataclass(frozen=True, eq=False)
class Met:
    """The registered federation: the node of each client, and the server's table.

    Clients that have not joined have no node, and rows of 0.

    strangers  clients whose first model has the right form but other numbers
    refused    nodes that cannot take part; they are not asked again while they are connected
    """

    nodes: Mapping[int, int]
    table: Params
    strangers: tuple[int, ...]
    refused: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Expected:
    """What the server expects: numbers of clients and classes, the columns, the first model.

    places: nodes were registered with the names of clients' folders, and may only be these clients.
    """

    clients: int
    classes: int
    columns: tuple[str, ...]
    params: Params
    buffers: Params
    places: bool = False


def columns_read(
    algorithm: Method, params: Params, buffers: Params, clients: int, classes: int
) -> tuple[str, ...]:
    """The columns of the clients' table that the method reads; no other column leaves a client.

    Determined by calling the method's `init` with a table of ones; all columns if it refuses that.
    """
    # Ones, not zeros, because a method may divide by sizes.
    ones = torch.ones(clients, classes, dtype=torch.float64)
    table = _Watched({"n": ones[:, 0].clone(), "labels": ones})
    try:
        algorithm.init(params, buffers, cast(Params, table))
    except InputError:
        return COLUMNS
    return tuple(c for c in COLUMNS if c == "n" or c in table.read)


class _Watched(UserDict[str, Tensor]):
    """A table that records which columns were read."""

    def __init__(self, table: Params) -> None:
        super().__init__(table)
        self.read = set[str]()

    def __getitem__(self, name: str) -> Tensor:
        self.read.add(name)
        return super().__getitem__(name)


def check_min_clients(min_clients: int | None, clients: int) -> None:
    """Raise InputError unless the number of clients to start with is possible."""
    if min_clients is not None:
        check_whole("min_clients", min_clients)
        if not 1 <= min_clients <= clients:
            raise InputError(f"min_clients={min_clients}; with {clients} clients give 1..{clients}")


def tell_nothing(event: object) -> None:
    """A listener that ignores events."""


def meet(
    grid: Grid, expected: Expected, *, patience: float, min_clients: int | None = None,
    tell: Tell = tell_nothing,
) -> Met:  # fmt: skip
    """Wait for all clients, and ask each for its id and its row of the table.

    patience     seconds to wait for the nodes, and again for their answers
    min_clients  after that, so many clients are enough; the rows of the others are 0
    tell         called with events about missing clients

    Raises InputError for fewer clients than expected, two nodes of one partition, partitions that
    do not exist, and clients with another model or another number of classes.
    """
    least = expected.clients if min_clients is None else min_clients
    ids = _wait_for_nodes(grid, expected.clients, least, patience, tell)
    shapes = {"n": (expected.clients,), "labels": (expected.clients, expected.classes)}
    table = {c: torch.zeros(shapes[c], dtype=torch.float64) for c in expected.columns}
    met, problems = _register(grid, ids, expected, Met({}, table, ()), patience)
    for node, why in problems.items():
        raise InputError(f"{named(node, names_of(grid))} cannot take part: {why}")
    if len(met.nodes) < least:
        missing = sorted(set(range(expected.clients)) - met.nodes.keys())
        raise InputError(
            f"{len(met.nodes)} of {expected.clients} clients answered within {patience:g} s; no "
            f"word from partitions {missing}"
        )
    return met


def join(
    grid: Grid, expected: Expected, met: Met, patience: float, tell: Tell = tell_nothing
) -> Met:
    """The federation, extended by nodes that have connected since.

    patience  seconds to wait for their answers. Nodes that were refused are not asked again while
              they are connected: a silent one would delay every round
    tell      called with events about nodes that cannot take part
    """
    new = set(grid.get_node_ids()) - set(met.nodes.values())
    asked = sorted(new - met.refused)
    if not asked:
        return replace(met, refused=met.refused & new)
    more, problems = _register(grid, asked, expected, met, patience)
    for i in sorted(more.nodes.keys() - met.nodes.keys()):
        LOG.info("client %d has joined", i)
    silent = {*asked} - {*more.nodes.values()} - problems.keys()
    problems |= dict.fromkeys(sorted(silent), "it does not answer")
    tell_refused(problems, names_of(grid), tell)
    # Forget refused nodes that have left: the operator may repair them and start them again.
    return replace(more, refused=(met.refused & new) | problems.keys())


def tell_refused(problems: Mapping[int, str], names: Mapping[int, str], tell: Tell) -> None:
    """Log and tell why these nodes, which have joined late, cannot take part."""
    for node, why in problems.items():
        LOG.warning("%s has joined late, and cannot take part: %s", named(node, names), why)
        tell({"event": "refused", "node": names.get(node) or named(node, names), "reason": why})


def _register(
    grid: Grid, asked: Iterable[int], expected: Expected, met: Met, patience: float
) -> tuple[Met, dict[int, str]]:
    """Ask these nodes to register: (the federation with them, why others cannot take part)."""
    request = ConfigRecord({"columns": list(expected.columns), "classes": expected.classes})
    messages = [
        Message(RecordDict({"ask": request}), message_type="query.register", dst_node_id=node)
        for node in asked
    ]
    names, digest = names_of(grid), digest_of(expected.params, expected.buffers)
    nodes, strangers, problems = dict(met.nodes), list(met.strangers), dict[int, str]()
    table = {c: column.clone() for c, column in met.table.items()}
    replies = grid.send_and_receive(messages, timeout=patience)
    # By node, so that nothing depends on which reply came first.
    for reply in sorted(replies, key=lambda reply: reply.metadata.src_node_id):
        node = reply.metadata.src_node_id
        try:
            one = _registration(reply, expected)
            if expected.places:
                check_name(node, one.client, names)
            if one.client in nodes:
                raise InputError(
                    f"{named(nodes[one.client], names)} and {named(node, names)} both have "
                    f"partition-id {one.client}; give each node one of its own"
                )
        except Exception as e:
            # The bytes come from another machine: any exception means that they are invalid.
            odd = f"its answer cannot be read: {type(e).__name__}: {e}"
            problems[node] = from_elsewhere(str(e) if isinstance(e, InputError) else odd, 1000)
            continue
        nodes[one.client] = node
        strangers += [one.client] if one.digest != digest else []
        for c, column in table.items():
            column[one.client] = one.row[c]
    return Met(nodes, table, tuple(strangers)), problems


def names_of(grid: Grid) -> dict[int, str]:
    """The names that operators gave to nodes on registration; nodes without one are left out."""
    return {node.node_id: node.name for node in grid.get_nodes() if node.name}


def named(node: int, names: Mapping[int, str]) -> str:
    """How messages refer to a node: by its id and, if it has one, its name."""
    return f'node {node} ("{names[node]}")' if node in names else f"node {node}"


def check_name(node: int, client: int, names: Mapping[int, str]) -> None:
    """Raise InputError if the name with which a node's key was registered is another client's."""
    name = names.get(node, f"client-{client}")
    if name != f"client-{client}":
        raise InputError(
            f"it has the key of {name} and says that it is client {client}; give each client's "
            "folder to one client, with the client.json that it had"
        )


def _wait_for_nodes(grid: Grid, clients: int, least: int, patience: float, tell: Tell) -> list[int]:
    """The ids of all nodes, when all clients are connected, or `least` of them after `patience`."""
    end, attendance = time.monotonic() + patience, Attendance(clients, tell)

    def missing() -> list[str]:
        return _absent_clients(clients, names_of(grid))

    while len(ids := sorted(grid.get_node_ids())) < clients:
        attendance.see(ids, missing)
        if time.monotonic() > end:
            if len(ids) >= least:
                break
            raise InputError(
                f"{len(ids)} of {clients} clients are connected after {patience:g} s"
                f"{_missing_text(clients, names_of(grid))}; start the others, or expect fewer"
            )
        time.sleep(0.05)  # Flower has no event for a new node
    attendance.see(ids, missing)
    return ids


def _missing_text(clients: int, names: Mapping[int, str]) -> str:
    """Text that names the missing clients, else the connected nodes; "" if nodes have no names."""
    if absent := _absent_clients(clients, names):
        return f", without {', '.join(absent)}"
    return f" ({', '.join(sorted(names.values()))})" if names else ""


def _absent_clients(clients: int, names: Mapping[int, str]) -> list[str]:
    """The clients that are not connected; [] if nodes do not have the names of clients' folders."""
    connected, places = set(names.values()), [f"client-{i}" for i in range(clients)]
    ours = connected and not connected - set(places)
    return [one for one in places if one not in connected] if ours else []


class _Registration(NamedTuple):
    """A node's registration: its client id, its model's digest, its row of the table."""

    client: int
    digest: str
    row: Params


def _registration(reply: Message, expected: Expected) -> _Registration:
    """A node's registration. Raises InputError if it does not fit what is expected."""
    if (why := failure_of(reply)) is not None:
        raise InputError(why)
    identity = fields_of(reply.content, "who")
    client = int(identity["client"])
    if not 0 <= client < expected.clients:
        raise InputError(
            f"it has partition-id {client}; with {expected.clients} clients they are "
            f"0..{expected.clients - 1}"
        )
    form = [str(line) for line in identity["form"][:MOST_LINES]]
    _check_form(client, form, form_of(expected.params, expected.buffers))
    most = ROOM + 8 * (1 + expected.classes)
    row = read_arrays(reply.content.array_records, most)["table"]
    return _Registration(client, str(identity["digest"]), _row(client, row, expected))


def _check_form(client: int, theirs: Sequence[str], ours: Sequence[str]) -> None:
    """Raise InputError if a client's model has other tensors than the server's."""
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
    """The client's row. Raises InputError unless sizes and counts are whole and not negative."""
    shapes = {"n": (), "labels": (expected.classes,)}
    for c in expected.columns:
        v = row.get(c)
        if v is None or tuple(v.shape) != shapes[c] or v.dtype != torch.float64:
            raise InputError(f'client {client} registered with a misshapen "{c}"')
        # NaN fails all of these comparisons.
        if not bool(((v >= 0) & (v <= MOST_EXAMPLES) & (v == v.round())).all()):
            raise InputError(
                f'client {client} registered with "{c}" = {v.tolist()}: no counts, which are whole '
                f"numbers from 0 to {MOST_EXAMPLES:.0e}"
            )
    if "labels" in expected.columns and float(row["labels"].sum()) != float(row["n"]):
        raise InputError(
            f"client {client} registered {row['labels'].sum():g} labels for {row['n']:g} examples"
        )
    return row
