"""Training one algorithm on a task, with metrics on the way."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from fedshift.algorithms.base import Algorithm
from fedshift.data import Task
from fedshift.engine.backends import Backend, loop
from fedshift.engine.profile import CHECKPOINTING, EVALUATION, PLANNING, Clock, Idle
from fedshift.engine.round import open_round
from fedshift.engine.run import Federation, Round, draw_cohort, run, start
from fedshift.engine.traffic import Meter, Traffic
from fedshift.engine.trial import check_company
from fedshift.errors import DivergedError, InputError, NeedlessWarning
from fedshift.estimate import AccuracyEstimate, estimate_target_accuracy
from fedshift.evaluation.scores import Score, score
from fedshift.experiments.config import Training
from fedshift.experiments.label_sets import SetRound, set_round
from fedshift.experiments.metrics import Metrics
from fedshift.experiments.played import Played, describe_weights, reach, registered
from fedshift.experiments.progress import Keeper, Missed, Progress, Saver
from fedshift.experiments.served import (
    LastRound,
    Observed,
    ServedMetrics,
    last_round,
    models,
    observe,
    whole,
)
from fedshift.tree import Params

Listener = Callable[[dict[str, Any]], None]


class Play(Protocol):
    """What gives the rounds of a run: `engine.run.run`, or another engine in its place."""

    def __call__(
        self,
        algorithm: Algorithm,
        federation: Federation,
        rounds: int,
        *,
        cohort: int | None = None,
        backend: Backend = loop,
        after: Round | None = None,
    ) -> Iterator[Round]: ...


def listeners(*all_: Listener) -> Listener:
    """One listener that tells all."""

    def tell(event: dict[str, Any]) -> None:
        for listen in all_:
            listen(event)

    return tell


def silent(event: dict[str, Any]) -> None:
    """A listener that hears nothing."""


@dataclass(frozen=True, eq=False)
class Outcome:
    """A trained model and all that was measured on the way.

    weights   [M] over all clients, or, where rounds draw cohorts, their means over the rounds
    sets      per evaluated round, for a method with label sets
    traffic   of the last round
    missed    answers that did not come, or could not be used
    played    the weights of the rounds, where these draw cohorts; None elsewhere
    """

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
    sets: tuple[SetRound, ...] = ()
    traffic: Traffic = Traffic()
    missed: Missed = Missed()
    played: Played | None = None

    @property
    def final(self) -> Metrics:
        """The metrics after the last round."""
        return self.metrics[-1]

    @property
    def best(self) -> Metrics | None:
        """The evaluated round of lowest validation loss (the first of equals): early stopping.

        The FedPALS paper keeps this model; None without validation examples that follow T.
        """
        return best_of(self.metrics)


def best_of(metrics: Iterable[Metrics]) -> Metrics | None:
    """The round of lowest validation loss, the first of equals; None where none has one."""
    known = [m for m in metrics if not math.isnan(m.validation_loss)]
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
    play: Play = run,
    keeper: Keeper | None = None,
    clock: Clock = Idle(),
) -> Outcome:
    """Run all rounds; evaluate as `training` says, and after the last.

    keeper: where to keep checkpoints, and to go on from where there are some. Raises
    KeyboardInterrupt, with an exit code, where the keeper is asked to stop. clock: told what the
    time goes to.
    """
    saver, meter, seen = Saver(keeper, label, training.rounds), Meter(clock=clock), None
    done = saver.start()
    # First: a backend that cannot train this says so before anybody hears of rounds.
    played = _asked(play, algorithm, federation, training, meter, done.after)
    listen(_begun(label, done, training.rounds))
    began = time.perf_counter()
    for current in clock.each(PLANNING, _noting(played, done)):
        seconds = time.perf_counter() - began
        weights = describe_weights(current, federation.table, task.target)
        listen(_played(label, current, training.rounds, seconds) | weights)
        done.after, done.traffic, done.missed = current, meter.last, done.missed.after(current)
        if training.draws(len(federation.clients)):
            done.played = done.played.after(current, algorithm, federation.table, task.target)
        if training.evaluates(current.t):
            with clock.of(EVALUATION):
                seen = evaluate(algorithm, current, federation, task)
            done.metrics.append(_metrics(current, seen, federation, task))
            done.served += [] if seen.served is None else [seen.served.metrics]
            done.sets += set_round(current)
            listen({"event": "evaluation", "run": label, **vars(done.metrics[-1]), **_own(seen)})
        with clock.of(CHECKPOINTING):
            saver.played(done)
        began = time.perf_counter()
    return _outcome(algorithm, federation, task, label, done, seen)


def _asked(
    play: Play, algorithm: Algorithm, federation: Federation, training: Training,
    backend: Backend, after: Round | None,
) -> Iterator[Round]:  # fmt: skip
    """The rounds, without warnings of what the summary says."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NeedlessWarning)
        return play(
            algorithm, federation, training.rounds,
            cohort=training.cohort, backend=backend, after=after,
        )  # fmt: skip


def _noting(played: Iterator[Round], done: Progress) -> Iterator[Round]:
    """The rounds played; the error of training that diverges says what was measured before."""
    try:
        yield from played
    except DivergedError as e:
        e.measured = tuple(done.metrics)
        raise


def _own(seen: Evaluation) -> dict[str, float]:
    """Where clients test on their own data: what all models together, and each alone, get right."""
    if seen.served is None:
        return {}
    found = seen.served.metrics
    return {"system_accuracy": found.system_accuracy, "average_accuracy": found.average_accuracy}


def _outcome(
    algorithm: Algorithm, federation: Federation, task: Task, label: str, done: Progress,
    seen: Evaluation | None,
) -> Outcome:  # fmt: skip
    """What a complete run leaves; `seen` is None where its last round was played before."""
    last = done.after
    assert last is not None  # a run has at least one round
    seen = evaluate(algorithm, last, federation, task) if seen is None else seen
    # None are known of rounds that a version without `Played` has played.
    played = done.played if done.played.rounds else None
    everybody = torch.arange(len(federation.clients))
    weights = algorithm.weigh(last.server, everybody).tolist() if played is None else played.weights
    return Outcome(
        label,
        last.server.get("params", {}),
        last.server.get("buffers", {}),
        tuple(weights),
        tuple(done.metrics),
        seen.test,
        seen.clients,
        seen.estimate,
        replace(federation, table=registered(last, federation.table)),
        last,
        tuple(done.served),
        _at_end(algorithm, last, federation, task, seen),
        tuple(done.sets),
        done.traffic,
        done.missed,
        played,
    )


def _at_end(
    algorithm: Algorithm, current: Round, federation: Federation, task: Task, seen: Evaluation
) -> LastRound | None:
    """What is measured after the last round alone, where clients serve models of their own."""
    if seen.served is None:
        return None
    return last_round(algorithm, current, federation, task, seen.served.answers)


def check_first_round(
    algorithm: Algorithm, federation: Federation, training: Training, task: Task
) -> None:
    """Whatever the weights refuse, they refuse before anything is written or trained."""
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
    open_round(algorithm, server, ids, 1)
    if not task.tests and not whole(server, federation):
        raise InputError(
            "this method leaves every client with a model of its own, and there is none for a "
            'target elsewhere. Set shift.target = "clients" to test on the clients\' own data'
        )


def _begun(label: str, done: Progress, rounds: int) -> dict[str, Any]:
    said = {"event": "start", "run": label, "rounds": rounds}
    return said if done.after is None else said | {"after": done.after.t}


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


def _metrics(current: Round, seen: Evaluation, federation: Federation, task: Task) -> Metrics:
    left = reach(current, federation.table, task.target)
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
        ess=left.ess,
        ess_fraction=left.ess_fraction,
        gap=left.gap,
    )
