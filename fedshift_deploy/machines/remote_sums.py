"""Sums and scores that a server asks its clients for after rounds: routers, calibrators, scores."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from operator import add

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid
from numpy.typing import NDArray
from torch import Tensor

from fedshift.engine.checks.gate import Dropped
from fedshift.engine.round import Round
from fedshift.errors import InputError
from fedshift.evaluation.scores import Score
from fedshift.flower.calibrating import CALIBRATE, asked_at, sums_in
from fedshift.flower.rounds import answered
from fedshift.flower.routing import Question, RemoteClients, answers_in, questions_in
from fedshift.flower.strategy import AlgorithmStrategy
from fedshift.server.prior import CalibrationSums, Calibrator, Correction, calibrate
from fedshift.tree import Params, Parts


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
