"""Measurements where the clients' models stay at their sites, from the counts that each one sends.

Accuracies of a client's own model on its own test examples are those of one process. What all
models say together (votes, answers of the client that a router names) needs the models in one
place, and is not measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedshift.algorithms.base import Algorithm
from fedshift.data import Task
from fedshift.engine.round import Round
from fedshift.engine.run import Federation, first_state, start
from fedshift.errors import InputError
from fedshift.evaluation.scores import OwnScores, Score
from fedshift.evaluation.serving import average_accuracy
from fedshift.experiments.engines import OnSites
from fedshift.experiments.measures.measuring import estimated
from fedshift.experiments.measures.played import registered
from fedshift.experiments.measures.served import (
    REFITS,
    TOLERANCE,
    LastRound,
    Observed,
    advice,
    fitted,
)
from fedshift.experiments.training import Evaluation, pool
from fedshift.record.rounds import ServedMetrics
from fedshift.router.refit import LOADING, discriminant, penalised
from fedshift.router.route import Router

# Of `Router.refitted`, whose limit of rounds is its default.
ROUNDS = 2000


def check_own_models(name: str, algorithm: Algorithm, federation: Federation) -> None:
    """Raise InputError for a method whose clients' models need what only the server has."""
    server, ids = start(algorithm, federation).server, torch.arange(len(federation.clients))
    stage = algorithm.at(1)
    context = server | {"cohort": {"id": ids, "weight": stage.weigh(server, ids)}}
    shared = {part: server.get(part, {}) for part in ("params", "buffers")}
    try:
        stage.model_for(shared | stage.broadcast(context, 0), first_state(algorithm, federation, 0))
    except KeyError as e:
        raise InputError(
            f'method.name = "{name}": the model that a client serves needs {e} of the server, '
            "which clients are not sent, so that none can test its own; simulate it "
            "(--engine flower-sim), or take a target of the server's"
        ) from None


def evaluate_on_sites(
    engine: OnSites, algorithm: Algorithm, current: Round, federation: Federation, task: Task
) -> Evaluation:
    """As `evaluate`: each client's own model on its own examples, client by client.

    The test score is that of every client's model on its own test examples. A client that does not
    answer has no examples.
    """
    classes, clients = len(task.classes), range(len(federation.clients))
    sent = engine.own_scores(algorithm, current)
    zeros = torch.zeros(classes, dtype=torch.int64)
    nothing = Score(zeros, zeros, zeros, 0.0)
    given = [sent.get(i, OwnScores(nothing, nothing, None, None)) for i in clients]
    validation = tuple(one.validation for one in given)
    estimate, others = estimated(task, pool(validation))
    tested = [one.own for one in given]
    test = sum(tested[1:], start=tested[0])
    metrics = _served_metrics(current, given, registered(current, federation.table)["n"])
    observed = Observed(metrics, test, None, tuple(given))
    silent = tuple(i for i in clients if i not in sent)
    return Evaluation(test, validation, None, estimate, observed, others, silent=silent)


def _served_metrics(current: Round, given: list[OwnScores], sizes: Tensor) -> ServedMetrics:
    per_client = torch.tensor([one.own.accuracy for one in given], dtype=torch.float64)
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
        global_accuracy=pool(shared).accuracy if shared else none,
        vote_accuracy=none,
        routed_posterior=none,
        routed_density=none,
        mixture_accuracy=none,
        oracle_routed=pool([one.own for one in given]).accuracy,
        router_accuracy=right / queries if queries else none,
    )


def last_round_on_sites(
    engine: OnSites,
    algorithm: Algorithm,
    current: Round,
    federation: Federation,
    observed: Observed,
) -> LastRound:
    """As `last_round`: fits of the router by messages, where the method trains one."""
    tested = [one.own for one in observed.own]
    details: dict[str, Any] = {
        "client_accuracy": [None if math.isnan(one.accuracy) else one.accuracy for one in tested],
        "class_accuracy": [one.recall for one in tested],
        "router": None,
    }
    last = LastRound({}, details, on_sites=True)
    if all(one.sent is None for one in observed.own):
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
