"""Rounds: the one place where a cohort is drawn, trained and folded into the server's state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fedshift.algorithms.base import Algorithm, Capabilities, ask
from fedshift.client.origin import client_logits
from fedshift.data import ClientData, check_clients, largest_label
from fedshift.engine.allocator import keep_memory
from fedshift.engine.arrivals import in_turn
from fedshift.engine.backends import Backend, Forgiving, Reply, loop
from fedshift.engine.gate import Dropped as Dropped
from fedshift.engine.gate import Gate
from fedshift.engine.one_round import Round as Round
from fedshift.engine.one_round import States as States
from fedshift.engine.one_round import (
    before_rounds,
    count_skips,
    fold_of,
    jobs_of,
    open_round,
    question,
    settle,
    skip,
)
from fedshift.engine.shares import Books, summing
from fedshift.engine.shelf import Shelf
from fedshift.errors import InputError
from fedshift.model import Model, check_columns, dry_logits, dry_pass
from fedshift.seeds import Seeds, generator
from fedshift.tree import Params, Parts


@dataclass(frozen=True)
class Federation:
    """Clients, first model and seeds: all that a run needs besides the algorithm.

    Clients' ids are their positions. `table` is what they registered (n [N], labels [N, K]); `gate`
    says which replies are let through, `shelf` where clients' states lie.
    Raises InputError for clients that do not fit together (`fedshift.data.check_clients`) and a
    table of other clients.
    """

    clients: Sequence[ClientData]
    params: Params
    buffers: Params
    table: Params
    seeds: Seeds
    gate: Gate = Gate()
    shelf: Shelf = Shelf()

    def __post_init__(self) -> None:
        check_clients(self.clients)
        for name, column in self.table.items():
            if len(column) != len(self.clients):
                raise InputError(
                    f'{len(self.clients)} clients and {len(column)} rows of "{name}" in the '
                    "table; make it with fedshift.data.register(clients, classes)"
                )


def draw_cohort(clients: int, size: int, t: int, seed: int) -> Tensor:
    """`size` distinct client ids in ascending order, drawn for round t; all of them if size = N.

    Client i has the i-th of N uniform numbers of the round, and the smallest are drawn. Thus one
    client more, at the end, leaves the draw as it is unless it is drawn itself.
    """
    if not 1 <= size <= clients:
        raise InputError(f"a cohort of {size} clients from {clients}; give 1 to {clients}")
    if size == clients:
        return torch.arange(clients)
    numbers = torch.rand(clients, generator=generator(seed, "cohort", t), dtype=torch.float64)
    return numbers.topk(size, largest=False, sorted=False).indices.sort().values


def first_state(algorithm: Algorithm, federation: Federation, client: int) -> Parts:
    """What a client keeps before it is drawn for the first time."""
    data = federation.clients[client]
    return algorithm.init_client(federation.params, federation.buffers, data)


def state_of(algorithm: Algorithm, federation: Federation, states: States, client: int) -> Parts:
    """What a client keeps after a round: its first state if it was never drawn."""
    return states[client] if client in states else first_state(algorithm, federation, client)


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

    Where the first bad reply ends the run, replies are summed and let go as they come, as far as
    the method needs no more than their sums.
    """
    opened, clients = open_round(algorithm, server, ids, t), federation.clients
    if opened.skipped:
        return skip(opened, server, opened.skipped)._replace(states=states)
    stage, seed = opened.stage, federation.seeds.batch
    own = partial(state_of, algorithm, federation, states)

    def keep(client: int, changed: Parts) -> None:
        draft.put(client, own(client) | changed)

    jobs = jobs_of(opened, clients, own, seed)
    gate, asked, draft = federation.gate, question(opened), federation.shelf.draft(states)
    if gate.on_bad == "stop":
        fold = fold_of(opened, server)

        def take(replies: Sequence[Reply]) -> Iterable[Reply]:
            for reply in replies:
                keep(reply.client, reply.changed)
            return [Reply(r.client, r.update, {}, r.t) for r in fold.take(replies)]

        play = summing(backend, Books(fold, gate, asked))
        admitted = in_turn(gate, play(stage.client_update, jobs), asked, take, fold)
        if admitted.whole is not None:
            for client in admitted.clients:
                keep(client, admitted.whole.changed)
        played = settle(opened, server, admitted, (), gate, federation.table, seed, fold)
        return played._replace(states=draft.whole())
    admitted = gate.admit(backend(Forgiving(stage.client_update), jobs), asked)
    played = settle(opened, server, admitted, admitted.bad, gate, federation.table, seed)
    for reply in () if played.skipped else admitted.good:
        keep(reply.client, reply.changed)
    return played._replace(states=draft.whole())


def check_model(model: Model, federation: Federation) -> None:
    """Try the network on two examples: InputError unless it has an output for every class.

    K is the table's where it has labels [N, K]; else the largest label says how many outputs there
    must be at least. A network of one output is let through where all labels are 0: then they are
    no classes, and the objective is not a classifier's.
    """
    held = _first_with_examples(federation)
    if held is None:
        return
    logits = dry_logits(model, federation.params, federation.buffers, held.x[:2])
    largest, columns = largest_label(federation.clients), logits.shape[1]
    if "labels" in federation.table and (largest or columns > 1):
        check_columns(logits, federation.table["labels"].shape[1])
    if columns <= largest:
        raise InputError(
            f"the model has {columns} outputs, and clients hold label {largest}; "
            f"give it one output per class, at least {largest + 1}"
        )


def check_router(algorithm: Algorithm, federation: Federation) -> None:
    """Try the network: InputError unless it has N client logits, where the method learns them."""
    if not ask(algorithm, Capabilities.trains_router):
        return
    held = _first_with_examples(federation)
    if held is not None:
        found = dry_pass(algorithm.model, federation.params, federation.buffers, held.x[:2])
        client_logits(found, len(federation.clients))


def _first_with_examples(federation: Federation) -> ClientData | None:
    return next((c for c in federation.clients if len(c.y)), None)


def start(algorithm: Algorithm, federation: Federation) -> Round:
    """Round 0: the state before any training."""
    return before_rounds(algorithm.init(federation.params, federation.buffers, federation.table))


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
    keep_memory()
    total = len(federation.clients)
    size = total if cohort is None else cohort
    if rounds < 0:
        raise InputError(f"rounds must be 0 or more, got {rounds}")
    check_model(algorithm.model, federation)
    check_router(algorithm, federation)
    current = start(algorithm, federation) if after is None else after
    if rounds > current.t:
        check_schedule(algorithm, rounds)
    for t in range(current.t + 1, rounds + 1):
        ids = draw_cohort(total, size, t, federation.seeds.cohort)
        before = current
        current = play_round(algorithm, federation, before.server, before.states, ids, t, backend)
        current = count_skips(current, before, federation.gate, rounds)
        yield current
