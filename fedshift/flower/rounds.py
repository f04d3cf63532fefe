"""Rounds of a strategy one by one, as the engine in one process gives them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedshift.engine.run import Round
from fedshift.engine.trial import check_schedule
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
    """What `strategy.start(grid, ...)` does, giving the state after each round up to `rounds`.

    states: after which rounds to ask the clients for what they keep (they answer only where their
    app was made with `open_states`); `Round.states` is empty after all others. Raises as the
    strategy does, and InputError for a schedule that has no rate for the last round.
    """
    first = 1 if strategy.current is None else strategy.current.t + 1
    check_schedule(strategy.algorithm, first, rounds)
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
        yield current._replace(states=kept_by(strategy, grid)) if states(t) else current


def answered(
    grid: Grid, messages: Iterable[Message], timeout: float, retries: int
) -> list[Message]:
    """The answers; whoever says that it failed is asked again while tries and time are left.

    Who says nothing is not asked again: it may be at work still. A client that has trained does not
    train twice for one round (`fedshift.flower.client`).
    """
    end, asked = time.monotonic() + timeout, list(messages)
    found = list(grid.send_and_receive(asked, timeout=timeout))
    for _ in range(retries):
        again = {r.metadata.src_node_id for r in found if failure_of(r) is not None}
        left = end - time.monotonic()
        if not again or left <= 0:
            break
        anew = [_copy(m, left) for m in asked if m.metadata.dst_node_id in again]
        later = list(grid.send_and_receive(anew, timeout=left))
        heard = {r.metadata.src_node_id for r in later}
        found = [r for r in found if r.metadata.src_node_id not in heard] + later
    return found


def _copy(message: Message, ttl: float) -> Message:
    """The same question as a message of its own: Flower numbers each once."""
    told = message.metadata
    return Message(
        message.content, message_type=told.message_type, dst_node_id=told.dst_node_id, ttl=ttl
    )


def kept_by(strategy: AlgorithmStrategy, grid: Grid) -> Mapping[int, Parts]:
    """What every client keeps that has trained, by asking for it. Raises TrainingError."""
    nodes = {} if strategy.met is None else strategy.met.nodes
    messages = [
        Message(RecordDict(), message_type="query.state", dst_node_id=node)
        for node in nodes.values()
    ]
    found = {}
    client_of = {node: client for client, node in nodes.items()}
    for reply in grid.send_and_receive(messages, timeout=strategy.timeout):
        client = client_of[reply.metadata.src_node_id]
        if (why := failure_of(reply)) is not None:
            raise TrainingError(f"client {client} does not show its state: {why}")
        kept = to_parts(reply.content.array_records, STATE)
        if kept:
            found[client] = kept
    return dict(sorted(found.items()))
