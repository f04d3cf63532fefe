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
from fedshift.errors import InputError, TrainingError
from fedshift.model import Model, check_columns, dry_logits, split_buffers
from fedshift.seeds import Seeds, generator, key
from fedshift.server.combine import check_weights
from fedshift.tree import Params, Parts, flatten, stack

States = Mapping[int, Parts]


class Round(NamedTuple):
    """The state after round t (1-based), and who was drawn, who trained, with which weights."""

    t: int
    server: Parts
    states: States
    cohort: Tensor
    weights: Tensor
    trained: tuple[int, ...]
    loss: float


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


def expected_update(message: Parts, first: Parts) -> Parts:
    """What an update must look like: the model that was sent for what mirrors it, else the first.

    The model that was sent, not the server's: clients may receive only rows of a layer.
    """
    floats, counters = split_buffers(message.get("buffers", {}))
    mirrors = {"delta": message.get("params", {}), "buffers": floats, "counters": counters}
    return {part: mirrors.get(part, tree) for part, tree in first.items()}


def check_reply(reply: Reply, expected: Parts) -> None:
    """Raise TrainingError, naming the client, for a misshapen or non-finite update.

    What a client keeps must be finite too: a personal model may diverge without a word of it in
    the update, and would be served.
    """
    for part in expected | reply.update:
        ours, theirs = reply.update.get(part), expected.get(part)
        if ours is None or theirs is None or ours.keys() != theirs.keys():
            raise TrainingError(f'client {reply.client} sent an update with a different "{part}"')
        for name, v in ours.items():
            if v.shape != theirs[name].shape or v.dtype != theirs[name].dtype:
                raise TrainingError(
                    f'client {reply.client} sent "{part}/{name}" as {v.dtype} {tuple(v.shape)}, '
                    f"expected {theirs[name].dtype} {tuple(theirs[name].shape)}"
                )
            if not bool(torch.isfinite(v).all()):
                raise TrainingError(
                    f'client {reply.client} sent non-finite numbers in "{part}/{name}": its '
                    "training diverged. Lower the learning rate, or look at this client's data"
                )
    for name, v in flatten(reply.changed).items():
        if not bool(torch.isfinite(v).all()):
            raise TrainingError(
                f'client {reply.client} would keep non-finite numbers in "{name}": its own model '
                "diverged. Lower the learning rate, or the strength of what pulls on this model"
            )


def first_state(algorithm: Algorithm, federation: Federation, client: int) -> Parts:
    """What a client keeps before it is drawn for the first time."""
    data = federation.clients[client]
    return algorithm.init_client(federation.params, federation.buffers, data)


def play_round(
    algorithm: Algorithm,
    federation: Federation,
    server: Parts,
    states: States,
    ids: Tensor,
    t: int,
    backend: Backend = loop,
) -> Round:
    """One round over the cohort `ids` (ascending): weigh, train those that count, fold.

    Weights come first, from the server's table, so that a client of weight exactly 0 is not
    trained; its update would be multiplied by 0.
    """
    stage, clients = algorithm.at(t), federation.clients
    weights = stage.weigh(server, ids)
    check_weights(weights, len(ids))
    active = stage.trains(weights)
    told = server | {"cohort": {"id": ids, "weight": weights}}

    def state_of(i: int) -> Parts:
        return states[i] if i in states else first_state(algorithm, federation, i)

    def jobs() -> Iterator[Job]:
        for i in ids[active].tolist():
            plans = plan_all(stage.phases(), clients[i], t, federation.seeds.batch, i)
            yield Job(i, stage.broadcast(told, i), state_of(i), clients[i], plans)

    replies = sorted(backend(stage.client_update, jobs()), key=lambda reply: reply.client)
    expected = expected_update(stage.broadcast(told, replies[0].client), replies[0].update)
    for reply in replies:
        check_reply(reply, expected)
    updates = stack([reply.update for reply in replies])
    updates["cohort"] = {"id": ids[active], "weight": weights[active]}
    changed = stage.server_update(server, updates, key(federation.seeds.batch, "server", t))
    return Round(
        t,
        server | changed,
        {**states, **{r.client: state_of(r.client) | r.changed for r in replies}},
        ids,
        weights,
        tuple(r.client for r in replies),
        float(weights[active] @ updates["report"]["loss"].double()),
    )


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
    server = algorithm.init(federation.params, federation.buffers, federation.table)
    nobody = torch.zeros(0)
    return Round(0, server, {}, nobody.long(), nobody.double(), (), float("nan"))


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
    if rounds > current.t:  # a schedule that ends too early says so now, not after days
        for phase in algorithm.at(rounds).phases().values():
            phase.rate(rounds)
    for t in range(current.t + 1, rounds + 1):
        ids = draw_cohort(total, size, t, federation.seeds.cohort)
        current = play_round(algorithm, federation, current.server, current.states, ids, t, backend)
        yield current
