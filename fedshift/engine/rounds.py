"""Rounds: the one place where a cohort is drawn, trained and folded into the server's state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedshift.algorithms.base import Algorithm
from fedshift.client.local import plan_all
from fedshift.data import ClientData, check_clients
from fedshift.engine.backends import Backend, Job, Reply, loop
from fedshift.engine.replies import check_replies
from fedshift.errors import InputError
from fedshift.model import Model, check_columns, dry_logits
from fedshift.seeds import Seeds, generator, key
from fedshift.server.combine import check_weights
from fedshift.tree import Params, Parts, stack

States = Mapping[int, Parts]


class Dropped(NamedTuple):
    """A client that was drawn and gave nothing that can be used, and why."""

    client: int
    reason: str


class Round(NamedTuple):
    """The state after round t (1-based), and who was drawn, who trained, with which weights.

    dropped: those of the draw that are not in `cohort`, since a message or an answer went lost.
    Rounds in one process have none: there, what one client gets wrong ends the run.
    """

    t: int
    server: Parts
    states: States
    cohort: Tensor
    weights: Tensor
    trained: tuple[int, ...]
    loss: float
    dropped: tuple[Dropped, ...] = ()


@dataclass(frozen=True)
class Federation:
    """Clients, first model and seeds: all that a run needs besides the algorithm.

    Clients' ids are their positions. `table` is what they registered (n [N], labels [N, K]).
    Raises InputError for clients that do not fit together (`fedshift.data.check_clients`) and a
    table of other clients.
    """

    clients: Sequence[ClientData]
    params: Params
    buffers: Params
    table: Params
    seeds: Seeds

    def __post_init__(self) -> None:
        check_clients(self.clients)
        for name, column in self.table.items():
            if len(column) != len(self.clients):
                raise InputError(
                    f'{len(self.clients)} clients and {len(column)} rows of "{name}" in the '
                    "table; make it with fedshift.data.register(clients, classes)"
                )


def draw_cohort(clients: int, size: int, t: int, seed: int) -> Tensor:
    """`size` distinct client ids in ascending order, drawn for round t; all of them if size = N."""
    if not 1 <= size <= clients:
        raise InputError(f"a cohort of {size} clients from {clients}; give 1 to {clients}")
    if size == clients:
        return torch.arange(clients)
    chosen = torch.randperm(clients, generator=generator(seed, "cohort", t))[:size]
    return chosen.sort().values


def first_state(algorithm: Algorithm, federation: Federation, client: int) -> Parts:
    """What a client keeps before it is drawn for the first time."""
    data = federation.clients[client]
    return algorithm.init_client(federation.params, federation.buffers, data)


class Opened(NamedTuple):
    """A round before anybody trains: who is drawn, with which weights, who is asked for work.

    stage: the method of round t; ids [C] ascending, weights [C], asked [C] bool; told: the server's
    parts with the cohort's, which messages are made from.
    """

    t: int
    stage: Algorithm
    ids: Tensor
    weights: Tensor
    asked: Tensor
    told: Parts

    def message(self, client: int) -> Parts:
        """What the server sends to one client."""
        return self.stage.broadcast(self.told, client)


def open_round(algorithm: Algorithm, server: Parts, ids: Tensor, t: int) -> Opened:
    """Weigh the cohort `ids` (ascending) of round t.

    Weights come first, from the server's table, so that a client of weight exactly 0 is not
    trained; its update would be multiplied by 0.
    """
    stage = algorithm.at(t)
    weights = stage.weigh(server, ids)
    check_weights(weights, len(ids))
    told = server | {"cohort": {"id": ids, "weight": weights}}
    return Opened(t, stage, ids, weights, stage.trains(weights), told)


def among(opened: Opened, server: Parts, present: Tensor) -> Opened:
    """The round as one of those clients alone who did their work, weighed anew; present [P] ids.

    What they were told stays as it was sent, and all of them count as asked.
    """
    weights = opened.stage.weigh(server, present)
    check_weights(weights, len(present))
    return opened._replace(
        ids=present, weights=weights, asked=torch.ones(len(present), dtype=torch.bool)
    )


def job_of(
    stage: Algorithm, message: Parts, state: Parts, data: ClientData, client: int, t: int, seed: int
) -> Job:
    """A client's work in round t; the batches come from (seed, round, client, phase) alone."""
    return Job(client, message, state, data, plan_all(stage.phases(), data, t, seed, client))


def close_round(
    opened: Opened, server: Parts, replies: Sequence[Reply], seed: int
) -> tuple[Parts, float]:
    """(the server's parts after the round, the clients' mean training loss by their weights).

    replies: one of each client that was asked, in any order, as `check_replies` lets them through.
    """
    replies = sorted(replies, key=lambda reply: reply.client)
    updates, weights = stack([reply.update for reply in replies]), opened.weights[opened.asked]
    updates["cohort"] = {"id": opened.ids[opened.asked], "weight": weights}
    changed = opened.stage.server_update(server, updates, key(seed, "server", opened.t))
    return server | changed, float(weights @ updates["report"]["loss"].double())


def play_round(
    algorithm: Algorithm,
    federation: Federation,
    server: Parts,
    states: States,
    ids: Tensor,
    t: int,
    backend: Backend = loop,
) -> Round:
    """One round over the cohort `ids` (ascending): weigh, train those that count, fold."""
    opened, clients = open_round(algorithm, server, ids, t), federation.clients
    stage, seed = opened.stage, federation.seeds.batch

    def state_of(i: int) -> Parts:
        return states[i] if i in states else first_state(algorithm, federation, i)

    def jobs() -> Iterator[Job]:
        for i in ids[opened.asked].tolist():
            yield job_of(stage, opened.message(i), state_of(i), clients[i], i, t, seed)

    replies = sorted(backend(stage.client_update, jobs()), key=lambda reply: reply.client)
    check_replies(opened.message, replies)
    after, loss = close_round(opened, server, replies, seed)
    kept = {r.client: state_of(r.client) | r.changed for r in replies}
    trained = tuple(r.client for r in replies)
    return Round(t, after, {**states, **kept}, ids, opened.weights, trained, loss)


def check_model(model: Model, federation: Federation) -> None:
    """Try the network on two examples: InputError unless it has an output for every class.

    K is the table's where it has labels [N, K]; else the largest label says how many outputs there
    must be at least. A network of one output is let through where all labels are 0: then they are
    no classes, and the objective is not a classifier's.
    """
    held = [c for c in federation.clients if len(c.y)]
    if not held:
        return
    logits = dry_logits(model, federation.params, federation.buffers, held[0].x[:2])
    largest, columns = max(int(c.y.max()) for c in held), logits.shape[1]
    if "labels" in federation.table and (largest or columns > 1):
        check_columns(logits, federation.table["labels"].shape[1])
    if columns <= largest:
        raise InputError(
            f"the model has {columns} outputs, and clients hold label {largest}; "
            f"give it one output per class, at least {largest + 1}"
        )


def start(algorithm: Algorithm, federation: Federation) -> Round:
    """Round 0: the state before any training."""
    return before_rounds(algorithm.init(federation.params, federation.buffers, federation.table))


def before_rounds(server: Parts) -> Round:
    """Round 0 of a server in this state."""
    nobody = torch.zeros(0)
    return Round(0, server, {}, nobody.long(), nobody.double(), (), float("nan"))


def check_schedule(algorithm: Algorithm, rounds: int) -> None:
    """A schedule of rates that ends too early says so now, not after days."""
    for phase in algorithm.at(rounds).phases().values():
        phase.rate(rounds)


def run(
    algorithm: Algorithm,
    federation: Federation,
    rounds: int,
    *,
    cohort: int | None = None,
    backend: Backend = loop,
    after: Round | None = None,
) -> Iterator[Round]:
    """Rounds one by one, from round 1 or from where `after` stands.

    cohort: clients drawn per round; None means all. Raises InputError for impossible sizes and a
    network that does not fit the clients' examples or a schedule without a rate for the last round,
    all before the first round, and TrainingError when a client's update cannot be used.
    """
    total = len(federation.clients)
    size = total if cohort is None else cohort
    if rounds < 0:
        raise InputError(f"rounds must be 0 or more, got {rounds}")
    check_model(algorithm.model, federation)
    current = start(algorithm, federation) if after is None else after
    if rounds > current.t:
        check_schedule(algorithm, rounds)
    for t in range(current.t + 1, rounds + 1):
        ids = draw_cohort(total, size, t, federation.seeds.cohort)
        current = play_round(algorithm, federation, current.server, current.states, ids, t, backend)
        yield current
