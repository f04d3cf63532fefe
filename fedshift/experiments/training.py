"""Checks before a run trains, measurements after its rounds, and its events."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

from fedshift.algorithms.base import Algorithm
from fedshift.data import Examples, Task
from fedshift.engine.round import open_round
from fedshift.engine.run import Federation, Round, draw_cohort, start
from fedshift.engine.trial import check_company
from fedshift.errors import InputError
from fedshift.estimate import AccuracyEstimate
from fedshift.evaluation.scores import Scored
from fedshift.experiments.config.custom import Metric
from fedshift.experiments.config.schema import Training
from fedshift.experiments.measures.custom_metrics import metric_values
from fedshift.experiments.measures.measuring import estimated, scored
from fedshift.experiments.measures.played import reach
from fedshift.experiments.measures.served import Observed, models, observe, whole
from fedshift.record.rounds import Metrics
from fedshift.tree import Params

Listener = Callable[[dict[str, Any]], None]


def listeners(*all_: Listener) -> Listener:
    """One listener that passes events to all of these."""

    def tell(event: dict[str, Any]) -> None:
        for listen in all_:
            listen(event)

    return tell


def silent(event: dict[str, Any]) -> None:
    """A listener that ignores events."""


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Scores on everything that a task holds out: of the global model, or of all clients' models.

    served: how the clients' models serve, where every client has a test set of its own. own: other
    numbers by name, and the user's metrics. tests: of each client's own test set, or (). silent:
    clients that were to measure and sent nothing.
    """

    test: Scored
    clients: tuple[Scored, ...]
    validation: Scored | None
    estimate: AccuracyEstimate
    served: Observed | None = None
    others: Mapping[str, float] = field(default_factory=dict)
    tests: tuple[Scored, ...] = ()
    silent: tuple[int, ...] = ()


def evaluate(
    algorithm: Algorithm, current: Round, federation: Federation, task: Task,
    metrics: Mapping[str, Metric] = MappingProxyType({}),
    sent: Mapping[int, Scored] | None = None,
) -> Evaluation:  # fmt: skip
    """Scored a round's model (or models) on the test examples and on each client's validation.

    sent: what clients measured on their own validation examples; None: these are here.

    Where clients have test sets of their own, every client's validation examples are scored by the
    model that it serves, and the test examples by the system of all clients.
    """
    rate, served = partial(scored, task, algorithm.model), None
    shared = (current.server.get("params", {}), current.server.get("buffers", {}))
    tests: tuple[Scored, ...] = ()
    # The clients' own models are what is used there, so they are what is tested.
    if task.tests:
        pairs: Sequence[tuple[Params, Params]] = models(algorithm, current, federation)
        if task.outputs:  # votes and routers are of classes
            tests = tuple(map(rate, pairs, task.tests))
        else:
            served = observe(algorithm, current, federation, task)
        test = pool(tests) if served is None else served.score
    else:
        pairs = [shared] * len(task.clients)
        test = rate(shared, task.test, confusion=True)
    if sent is None:
        clients = tuple(map(rate, pairs, task.validation))
        away = [i for i, data in enumerate(task.validation) if data.scorer and len(data)]
        # The score of examples at a site counts none where its client does not answer.
        silent = tuple(i for i in away if not clients[i].n)
    else:
        nothing = rate(pairs[0], Examples(task.test.x[:0], task.test.y[:0]))
        clients = tuple(sent.get(i, nothing) for i in range(len(task.clients)))
        silent = tuple(i for i in range(len(task.clients)) if i not in sent)
    # Of the server's model, whatever the clients serve: it is the server that has the examples.
    data = task.target_validation if whole(current.server, federation) else None
    validation = None if data is None else rate(shared, data)
    estimate, others = estimated(task, pool(clients))
    tested = (pairs, task.tests) if task.tests else (pairs[:1], (task.test,))
    others = test.others | others | metric_values(metrics, algorithm.model, *tested, task)
    return Evaluation(test, clients, validation, estimate, served, others, tests, silent)


def pool(scores: Sequence[Scored]) -> Scored:
    """The sum of scores."""
    return sum(scores[1:], start=scores[0])


def check_first_round(
    algorithm: Algorithm, federation: Federation, training: Training, task: Task
) -> None:
    """Raise errors of the weights before anything is written or trained."""
    size = len(federation.clients) if training.cohort is None else training.cohort
    try:
        ids = draw_cohort(len(federation.clients), size, 1, federation.seeds.cohort)
        check_company(algorithm, len(federation.clients), size)
    except InputError as e:
        raise InputError(f"training.cohort = {size}: {e}") from None
    if training.min_clients > size:
        raise InputError(
            f"training.min_clients = {training.min_clients}, and a round has {size} clients, so "
            f"that all would be skipped; give at most {size}"
        )
    server = start(algorithm, federation).server
    # For its errors: weights that do not exist under this cap or ESS.
    open_round(algorithm, server, ids, 1, federation.gate.max_weight)
    if not task.tests and not whole(server, federation):
        raise InputError(
            "this method leaves every client with a model of its own, and there is none for a "
            'target elsewhere. Set shift.target = "clients" (or data.target, for data of your own) '
            "to test on the clients' own data"
        )


def measured_round(
    current: Round,
    evaluation: Evaluation,
    federation: Federation,
    task: Task,
    algorithm: Algorithm,
) -> Metrics:
    """The numbers of one evaluated round."""
    remaining = reach(current, federation.table, task.target, algorithm)
    return Metrics(
        round=current.t,
        train_loss=current.loss,
        target_accuracy=evaluation.test.accuracy,
        target_loss=evaluation.test.loss,
        target_macro_f1=evaluation.test.macro_f1,
        estimated_accuracy=evaluation.estimate.accuracy,
        estimated_se=evaluation.estimate.standard_error,
        validation_accuracy=math.nan
        if evaluation.validation is None
        else evaluation.validation.accuracy,
        validation_loss=math.nan if evaluation.validation is None else evaluation.validation.loss,
        source_accuracy=pool(evaluation.clients).accuracy,
        clients_trained=len(current.trained),
        ess=remaining.ess,
        ess_fraction=remaining.ess_fraction,
        gap=remaining.gap,
        others=evaluation.others,
    )
