"""One experiment from configuration to outcome, and to its run folder."""

from __future__ import annotations

import contextlib
import math
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedshift.algorithms.base import Algorithm
from fedshift.client.local import Local
from fedshift.data import ClientData, Task
from fedshift.engine.checks.gate import Dropped
from fedshift.engine.profile import (
    CHECKPOINTING,
    EVALUATION,
    OTHER,
    PLANNING,
    Clock,
    Idle,
    Stopwatch,
)
from fedshift.engine.round import weigh
from fedshift.engine.run import Federation, Round, run
from fedshift.engine.traffic import Meter, Traffic
from fedshift.errors import DivergedError, NeedlessWarning, UnfitError
from fedshift.experiments.config.custom import Metric, recipe_of
from fedshift.experiments.config.method_fit import named_alike
from fedshift.experiments.config.schema import Config, Method, Selection, Training
from fedshift.experiments.config.settings import for_densities, setting
from fedshift.experiments.config.wording import in_file_words
from fedshift.experiments.engines import Engine, InProcess, evaluating
from fedshift.experiments.folder.outcome import Choice, Experiment, Outcome
from fedshift.experiments.folder.progress import Keeper, Progress, Saver
from fedshift.experiments.folder.run_folder import (
    EventLog,
    in_turn,
    lock,
    trained_before,
    write_lock,
    write_profile,
    write_run,
    write_start,
)
from fedshift.experiments.measured import (
    Evaluation,
    measure_at_end,
    measure_round,
    measured_round,
)
from fedshift.experiments.measures.correcting import Correcting, Prior, check_prior, corrected
from fedshift.experiments.measures.custom_metrics import try_metrics
from fedshift.experiments.measures.example_weights import untrained
from fedshift.experiments.measures.label_sets import set_round, tuned_early
from fedshift.experiments.measures.played import Played, describe_weights, registered, sizes_alone
from fedshift.experiments.measures.served import unused
from fedshift.experiments.measures.stopping import best_round, check_stopping, ends
from fedshift.experiments.selection import candidates, choose
from fedshift.experiments.task.custom_loss import loss_of, with_loss
from fedshift.experiments.task.preparing import Prepared, oracle_clients, prepare
from fedshift.experiments.training import Listener, check_first_round, listeners, silent
from fedshift.record.folder import CHECKPOINTS, CONFIG, EVENTS, LOCK
from fedshift.record.rounds import Metrics

# Plans have a place for each example of a batch: larger batches are cut to what clients have.
LAID_OUT = 4096

Fit = Callable[[str, dict[str, Any]], tuple[Algorithm, Outcome]]


def record(
    folder: Path,
    config: Config,
    prepared: Prepared,
    listen: Listener,
    engine: Engine | None = None,
    keeper: Keeper | None = None,
    clock: Clock = Idle(),
) -> Experiment:
    """Run an experiment and leave it in `folder`, which is made when training starts.

    keeper: see `kept_in`; a complete folder has no checkpoints. clock: a `Stopwatch`'s seconds go
    to the folder as well.
    """

    engine = engine or InProcess()
    # Lists, because `begin` fills them: the backends before this start, and the one that is
    # recorded.
    new, before, by = not (folder / CONFIG).exists(), list[str](), list[str]()

    def begin(event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "start":
            before.extend([trained_before(folder)] if "after" in event else [])
            # A run that goes on keeps its configuration and, up to its first round, its lock file.
            if not (folder / CONFIG).exists():
                write_start(folder, config, prepared, engine.backend)
        if kind == "round" and not by:  # "auto" has chosen by the first round
            by.append(in_turn(*before, engine.backend))
            write_lock(folder, lock(config, prepared, by[0]), prepared.custom.files)

    # In this order: a folder's first event comes after its configuration and lock file.
    tell = listeners(begin, EventLog(folder), listen)
    with clock.of(OTHER), _clean_up_if_unfit(folder, lambda: new and not by):
        experiment = run_experiment(
            config, listen=tell, prepared=prepared, engine=engine, keeper=keeper, clock=clock
        )
    if isinstance(clock, Stopwatch):
        write_profile(folder, clock.profile())
    write_run(folder, experiment, by[0] if by else trained_before(folder))
    shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
    return experiment


@contextlib.contextmanager
def _clean_up_if_unfit(folder: Path, fresh: Callable[[], bool]) -> Iterator[None]:
    """A backend that cannot train a run at all says so before the first round of a fresh one."""
    try:
        yield
    except UnfitError:
        for name in (CONFIG, LOCK, EVENTS) if fresh() else ():
            (folder / name).unlink(missing_ok=True)
        raise


def federation_of(method: Method, prepared: Prepared) -> Federation:
    """The task's clients; for the oracle, clients drawn anew that follow the target."""
    traits = recipe_of(method, prepared.custom).traits
    return prepared.federation(oracle_clients(prepared) if traits.follows_target else None)


def method_of(method: Method, training: Training, prepared: Prepared) -> Callable[..., Algorithm]:
    """The configured recipe, or the user's method, as a function of its options."""
    clients = prepared.task.clients
    base = setting(
        training, prepared.model, prepared.announced, clients=len(clients),
        seed=prepared.seeds.init, server_inputs=prepared.server_inputs,
        server_examples=prepared.server_examples, shape=tuple(clients[0].x.shape[1:]),
    )  # fmt: skip
    if prepared.custom.schedule is not None:
        base = replace(base, local=replace(base.local, lr=prepared.custom.schedule))
    if prepared.custom.head:
        base = replace(base, head=prepared.custom.head)
    base = replace(base, local=_without_padding(base.local, clients))
    recipe, task = recipe_of(method, prepared.custom), prepared.task
    if recipe.traits.densities:
        base = for_densities(base, prepared)
    make = partial(recipe.make, base)
    loss = loss_of(task, prepared.custom.loss)
    return lambda **options: with_loss(make(**options), loss, task.kind, recipe.name)


def _without_padding(local: Local, clients: Sequence[ClientData]) -> Local:
    """A huge batch, which means "all examples", is cut to what clients have: same steps."""
    largest = max(LAID_OUT, *(len(c.y) for c in clients))
    return replace(local, batch=largest) if local.batch > largest else local


def run_experiment(
    config: Config,
    *,
    listen: Listener = silent,
    prepared: Prepared | None = None,
    engine: Engine | None = None,
    keeper: Keeper | None = None,
    clock: Clock = Idle(),
) -> Experiment:
    """Prepare (unless given), train, and where `ess = "auto"` choose among candidates.

    engine: what plays the rounds; the clients one after the other in this process by default.
    clock: measures what the time of all of them goes to.
    """
    torch.set_num_threads(config.training.threads)
    ready = prepare(config) if prepared is None else prepared
    options = config.method.options
    check_stopping(config.training, ready.task)
    check_prior(config.training.prior, ready.task)
    of = recipe_of(config.method, ready.custom).traits
    correct = Correcting(config.training.prior, np.asarray(ready.announced), of.even, of.at_target)
    try_metrics(ready.custom.metrics, ready.model, ready.task)
    federation = federation_of(config.method, ready)
    # The keeper reads checkpoints into this shelf, so new states go there, too.
    if keeper is not None:
        federation = replace(federation, shelf=keeper.shelf)

    def fit(candidate: str, given: dict[str, Any]) -> tuple[Algorithm, Outcome]:
        algorithm = _checked(config.method, config.training, ready, federation, given)
        # A name for each candidate: its checkpoints and events are told from others' by it.
        label = f"{config.name} {candidate}" if candidate else config.name
        trained = train(
            algorithm, federation, ready.task, config.training, given, label=label, listen=listen,
            engine=engine or InProcess(), keeper=keeper, clock=clock, metrics=ready.custom.metrics,
            correct=correct,
        )  # fmt: skip
        return algorithm, trained

    if options.get("ess") != "auto":
        return Experiment(config, ready, *fit("", options), None)
    prior = config.training.prior
    chosen, choice = _automatic(options, config.selection, prior, ready, federation, fit)
    return Experiment(config, ready, chosen, choice.chosen.outcome, choice)


def check_method(method: Method, training: Training, ready: Prepared) -> list[str]:
    """Raise InputError for a method that cannot be used on this task, before any is trained.

    Returns sentences on what of it is of no use there.
    """
    check_prior(training.prior, ready.task)
    given = dict(method.options)
    if given.get("ess") == "auto":  # any of its candidates
        given = {k: v for k, v in given.items() if k != "ess"} | {"lam": 0.0}
    federation = federation_of(method, ready)
    algorithm = _checked(method, training, ready, federation, given)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NeedlessWarning)  # the summary says it
        run(algorithm, federation, training.rounds, cohort=training.cohort)  # plays no round yet
    name = recipe_of(method, ready.custom).name
    return [
        *unused(name, algorithm, federation, ready.task),
        *untrained(name, algorithm, training.rounds),
    ]


def _checked(
    method: Method, training: Training, ready: Prepared, federation: Federation,
    given: dict[str, Any],
) -> Algorithm:  # fmt: skip
    """The method with these options, whose first round can be played."""
    # The user wrote a file, so errors name its keys and not arguments of Python.
    with in_file_words("method", named_alike(recipe_of(method, ready.custom))):
        algorithm = method_of(method, training, ready)(**given)
        check_first_round(algorithm, federation, training, ready.task)
    return algorithm


def _automatic(
    options: Mapping[str, Any], selection: Selection, prior: Prior, ready: Prepared,
    federation: Federation, fit: Fit,
) -> tuple[Algorithm, Choice]:  # fmt: skip
    """(the method with the chosen ESS, all candidates): one training for each ESS of the grid."""
    # Each candidate sets `ess`, or lam = 0, itself; all other options are common to them.
    options = {k: v for k, v in options.items() if k != "ess"}
    solver = {k: options[k] for k in ("cap", "fidelity") if k in options}
    with in_file_words("method", {name: name for name in solver}):
        grid = candidates(
            federation.table["labels"].numpy(), ready.announced, selection.grid, **solver
        )
    made: dict[str, Algorithm] = {}

    def train_one(label: str, fraction: float) -> Outcome:
        given = {"lam": 0.0} if fraction == 0 else {"ess": fraction}
        made[label], outcome = fit(label, options | given)
        return outcome

    choice = choose(ready.task, selection, grid, train_one, prior)
    return made[choice.chosen.label], choice


def train(
    algorithm: Algorithm, federation: Federation, task: Task, training: Training,
    options: Mapping[str, Any], *, label: str, listen: Listener, engine: Engine,
    keeper: Keeper | None, clock: Clock, metrics: Mapping[str, Metric], correct: Correcting,
) -> Outcome:  # fmt: skip
    """Run all rounds, or until the estimate stops rising; evaluate as `training` says.

    options: the method's, for engines whose clients make it themselves. keeper: where to keep
    checkpoints, and to go on from where there are some. Raises KeyboardInterrupt, with an exit
    code, where the keeper is asked to stop. clock: measures what the time goes to.
    """
    saver, meter, scores = Saver(keeper, label), Meter(clock), None
    measure = partial(measure_round, algorithm, federation, task, engine, metrics)
    done = saver.start(best=training.keep == "best")
    # First: a backend that cannot train this says so before any round is announced.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NeedlessWarning)  # the summary says it
        rounds = engine.rounds(
            algorithm, federation, training, options, after=done.after, meter=meter
        )
    listen(_start_event(label, done, training.rounds))
    began, over = time.perf_counter(), ends(training, done.metrics)  # of a run that goes on
    for current in () if over else clock.each(PLANNING, _note_divergence(rounds, done)):
        seconds, meter.waited = time.perf_counter() - began - meter.waited, 0.0
        # Announced before evaluation, which may take longer than the round.
        weights = describe_weights(current, federation.table, task.target, algorithm)
        _tell_drops(engine, label, current, listen)
        listen(_round_event(label, current, training.rounds, seconds, meter.last) | weights)
        done.after, done.traffic, done.missed = current, meter.last, done.missed.after(current)
        done.played = done.played.after(current, algorithm, federation.table, task.target)
        if training.evaluates(current.t):
            with clock.of(EVALUATION):
                scores = measure(current)
            _enter(done, current, scores, federation, task, algorithm, training)
            listen(_evaluation_event(label, done.metrics[-1], scores))
        else:
            done.sets += tuned_early(current, algorithm, training.rounds)
        last = current.t == training.rounds or ends(training, done.metrics)
        with clock.of(CHECKPOINTING):
            saver.played(done, last=last)
        if last:
            break
        began = time.perf_counter()
    return _outcome(
        algorithm, federation, task, label, done, scores, engine, training, measure, correct
    )


def _enter(
    done: Progress, current: Round, scores: Evaluation, federation: Federation, task: Task,
    algorithm: Algorithm, training: Training,
) -> None:  # fmt: skip
    """Add what was measured after a round, and note whether it is the best so far."""
    done.metrics.append(measured_round(current, scores, federation, task, algorithm))
    done.served += [] if scores.served is None else [scores.served.metrics]
    done.sets += set_round(current, algorithm)
    if training.keep == "best" and best_round(done.metrics) == current.t:
        done.best = current


def _note_divergence(played: Iterator[Round], done: Progress) -> Iterator[Round]:
    """The rounds played; the error of training that diverges says what was measured before."""
    try:
        while (current := _next(played)) is not None:
            yield current
    except DivergedError as e:
        # For a table: early stopping may have kept a round from before training diverged.
        e.measured = tuple(done.metrics)
        raise


def _next(played: Iterator[Round]) -> Round | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NeedlessWarning)  # the summary says it
        return next(played, None)


def _start_event(label: str, done: Progress, rounds: int) -> dict[str, Any]:
    event = {"event": "start", "run": label, "rounds": rounds}
    return event if done.after is None else event | {"after": done.after.t}


def _round_event(
    label: str, current: Round, rounds: int, seconds: float, traffic: Traffic
) -> dict[str, Any]:
    # Engines that count none leave it empty.
    counted = {} if traffic == Traffic() else {"bytes_down": traffic.down, "bytes_up": traffic.up}
    return {
        "event": "round",
        "run": label,
        "round": current.t,
        "rounds": rounds,
        "train_loss": current.loss,
        "clients": list(current.trained),
        "seconds": seconds,
        **counted,
    }


def _tell_drops(engine: Engine, label: str, current: Round, listen: Listener) -> None:
    for one in () if engine.tells_drops else current.dropped:
        listen(dropped_event(label, current.t, one))


def dropped_event(label: str, t: int, one: Dropped) -> dict[str, Any]:
    """A client that drops out of round t, and why."""
    return {"event": "dropped", "run": label, "round": t, **one._asdict()}


def _evaluation_event(label: str, measures: Metrics, scores: Evaluation) -> dict[str, Any]:
    numbers = measures.numbers() | _served_accuracies(scores)
    of, silent = len(scores.clients), len(scores.silent)
    some = {"scored_by": f"{of - silent} of {of} clients"} if silent else {}
    return {"event": "evaluation", "run": label, **numbers, **some}


def _served_accuracies(scores: Evaluation) -> dict[str, float]:
    """Accuracy of all models as a system and the mean of each alone, with client test sets."""
    if scores.served is None:
        return {}
    metrics = scores.served.metrics
    shown = {"average_accuracy": metrics.average_accuracy}
    # Not measured where models stay at their sites.
    if math.isnan(metrics.system_accuracy):
        return shown
    return {"system_accuracy": metrics.system_accuracy, **shown}


def _outcome(
    algorithm: Algorithm, federation: Federation, task: Task, label: str, done: Progress,
    scores: Evaluation | None, engine: Engine, training: Training,
    measure: Callable[[Round], Evaluation], correct: Correcting,
) -> Outcome:  # fmt: skip
    """Outcome of a complete run; scores is None if its last round came from a checkpoint."""
    last = done.best or done.after
    assert last is not None  # a run has at least one round
    # None: the run was killed between its last checkpoint and its summary.
    if scores is None or last is not done.after:
        scores = measure(last)
    played, weights = _weights(algorithm, federation, done, last, training)
    table = registered(last, federation.table)
    correct = correct.of_round(algorithm, last.t, training.rounds)
    with evaluating(engine):
        moved = corrected(correct, algorithm, last, task, table, weights, engine)
    return Outcome(
        label,
        last.server.get("params", {}),
        last.server.get("buffers", {}),
        weights,
        tuple(done.metrics),
        scores.test,
        scores.clients,
        scores.estimate,
        replace(federation, table=table),
        last,
        tuple(one for one in done.served if one.round <= last.t),
        measure_at_end(algorithm, last, federation, task, scores, engine),
        tuple(one for one in done.sets if one.round <= last.t),
        done.traffic,
        done.missed,
        played,
        scores.tests,
        scores.silent,
        sizes_alone(last, federation.table),
        moved,
    )


def _weights(
    algorithm: Algorithm, federation: Federation, done: Progress, last: Round, training: Training
) -> tuple[Played | None, tuple[float, ...]]:
    """The weights of the rounds, where not all clients were in every one, and the run's [M]."""
    # With all clients in every round, one solution has the weights of all rounds to the last bit.
    means = training.draws(len(federation.clients)) or done.missed.rounds
    if means and done.played.rounds:
        return done.played, done.played.weights
    all_clients = torch.arange(len(federation.clients))
    cap = federation.gate.max_weight
    return None, tuple(weigh(algorithm, last.server, all_clients, cap).tolist())
