"""Evaluation on clients, which send only counts of right answers and sums of losses."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from flwr.app import Message, MetricRecord, RecordDict
from torch import Tensor

from fedshift.algorithms.method import Method
from fedshift.data import Examples
from fedshift.engine.checks.gate import Dropped
from fedshift.errors import InputError, from_elsewhere
from fedshift.evaluation.scores import OwnScores, Score, score
from fedshift.flower.arriving import failed_client
from fedshift.flower.records import fields_of
from fedshift.router.score import scores
from fedshift.router.sight import Sight
from fedshift.server.prior import Correction
from fedshift.tree import Params, Parts

COUNTS = ("correct", "total", "predicted")
# Most examples of a client: sums over many such clients are exact in float64 and fit into int64.
MOST_EXAMPLES = 10**12
# The records of an answer: scores of the model that the client serves on its validation examples
# and on its test examples, scores of the server's model on the latter, and where a router would
# send them.
SCORE, TEST, SHARED, ROUTER = "score", "test", "shared", "router"


def scored(
    stage: Method, pair: tuple[Params, Params], examples: Examples, classes: int, *,
    confusion: bool = False, correction: Correction | None = None,
) -> MetricRecord:  # fmt: skip
    """The counts of one model as a record, with `confusion` also how often each label is taken
    for each other.
    """
    result = score(
        stage.model, *pair, examples, classes, confusion=confusion, correction=correction
    )
    counts = {name: getattr(result, name).tolist() for name in COUNTS}
    if result.confusion is not None:
        counts["confusion"] = result.confusion.flatten().tolist()
    return MetricRecord({**counts, "loss_sum": result.loss_sum})


def scored_tests(
    stage: Method, message: Parts, pair: tuple[Params, Params], tests: Examples, classes: int,
    present: Sequence[int],
) -> dict[str, MetricRecord]:  # fmt: skip
    """The records of `OwnScores`; pair: the model that the client serves.

    present [M]: 1 for clients that took part, to which a router may send queries.
    """
    records = {TEST: scored(stage, pair, tests, classes)}
    received = message.get("params", {}), message.get("buffers", {})
    if received[0].keys() == pair[0].keys():
        records[SHARED] = scored(stage, received, tests, classes)
    if stage.trains_router():
        mask = torch.tensor(present, dtype=torch.float64)
        counts = torch.zeros(len(mask), dtype=torch.int64)
        if len(tests):
            chosen = scores(Sight(stage.model, pair, None, mask).logits(tests.x), mask).argmax(1)
            counts = torch.bincount(chosen, minlength=len(mask))
        records[ROUTER] = MetricRecord({"sent": counts.tolist()})
    return records


def score_in(content: RecordDict, classes: int, name: str = SCORE) -> Score:
    """The counts of a record. Raises InputError for numbers that cannot be counts."""
    fields = fields_of(content, name)

    def counts(name: str, *shape: int) -> Tensor:
        return torch.tensor(fields[name], dtype=torch.int64).reshape(shape)

    right, total, predicted = (counts(name, classes) for name in COUNTS)
    confused = counts("confusion", classes, classes) if "confusion" in fields else None
    made = Score(right, total, predicted, float(fields["loss_sum"]), confused)
    # Refuse impossible counts: those of one client would spoil the accuracy over all.
    possible = bool((right >= 0).all() and (right <= total).all() and (right <= predicted).all())
    few = bool((total <= MOST_EXAMPLES).all() and (predicted <= MOST_EXAMPLES * classes).all())
    if (
        not (possible and few)
        or int(predicted.sum()) != made.n
        or not 0 <= made.loss_sum < math.inf
    ):
        raise InputError(
            "its counts are none: some label has more right than there are, or over 10^12 examples"
        )
    return made


class Gathered(NamedTuple):
    """Clients' scores on validation and test examples by id, and why others have none."""

    scores: dict[int, Score]
    tests: dict[int, OwnScores]
    bad: dict[int, Dropped]


def scores_of(
    replies: Iterable[Message], client_of: Callable[[Message], int | None], classes: int,
    clients: int, check: Callable[[int, Score, OwnScores | None], None],
) -> Gathered:  # fmt: skip
    """Each client's counts; `check` raises InputError for counts that a client cannot have.

    Messages of nodes that are no client are left out.
    """
    read = Gathered({}, {}, {})
    for reply in replies:
        if (client := client_of(reply)) is None:
            continue
        bad = failed_client(client, reply)
        try:
            if bad is None:
                one, tested = score_in(reply.content, classes), None
                if TEST in reply.content:
                    tested = own_scores_in(reply.content, classes, clients)
                check(client, one, tested)
                read.scores[client] = one
                read.tests.update({} if tested is None else {client: tested})
        except Exception as e:
            # The numbers come from another machine: any exception means that they are invalid.
            bad = Dropped(client, from_elsewhere(str(e) or type(e).__name__), "reply")
        read.bad.update({} if bad is None else {client: bad})
    return read


def own_scores_in(content: RecordDict, classes: int, clients: int) -> OwnScores:
    """The inverse of `scored_tests`. Raises InputError for numbers that cannot be counts."""
    validation, test = score_in(content, classes), score_in(content, classes, TEST)
    shared = score_in(content, classes, SHARED) if SHARED in content else None
    sent = None
    if ROUTER in content:
        fields = fields_of(content, ROUTER)
        sent = torch.tensor(fields["sent"], dtype=torch.int64).reshape(clients)
    # All of these must be over the same test examples.
    totals = [test.n if shared is None else shared.n, test.n if sent is None else int(sent.sum())]
    if totals != [test.n, test.n] or (sent is not None and bool((sent < 0).any())):
        raise InputError("its counts are none: they are of different numbers of examples")
    return OwnScores(validation, test, shared, sent)
