"""Play a strategy round by round, as the engine in one process does."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from operator import add

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray
from torch import Tensor

from fedshift.engine.checks.gate import Dropped
from fedshift.engine.preflight.method import check_schedule
from fedshift.engine.run import Round
from fedshift.errors import InputError, TrainingError
from fedshift.evaluation.scores import Score
from fedshift.flower.calibrating import CALIBRATE, asked_at, sums_in
from fedshift.flower.client import STATE
from fedshift.flower.records import failure_of, to_parts
from fedshift.flower.routing import RemoteClients, answers_in, questions_in
from fedshift.flower.strategy import AlgorithmStrategy
from fedshift.router.parts import Question
from fedshift.server.prior import CalibrationSums, Calibrator, Correction, calibrate
from fedshift.tree import Params, Parts


def play(
    strategy: AlgorithmStrategy,
    grid: Grid,
    rounds: int,
    *,
    states: Callable[[int], bool] = lambda t: False,
) -> Iterator[Round]:
    """Do what `strategy.start(grid, ...)` does, and yield the state after each round to `rounds`.

    states: after which rounds to ask clients for their state (they answer only if their app was
    made with `open_states`); after all others `Round.states` is empty. Raises what the strategy
    raises, and InputError for a schedule that has no rate for the last round.
    """
    first = 1 if strategy.current is None else strategy.current.t + 1
    check_schedule(strategy.algorithm, first, rounds)
    # The strategy has the model itself; Flower's interface requires records nevertheless.
    nothing, config = ArrayRecord(), ConfigRecord()
    for t in range(first, rounds + 1):
        messages = strategy.configure_train(t, nothing, config, grid)
        strategy.aggregate_train(t, answered(grid, messages, strategy.timeout, strategy.retries))
        messages = list(strategy.configure_evaluate(t, nothing, config, grid))
        if messages:
            replies = grid.send_and_receive(messages, timeout=strategy.timeout)
            strategy.aggregate_evaluate(t, replies)
        current = strategy.current
        assert current is not None  # aggregate_train has set it, or raised
        yield current._replace(states=client_states(strategy, grid)) if states(t) else current


def sites_of(strategy: AlgorithmStrategy, grid: Grid) -> RemoteClients:
    """All clients, for fits of the last round's router.

    A question raises InputError if a client that took part does not answer.
    """

    def send(questions: Sequence[Question]) -> dict[int, list[Params]]:
        current, present = strategy.begin(grid), strategy.present
        ids = [i for i, took in enumerate(present) if took]
        _wait_for(strategy, grid, ids)
        records = questions_in(questions, present, 0)
        came, missing = ask(strategy, grid, "router", records, ids, current)
        for one in missing.values():
            raise InputError(f"client {one.client}: {one.reason}")
        answers = {i: answers_in(came[i], questions, i) for i in ids}
        registered = strategy.met.table
        for i, sums in answers.items():
            # A client that claims more examples than it registered would gain influence.
            if any(float(one.get("n", 0.0)) > registered["n"][i] for one in sums):
                raise InputError(f"client {i} sent sums of more examples than it has")
        return answers

    return RemoteClients(send, strategy.clients)


def _wait_for(strategy: AlgorithmStrategy, grid: Grid, clients: Iterable[int]) -> None:
    """Wait until these clients are connected. Raises InputError after `strategy.patience` s."""
    nodes = strategy.met.nodes
    end = time.monotonic() + strategy.patience
    while gone := sorted({*clients} - {i for i, n in nodes.items() if n in {*grid.get_node_ids()}}):
        if time.monotonic() >= end:
            raise InputError(f"clients {gone} are not connected any more")
        time.sleep(0.1)


def ask(
    strategy: AlgorithmStrategy, grid: Grid, kind: str,
    records: Mapping[str, ArrayRecord | ConfigRecord], clients: Sequence[int], played: Round,
) -> tuple[dict[int, Parts], dict[int, Dropped]]:  # fmt: skip
    """Ask clients for sums with a round's model: (each one's answer, why others have none)."""
    messages = strategy.ask_for_sums(kind, records, clients, played)
    replies = answered(grid, messages.values(), strategy.timeout, strategy.retries)
    received, late = strategy.read(replies), f"no answer within {strategy.timeout:g} s"
    came = {one.client: one.update for one in received.replies if one.client in messages}
    missing = {i: Dropped(i, late, "timeout") for i in sorted({*clients} - came.keys())}
    return came, missing | {one.client: one for one in received.unread}


def answered(
    grid: Grid, messages: Iterable[Message], timeout: float, retries: int
) -> list[Message]:
    """Send messages and collect the answers. Clients that report a failure are asked again.

    They are asked up to `retries` times, within `timeout` seconds in all. A silent client is not
    asked again, because it may still be working. No client trains twice for one round
    (`fedshift.flower.client`).
    """
    end, questions = time.monotonic() + timeout, list(messages)
    replies = list(grid.send_and_receive(questions, timeout=timeout))
    for _ in range(retries):
        failing = {r.metadata.src_node_id for r in replies if failure_of(r) is not None}
        seconds_left = end - time.monotonic()
        if not failing or seconds_left <= 0:
            break
        repeated = [_copy(m, seconds_left) for m in questions if m.metadata.dst_node_id in failing]
        new_replies = list(grid.send_and_receive(repeated, timeout=seconds_left))
        answering = {r.metadata.src_node_id for r in new_replies}
        # The last answer of each client counts; for one that is silent now, the one before.
        replies = [r for r in replies if r.metadata.src_node_id not in answering] + new_replies
    return replies


def _copy(message: Message, ttl: float) -> Message:
    """The same question as a new message, because Flower does not send a message twice."""
    metadata = message.metadata
    return Message(
        message.content,
        message_type=metadata.message_type,
        dst_node_id=metadata.dst_node_id,
        ttl=ttl,
    )


def overhear(grid: Grid, hear: Callable[[Message], None]) -> None:
    """Call `hear` with each message as soon as it arrives.

    Flower's `send_and_receive` pulls messages as they come, but returns only when all are there.
    """
    pull = grid.pull_messages

    def pulled(message_ids: Iterable[str]) -> list[Message]:
        messages = list(pull(message_ids))
        for message in messages:
            hear(message)
        return messages

    # Replace it on this grid object only; its `send_and_receive` calls it.
    grid.pull_messages = pulled  # type: ignore[method-assign]


def measured_by_clients(
    strategy: AlgorithmStrategy, grid: Grid, played: Round, correction: Correction | None = None
) -> Mapping[int, Score]:
    """The scores of a round's model that connected clients measure on their validation examples."""
    strategy.begin(grid)  # a run that resumes after its last round has not registered clients yet
    beside = {} if correction is None else asked_at(correction.scale, correction.bias)
    questions = strategy.questions(played, grid, beside)
    replies = grid.send_and_receive(questions, timeout=strategy.timeout)
    strategy.aggregate_evaluate(played.t, replies)
    return strategy.scores


class _MissingError(Exception):
    """Raised with the clients that sent no usable sums."""

    def __init__(self, clients: Mapping[int, Dropped]) -> None:
        super().__init__()
        self.clients = clients


def calibrated_by(
    strategy: AlgorithmStrategy, grid: Grid, played: Round,
    counts: Mapping[int, Tensor] | None = None,
) -> Calibrator:  # fmt: skip
    """The calibrator of a round's model, from connected clients' sums (`calibrating`).

    counts: each client's validation examples by label, if the server knows them. If a client does
    not answer, or sends impossible sums, the fit starts again without it, since all steps must be
    over the same clients. Raises InputError if no client is left.
    """
    strategy.begin(grid)  # a run that resumes after its last round has not registered clients yet
    nodes, connected = strategy.met.nodes, {*grid.get_node_ids()}
    clients = [i for i in sorted(nodes) if nodes[i] in connected]

    def sums_at(scale: float, bias: NDArray[np.float64]) -> CalibrationSums:
        came, missing = ask(strategy, grid, CALIBRATE, asked_at(scale, bias), clients, played)
        sums = dict[int, CalibrationSums]()
        for i, answer in came.items():
            try:
                due = None if counts is None else counts[i]
                sums[i] = sums_in(answer, due, strategy.classes)
            except InputError as e:
                missing[i] = Dropped(i, str(e), "reply")
        if missing:
            raise _MissingError(missing)
        # Add in the order of ids, because the last bit of a sum depends on the order.
        return reduce(add, (sums[i] for i in clients))

    while clients:
        try:
            return calibrate(sums_at, strategy.classes)
        except _MissingError as e:
            for _, one in sorted(e.clients.items()):
                strategy.tell({"event": "unscored", "round": played.t, **one._asdict()})
            clients = [i for i in clients if i not in e.clients]
    raise InputError("no client sent sums of its validation examples")


def client_states(strategy: AlgorithmStrategy, grid: Grid) -> Mapping[int, Parts]:
    """Ask for the state of every client that has trained. Raises TrainingError if one refuses."""
    nodes = strategy.met.nodes
    messages = [
        Message(RecordDict(), message_type="query.state", dst_node_id=node)
        for node in nodes.values()
    ]
    states = {}
    client_of = {node: client for client, node in nodes.items()}
    for reply in grid.send_and_receive(messages, timeout=strategy.timeout):
        client = client_of[reply.metadata.src_node_id]
        if (why := failure_of(reply)) is not None:
            raise TrainingError(f"client {client} does not show its state: {why}")
        state = to_parts(reply.content.array_records, STATE)
        if state:
            states[client] = state
    return dict(sorted(states.items()))
