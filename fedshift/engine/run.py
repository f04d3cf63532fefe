"""The rounds of a run: draw a cohort, train it, and update the server's state."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from fedshift.algorithms.method import Method
from fedshift.arguments import check_kind
from fedshift.engine.backends import Backend, Job, Reply, Stage, loop, ordinary
from fedshift.engine.checks.gate import Dropped as Dropped
from fedshift.engine.checks.replies import Limits, error_of, fault_in, in_order
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
from fedshift.engine.processes.pool import Shares, Team
from fedshift.engine.round import Round as Round
from fedshift.engine.round import States as States
from fedshift.engine.round import (
    admit,
    before_rounds,
    close_round,
    count_skips,
    form_of,
    open_round,
    skip,
    sums_of,
)
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


@torch.inference_mode(False)
def play_round(
    algorithm: Method,
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
    trained = algorithm.at(t).trained_model()
    # A layer that was replaced after the model was made would never be trained.
    models = {algorithm.model, trained or algorithm.model}
    for model in models:
        model.check_unchanged()
    with undrawn(*{model.net for model in models}):
        return _play_round(algorithm, federation, server, states, ids, t, backend, meter)


def _play_round(
    algorithm: Method, federation: Federation, server: Parts, states: States, ids: Tensor,
    t: int, backend: Backend, meter: Meter | None,
) -> Round:  # fmt: skip
    gate, seed, table = federation.gate, federation.seeds.batch, federation.table
    opened = open_round(algorithm, server, ids, t, gate.max_weight)
    if opened.skipped:
        return skip(opened, server, opened.skipped)._replace(states=states)
    for phase in opened.stage.phases().values():
        phase.rate(t)  # raises here, so that no client is blamed for a bad schedule
    stage = Stage(algorithm, t, federation.clients, seed, gate.on_bad == "drop")
    before, draft = dict[int, Parts](), federation.shelf.draft(states)

    def jobs() -> Iterator[Job]:
        # States and messages are made at a client's turn, not for the whole cohort at once.
        for i in opened.clients():
            before[i] = state_of(algorithm, federation, states, i)
            yield Job(i, t, opened.message(i), before[i])

    def keep(reply: Reply) -> None:
        changed = {p: {k: ordinary(v) for k, v in v.items()} for p, v in reply.changed.items()}
        draft.put(reply.client, before.pop(reply.client) | changed)

    replies = metered(meter, backend)(stage, jobs())
    if stage.drops:
        # The weights of those left change with each that drops out: no sum before the last reply.
        good, bad = admit(replies, opened, gate, federation.infinite)
        played = close_round(opened, server, good, bad, gate, table, seed)
        for reply in () if played.skipped else good:
            keep(reply)
        return played._replace(states=draft.all_states())
    limits = Limits(t, gate, opened.message, federation.infinite)
    sums, form, rest = sums_of(opened, server), None, list[Reply]()
    for came in in_order(replies, opened.clients()):
        if isinstance(came, Dropped):
            raise error_of(came)
        reply = came
        del came
        if form is None and fault_in(reply, None, limits) is None:
            form = form_of(opened, [reply])
        if bad_one := fault_in(reply, form, limits):
            raise error_of(bad_one)
        rest.append(Reply(reply.client, sums.add(reply)))
        keep(reply)
        del reply  # so that its memory is free while the next client trains
    played = close_round(opened, server, rest, (), gate, table, seed, sums)
    return played._replace(states=draft.all_states())


def first_state(algorithm: Method, federation: Federation, client: int) -> Parts:
    """A client's state before it is drawn for the first time."""
    data = federation.clients[client]
    return algorithm.init_client(federation.params, federation.buffers, data)


def state_of(algorithm: Method, federation: Federation, states: States, client: int) -> Parts:
    """A client's state after a round; its first state if it has never been drawn."""
    return states[client] if client in states else first_state(algorithm, federation, client)


@torch.inference_mode(False)
def start(algorithm: Method, federation: Federation) -> Round:
    """Round 0, before any training; InputError for a column that the table does not have."""
    params, buffers, table = federation.params, federation.buffers, federation.table
    try:
        return before_rounds(algorithm.init(params, buffers, table))
    except KeyError as e:
        if (name := e.args[0]) in table or name not in ("n", "labels"):
            raise
        raise InputError(f'the method needs the table\'s "{name}", which it lacks; {TABLE}') from e


def run(
    algorithm: Method,
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
    if isinstance(backend, Team | Shares):
        backend.begin(algorithm, federation)  # before this process takes gradients
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
    algorithm: Method,
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
