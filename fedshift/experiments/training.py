"""Training one algorithm on a task, with metrics on the way."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fedshift.algorithms.base import Algorithm
from fedshift.data import Task
from fedshift.engine.evaluate import Score, score
from fedshift.engine.rounds import Federation, Round, draw_cohort, run, start
from fedshift.errors import InputError
from fedshift.estimate import AccuracyEstimate, estimate_target_accuracy
from fedshift.experiments.config import Training
from fedshift.experiments.served import (
    LastRound,
    Observed,
    ServedMetrics,
    last_round,
    models,
    observe,
    whole,
)
from fedshift.server.pals import effective_sample_size
from fedshift.tree import Params

Listener = Callable[[dict[str, Any]], None]


def listeners(*all_: Listener) -> Listener:
    """One listener that tells all."""

    def tell(event: dict[str, Any]) -> None:
        for listen in all_:
            listen(event)

    return tell


def silent(event: dict[str, Any]) -> None:
    """A listener that hears nothing."""


@dataclass(frozen=True)
class Metrics:
    """What is known after one evaluated round. Accuracies are fractions, losses nats.

    target_*             on test examples that follow T (macro F1: see `Score`)
    estimated_accuracy   sum_y T(y) recall(y) from the clients' validation counts, with its
    estimated_se         standard error
    validation_*         on validation examples that follow T, where there are any
    source_accuracy      on the clients' pooled validation examples: what selection without a
                         target would look at
    """

    round: int
    train_loss: float
    target_accuracy: float
    target_loss: float
    target_macro_f1: float
    estimated_accuracy: float
    estimated_se: float
    validation_accuracy: float
    validation_loss: float
    source_accuracy: float
    clients_trained: int
    ess: float


@dataclass(frozen=True, eq=False)
class Outcome:
    """A trained model and all that was measured on the way."""

    label: str
    params: Params
    buffers: Params
    weights: tuple[float, ...]
    metrics: tuple[Metrics, ...]
    test: Score
    clients: tuple[Score, ...]
    estimate: AccuracyEstimate
    federation: Federation
    last: Round
    served: tuple[ServedMetrics, ...] = ()
    at_end: LastRound | None = None

    @property
    def final(self) -> Metrics:
        """The metrics after the last round."""
        return self.metrics[-1]

    @property
    def best(self) -> Metrics | None:
        """The evaluated round of lowest validation loss (the first of equals): early stopping.

        The FedPALS paper keeps this model; None without validation examples that follow T.
        """
        known = [m for m in self.metrics if not math.isnan(m.validation_loss)]
        return min(known, key=lambda m: m.validation_loss, default=None)


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Scores on everything that a task holds out: of the global model, or of all clients' models.

    served: how the clients' models serve, where every client has a test set of its own
    """

    test: Score
    clients: tuple[Score, ...]
    validation: Score | None
    estimate: AccuracyEstimate
    served: Observed | None = None


def evaluate(
    algorithm: Algorithm, current: Round, federation: Federation, task: Task
) -> Evaluation:
    """Score a round's model (or models) on the test examples and on each client's validation.

    Where clients have test sets of their own, every client's validation examples are scored by the
    model that it serves, and the test examples by the system of all clients.
    """
    model, classes = algorithm.model, len(task.classes)
    served: Observed | None = None
    if task.tests:
        pairs: Sequence[tuple[Params, Params]] = models(algorithm, current, federation)
        served = observe(algorithm, current, federation, task)
        test = served.score
    else:
        pair = (current.server["params"], current.server["buffers"])
        pairs = [pair] * len(task.clients)
        test = score(model, *pair, task.test, classes)
    clients = tuple(
        score(model, *own, held, classes) for own, held in zip(pairs, task.validation, strict=True)
    )
    held, pooled = task.target_validation, pool(clients)
    validation = None if held is None else score(model, *pairs[0], held, classes)
    estimate = estimate_target_accuracy(pooled.correct, pooled.total, task.target.numpy())
    return Evaluation(test, clients, validation, estimate, served)


def pool(scores: Sequence[Score]) -> Score:
    """The sum of scores."""
    return sum(scores[1:], start=scores[0])


def train(
    algorithm: Algorithm,
    federation: Federation,
    task: Task,
    training: Training,
    *,
    label: str,
    listen: Listener = silent,
) -> Outcome:
    """Run all rounds; evaluate as `training` says, and after the last."""
    _check_first_round(algorithm, federation, training, task)
    listen({"event": "start", "run": label, "rounds": training.rounds})
    metrics: list[Metrics] = []
    served: list[ServedMetrics] = []
    began = time.perf_counter()
    for current in run(algorithm, federation, training.rounds, cohort=training.cohort):
        now = time.perf_counter()
        listen(_played(label, current, training.rounds, now - began))
        began = now
        if not training.evaluates(current.t):
            continue
        seen = evaluate(algorithm, current, federation, task)
        metrics.append(_metrics(current, seen, federation))
        served += [] if seen.served is None else [seen.served.metrics]
        listen({"event": "evaluation", "run": label, **vars(metrics[-1])})
        began = time.perf_counter()
    weights = algorithm.weigh(current.server, torch.arange(len(federation.clients)))
    server, answers = current.server, seen.served
    at_end = (
        None
        if answers is None
        else last_round(algorithm, current, federation, task, answers.answers)
    )
    return Outcome(
        label, server.get("params", {}), server.get("buffers", {}), tuple(weights.tolist()),
        tuple(metrics), seen.test, seen.clients, seen.estimate, federation, current, tuple(served),
        at_end,
    )  # fmt: skip


def _check_first_round(
    algorithm: Algorithm, federation: Federation, training: Training, task: Task
) -> None:
    """Whatever the weights refuse, they refuse before anything is written or trained."""
    size = len(federation.clients) if training.cohort is None else training.cohort
    ids = draw_cohort(len(federation.clients), size, 1, federation.seeds.cohort)
    server = start(algorithm, federation).server
    algorithm.at(1).weigh(server, ids)
    if not task.tests and not whole(server, federation):
        raise InputError(
            "this method leaves every client with a model of its own, and there is none for a "
            'target elsewhere. Set shift.target = "clients" to test on the clients\' own data'
        )


def _played(label: str, current: Round, rounds: int, seconds: float) -> dict[str, Any]:
    return {
        "event": "round",
        "run": label,
        "round": current.t,
        "rounds": rounds,
        "train_loss": current.loss,
        "clients": list(current.trained),
        "seconds": seconds,
    }


def _metrics(current: Round, seen: Evaluation, federation: Federation) -> Metrics:
    sizes = federation.table["n"][current.cohort].numpy()
    return Metrics(
        round=current.t,
        train_loss=current.loss,
        target_accuracy=seen.test.accuracy,
        target_loss=seen.test.loss,
        target_macro_f1=seen.test.macro_f1,
        estimated_accuracy=seen.estimate.accuracy,
        estimated_se=seen.estimate.standard_error,
        validation_accuracy=math.nan if seen.validation is None else seen.validation.accuracy,
        validation_loss=math.nan if seen.validation is None else seen.validation.loss,
        source_accuracy=pool(seen.clients).accuracy,
        clients_trained=len(current.trained),
        ess=effective_sample_size(current.weights.numpy(), sizes),
    )
