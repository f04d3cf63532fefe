"""Play a strategy round by round, as the engine in one process does."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedshift.engine.preflight.method import check_schedule
from fedshift.engine.run import Round
from fedshift.errors import TrainingError
from fedshift.flower.client import STATE
from fedshift.flower.records import failure_of, to_parts
from fedshift.flower.strategy import AlgorithmStrategy
from fedshift.tree import Parts


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
