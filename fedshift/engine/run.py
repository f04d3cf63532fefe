"""The rounds of a run: draw a cohort, train it, and update the server's state."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from fedshift.algorithms.base import Algorithm, Capabilities, ask
from fedshift.arguments import check_kind
from fedshift.engine.backend_checks import watched
from fedshift.engine.backends import Backend, Forgiving, loop
from fedshift.engine.checks.gate import Dropped as Dropped
from fedshift.engine.federation import TABLE
from fedshift.engine.federation import Federation as Federation
from fedshift.engine.preflight.arguments import (
    check_after,
    check_first_model,
    check_gate,
    check_run,
    check_sizes,
)
from fedshift.engine.preflight.method import (
    check_batches,
    check_features,
    check_router,
    check_schedule,
    check_training,
    warn_of_ess,
)
from fedshift.engine.preflight.network import check_model
from fedshift.engine.preflight.terms import check_terms
from fedshift.engine.round import Round as Round
from fedshift.engine.round import States as States
from fedshift.engine.round import (
    before_rounds,
    count_skips,
    jobs_of,
    open_round,
    question,
    settle,
    skip,
    sums_of,
)
from fedshift.engine.sums.summing import check_and_sum, stream_of, terms
from fedshift.engine.traffic import Meter, metered
from fedshift.errors import InputError
from fedshift.kernels.allocator import keep_memory
from fedshift.randomness import undrawn
from fedshift.seeds import generator
from fedshift.tree import Parts

FEDERATION = "give Federation(clients, *model.init(), register(clients, K), Seeds.of(0))"


def check_size(clients: int, size: int) -> None:
    """Raise InputError for a cohort of no client, or of more than there are."""
    if not 1 <= size <= clients:
        raise InputError(f"a cohort of {size} clients from {clients}; give 1 to {clients}")


def draw_cohort(clients: int, size: int, t: int, seed: int) -> Tensor:
    """`size` distinct client ids in ascending order, drawn for round t; all of them if size = N.

    Client i has the i-th of N uniform numbers of the round, and those with the smallest are drawn.
    So another client at the end of the list changes the draw only if it is drawn itself.
    """
    check_size(clients, size)
    if size == clients:
        return torch.arange(clients)
    numbers = torch.rand(clients, generator=generator(seed, "cohort", t), dtype=torch.float64)
    return numbers.topk(size, largest=False, sorted=False).indices.sort().values


def first_state(algorithm: Algorithm, federation: Federation, client: int) -> Parts:
    """A client's state before it is drawn for the first time."""
    data = federation.clients[client]
    return algorithm.init_client(federation.params, federation.buffers, data)


def state_of(algorithm: Algorithm, federation: Federation, states: States, client: int) -> Parts:
    """A client's state after a round; its first state if it has never been drawn."""
    return states[client] if client in states else first_state(algorithm, federation, client)


@torch.inference_mode(False)
def play_round(
    algorithm: Algorithm,
    federation: Federation,
    server: Parts,
    states: States,
    ids: Tensor,
    t: int,
    backend: Backend = loop,
    meter: Meter | None = None,
) -> Round:
    """One round over the cohort `ids` (ascending): weigh, train those with a weight, aggregate.

    If a bad reply ends the run (`Gate("stop")`), replies are summed as they arrive, and only what
    the method needs besides their sums stays in memory. It works within `torch.no_grad()`, too.
    Random numbers that the network draws without a seed end it (`fedshift.randomness.undrawn`).
    """
    trained = ask(algorithm.at(t), Capabilities.trained_model)
    # A layer that was replaced after the model was made would never be trained.
    models = {algorithm.model, trained or algorithm.model}
    for model in models:
        model.check_unchanged()
    with undrawn(*{model.net for model in models}):
        return _play_round(algorithm, federation, server, states, ids, t, backend, meter)


def _play_round(
    algorithm: Algorithm, federation: Federation, server: Parts, states: States, ids: Tensor,
    t: int, backend: Backend, meter: Meter | None,
) -> Round:  # fmt: skip
    opened, gate = (
        open_round(algorithm, server, ids, t, federation.gate.max_weight),
        federation.gate,
    )
    if opened.skipped:
        return skip(opened, server, opened.skipped)._replace(states=states)
    stage, seed = opened.stage, federation.seeds.batch
    state = partial(state_of, algorithm, federation, states)

    def keep(client: int, changed: Parts) -> None:
        draft.put(client, state(client) | changed)

    # A generator: states and batches are made at a client's turn, not for the whole cohort at once.
    jobs = jobs_of(opened, federation.clients, state, seed)
    asked, draft = question(opened, federation.infinite), federation.shelf.draft(states)
    # A bad reply ends the run, so nothing ever has to be taken out of a sum: sum at once.
    if gate.on_bad == "stop":
        sums = sums_of(opened, server)
        trained = stream_of(watched(backend, len(asked.clients)), partial(terms, sums, gate, asked))
        replies = metered(meter, trained, stage.client_update, jobs)
        admitted = check_and_sum(gate, replies, asked, sums, keep)
        played = settle(opened, server, admitted, (), gate, federation.table, seed, sums)
        return played._replace(states=draft.all_states())
    # A bad reply is dropped, and the weights of the others change: no sum before the last reply.
    trained = stream_of(watched(backend, None))
    replies = metered(meter, trained, Forgiving(stage.client_update), jobs)
    admitted = gate.admit([*replies], asked)
    played = settle(opened, server, admitted, admitted.bad, gate, federation.table, seed)
    for client, changed in () if played.skipped else admitted.states():
        keep(client, changed)
    return played._replace(states=draft.all_states())


@torch.inference_mode(False)
def start(algorithm: Algorithm, federation: Federation) -> Round:
    """Round 0, before any training; InputError for a column that the table does not have."""
    params, buffers, table = federation.params, federation.buffers, federation.table
    try:
        return before_rounds(algorithm.init(params, buffers, table))
    except KeyError as e:
        if (name := e.args[0]) in table or name not in ("n", "labels"):
            raise
        raise InputError(f'the method needs the table\'s "{name}", which it lacks; {TABLE}') from e


def run(
    algorithm: Algorithm,
    federation: Federation,
    rounds: int,
    *,
    cohort: int | None = None,
    backend: Backend = loop,
    after: Round | None = None,
    meter: Meter | None = None,
) -> Iterator[Round]:
    """Rounds one by one, from round 1 or from where `after` stands.

    cohort   how many clients are drawn for each round; None: all
    backend  how clients are trained: one by one, in other processes, or together
    after    the round to go on from; None: start with round 1
    meter    counts the bytes of messages

    >>> import torch
    >>> from fedshift.data import client_data, register
    >>> from fedshift.seeds import Seeds
    >>> x, y = torch.eye(6), torch.tensor([0, 1, 0, 1, 0, 1])
    >>> clients = [client_data(x, y, 0), client_data(x[:4], y[:4], 1)]
    >>> model = fs.Model(torch.nn.Linear(6, 2))
    >>> federation = fs.Federation(clients, *model.init(), register(clients, 2), Seeds.of(0))
    >>> for played in fs.run(fs.FedAvg(model, local=fs.Local(lr=0.1)), federation, rounds=2):
    ...     print(played.t, played.weights.tolist())
    1 [0.6, 0.4]
    2 [0.6, 0.4]

    Raises InputError at the call, before anything is trained: for arguments of other types,
    impossible sizes, a network that does not fit the clients' examples or the first model, a term
    of yours that would train nothing, and a schedule without a rate for a round. Warns
    (NeedlessWarning) of an `ess` that changes nothing. The iterator raises TrainingError when a
    client's update cannot be used.
    """
    check_run(algorithm, rounds, cohort, backend, after, Round)
    check_kind("federation", federation, Federation, FEDERATION)
    total = len(federation.clients)
    size = total if cohort is None else cohort
    check_size(total, size)
    check_gate(federation.gate, size)
    check_first_model(algorithm.model, federation)
    check_sizes(federation)
    check_model(algorithm.model, federation)
    check_router(algorithm, federation, cohort)
    check_training(algorithm, federation.params, rounds)
    check_batches(algorithm, federation)
    current = start(algorithm, federation)
    check_features(algorithm, federation)
    check_terms(algorithm, federation)
    if after is not None:
        check_after(after, current, total, rounds, partial(first_state, algorithm, federation))
        current = after
    with undrawn():
        check_schedule(algorithm, current.t + 1, rounds)
    # The warning is about the weights over all clients; a drawn cohort has other weights.
    if size == total:
        warn_of_ess(algorithm, current.server, total)
    return _rounds(algorithm, federation, current, rounds, size, backend, meter)


def _rounds(
    algorithm: Algorithm,
    federation: Federation,
    current: Round,
    rounds: int,
    size: int,
    backend: Backend,
    meter: Meter | None,
) -> Iterator[Round]:
    keep_memory()
    total = len(federation.clients)
    for t in range(current.t + 1, rounds + 1):
        ids = draw_cohort(total, size, t, federation.seeds.cohort)
        before = current
        current = play_round(
            algorithm, federation, before.server, before.states, ids, t, backend, meter
        )
        current = count_skips(current, before, federation.gate, rounds)
        yield current
