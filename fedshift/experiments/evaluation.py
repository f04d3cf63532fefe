"""Scores of a round's models: computed in this process, or sent by the clients' sites.

If models stay at their sites, each client counts what its own model gets right on its own test
examples. The accuracies made of these counts equal those of a run in one process. Votes of all
models, and answers of the client that a router names, would need the models in one place; they
are not measured there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from fedshift.algorithms.method import Method
from fedshift.data import Examples, Task
from fedshift.engine.run import Federation, Round
from fedshift.estimate import AccuracyEstimate
from fedshift.evaluation.scores import OwnScores, Score, Scored, pooled
from fedshift.evaluation.serving import average_accuracy
from fedshift.experiments.config.custom import Metric
from fedshift.experiments.engines import Engine, OnSites, evaluating
from fedshift.experiments.measures.custom_metrics import metric_values
from fedshift.experiments.measures.round_weights import reach, registered
from fedshift.experiments.measures.served import (
    REFITS,
    TOLERANCE,
    LastRound,
    Observed,
    advice,
    fitted,
    last_round,
    models,
    observe,
    whole,
)
from fedshift.experiments.measures.task_scores import estimated, scored, scored_each
from fedshift.record.rounds import Metrics, ServedMetrics
from fedshift.router.refit import LOADING, discriminant, penalised
from fedshift.router.route import Router
from fedshift.tree import Params

# The most rounds of messages for a router's refit: the default of `Router.refitted`.
ROUNDS = 2000


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Scores on everything that a task holds out: of the global model, or of all clients' models.

    served  how the clients' models answer, if every client has a test set of its own
    others  more numbers by name, among them the user's metrics
    tests   the scores on each client's own test set, or ()
    silent  clients that were asked for scores and sent none
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
    algorithm: Method, current: Round, federation: Federation, task: Task,
    metrics: Mapping[str, Metric] = MappingProxyType({}),
    sent: Mapping[int, Scored] | None = None,
) -> Evaluation:  # fmt: skip
    """Score a round's model (or models) on the test examples and each client's validation examples.

    sent: the scores that clients sent of their validation examples; None if the examples are here.
    If clients have test sets of their own, the model that a client serves is scored on that
    client's validation examples, and the system of all clients on the test examples.
    """
    rate, served = partial(scored, task, algorithm.model), None
    rate_each = partial(scored_each, task, algorithm.model)
    shared = (current.server.get("params", {}), current.server.get("buffers", {}))
    tests: tuple[Scored, ...] = ()
    # Queries are answered by the clients' own models there, so these are tested.
    if task.tests:
        pairs: Sequence[tuple[Params, Params]] = models(algorithm, current, federation)
        if task.outputs:  # votes and routers exist for classes only
            tests = rate_each(pairs, task.tests)
        else:
            served = observe(algorithm, current, federation, task)
        test = pooled(tests) if served is None else served.score
    else:
        pairs = [shared] * len(task.clients)
        test = rate(shared, task.test, confusion=True)
    if sent is None:
        clients = rate_each(pairs, task.validation)
        away = [i for i, data in enumerate(task.validation) if data.scorer and len(data)]
        # If a client does not answer, the score of its examples counts no example.
        silent = tuple(i for i in away if not clients[i].n)
    else:
        nothing = rate(pairs[0], Examples(task.test.x[:0], task.test.y[:0]))
        clients = tuple(sent.get(i, nothing) for i in range(len(task.clients)))
        silent = tuple(i for i in range(len(task.clients)) if i not in sent)
    # The server holds these examples, so its own model is scored, whatever the clients serve.
    data = task.target_validation if whole(current.server, federation) else None
    validation = None if data is None else rate(shared, data)
    estimate, others = estimated(task, pooled(clients))
    tested = (pairs, task.tests) if task.tests else (pairs[:1], (task.test,))
    others = test.others | others | metric_values(metrics, algorithm.model, *tested, task)
    return Evaluation(test, clients, validation, estimate, served, others, tests, silent)


def measure_round(
    algorithm: Method, federation: Federation, task: Task, engine: Engine,
    metrics: Mapping[str, Metric], current: Round,
) -> Evaluation:  # fmt: skip
    """The scores after a round: computed here, or sent by clients that keep their models."""
    if isinstance(engine, OnSites) and engine.on_sites:
        return evaluate_on_sites(engine, algorithm, current, federation, task)
    with evaluating(engine):
        return evaluate(
            algorithm, current, federation, task, metrics, engine.client_scores(current)
        )


def measure_at_end(
    algorithm: Method, current: Round, federation: Federation, task: Task, scores: Evaluation,
    engine: Engine,
) -> LastRound | None:  # fmt: skip
    """Measurements of the last round only, where clients serve their own models."""
    if scores.served is None:
        return None
    if scores.served.answers is None:
        assert isinstance(engine, OnSites)  # no other engine leaves the answers at the clients
        return last_round_on_sites(engine, algorithm, current, federation, scores.served)
    with evaluating(engine):
        return last_round(algorithm, current, federation, task, scores.served.answers)


def metrics_of_round(
    current: Round,
    evaluation: Evaluation,
    federation: Federation,
    task: Task,
    algorithm: Method,
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
        source_accuracy=pooled(evaluation.clients).accuracy,
        clients_trained=len(current.trained),
        ess=remaining.ess,
        ess_fraction=remaining.ess_fraction,
        gap=remaining.gap,
        others=evaluation.others,
    )


def evaluate_on_sites(
    engine: OnSites, algorithm: Method, current: Round, federation: Federation, task: Task
) -> Evaluation:
    """As `evaluate`, from what each client sends: its own model's scores on its own examples.

    The test score adds up these of all clients. A client that does not answer counts no example.
    """
    classes, clients = len(task.classes), range(len(federation.clients))
    sent = engine.own_scores(algorithm, current)
    zeros = torch.zeros(classes, dtype=torch.int64)
    nothing = Score(zeros, zeros, zeros, 0.0)
    given = [sent.get(i, OwnScores(nothing, nothing, None, None)) for i in clients]
    validation = tuple(one.validation for one in given)
    estimate, others = estimated(task, pooled(validation))
    tested = [one.test for one in given]
    test = pooled(tested)
    metrics = _served_metrics(current, given, registered(current, federation.table)["n"])
    observed = Observed(metrics, test, None, tuple(given))
    silent = tuple(i for i in clients if i not in sent)
    return Evaluation(test, validation, None, estimate, observed, others, silent=silent)


def _served_metrics(current: Round, given: list[OwnScores], sizes: Tensor) -> ServedMetrics:
    per_client = torch.tensor([one.test.accuracy for one in given], dtype=torch.float64)
    measured = per_client[~per_client.isnan()]
    shared = [one.shared for one in given if one.shared is not None]
    routed = [(i, one.sent) for i, one in enumerate(given) if one.sent is not None]
    right = sum(int(sent[i]) for i, sent in routed)
    queries = sum(int(sent.sum()) for _, sent in routed)
    none = math.nan
    return ServedMetrics(
        round=current.t,
        system_accuracy=none,
        average_accuracy=average_accuracy(per_client, sizes) if len(measured) else none,
        worst_accuracy=float(measured.min()) if len(measured) else none,
        global_accuracy=pooled(shared).accuracy if shared else none,
        vote_accuracy=none,
        routed_posterior=none,
        routed_density=none,
        mixture_accuracy=none,
        oracle_routed=pooled([one.test for one in given]).accuracy,
        router_accuracy=right / queries if queries else none,
    )


def last_round_on_sites(
    engine: OnSites,
    algorithm: Method,
    current: Round,
    federation: Federation,
    observed: Observed,
) -> LastRound:
    """As `last_round`; if the method trains a router, it is fitted again by messages."""
    tested = [one.test for one in observed.sites]
    details: dict[str, Any] = {
        "client_accuracy": [None if math.isnan(one.accuracy) else one.accuracy for one in tested],
        "class_accuracy": [one.recall for one in tested],
        "router": None,
    }
    last = LastRound({}, details, on_sites=True)
    if all(one.sent is None for one in observed.sites):
        return last
    first = federation.params, federation.buffers
    router = Router.of_sites(algorithm.at(current.t), current.server, first, current.states)
    sites, cap = engine.sites(), federation.gate.max_weight
    fits: Mapping[str, Callable[[], Router]] = {
        "refitted": partial(router.fitted, penalised(None, TOLERANCE, ROUNDS), sites, cap=cap),
        "moment": partial(router.fitted, discriminant(None), sites, novelty=LOADING, cap=cap),
    }
    routers, failed = fitted({name: fit for name, fit in fits.items() if name in engine.refits})
    notes = [*advice(routers), *failed]
    refits = dict.fromkeys(REFITS, math.nan)
    return replace(last, refits=refits, routers=routers, notes=tuple(notes))
