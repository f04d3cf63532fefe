"""One experiment from configuration to outcome, and to its run folder."""

from __future__ import annotations

import contextlib
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

from fedshift.algorithms.method import Method as Algorithm
from fedshift.client.local import Local
from fedshift.data import ClientData, Task
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
from fedshift.engine.traffic import Meter
from fedshift.errors import DivergedError, NeedlessWarning, UnfitError
from fedshift.experiments.config.custom import Metric, recipe_of
from fedshift.experiments.config.method_fit import named_alike
from fedshift.experiments.config.schema import Config, Method, Selection, Training
from fedshift.experiments.config.training_objects import setting
from fedshift.experiments.config.wording import in_file_words
from fedshift.experiments.engines import Engine, InProcess, evaluating
from fedshift.experiments.evaluation import (
    Evaluation,
    measure_at_end,
    measure_round,
    metrics_of_round,
)
from fedshift.experiments.events import (
    evaluation_event,
    report_drops,
    round_event,
    start_event,
)
from fedshift.experiments.first_checks import check_first_round
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
from fedshift.experiments.listeners import Listener, ignore_event, join_listeners
from fedshift.experiments.measures.correcting import Correcting, Prior, check_prior, corrected
from fedshift.experiments.measures.custom_metrics import try_metrics
from fedshift.experiments.measures.example_weights import untrained
from fedshift.experiments.measures.label_sets import set_round, tuned_early
from fedshift.experiments.measures.round_weights import (
    WeightSums,
    describe_weights,
    registered,
    sizes_alone,
)
from fedshift.experiments.measures.served import unused
from fedshift.experiments.measures.stopping import best_round, check_stopping, ends
from fedshift.experiments.selection import candidates, choose
from fedshift.experiments.task.custom_loss import loss_of, with_loss
from fedshift.experiments.task.prepared import Prepared, with_densities
from fedshift.experiments.task.preparing import oracle_clients, prepare
from fedshift.record.folder import CHECKPOINTS, CONFIG, EVENTS, LOCK

# Plans reserve a place for each example of a batch. A larger batch, as 10**9 for "all examples",
# is cut to the largest client, so that it does not cost memory for places that stay empty.
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
    """Run an experiment and write its results to `folder`, which is created when training starts.

    keeper: see `kept_in`; once the run is complete its checkpoints are deleted. clock: the seconds
    of a `Stopwatch` are written to the folder as well.
    """

    engine = engine or InProcess()
    # before: the backends of earlier starts of this run; by: what lock.json says trained it. Lists,
    # because `begin` fills them in while the run goes on.
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

    # In this order, because a folder's first event comes after its configuration and lock file:
    # a folder with events but without these could not be resumed.
    tell = join_listeners(begin, EventLog(folder), listen)
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
    """Remove the files of a new run whose backend turns out to be unable to train it.

    They hold no result yet, and would keep the folder from being used with another backend.
    """
    try:
        yield
    except UnfitError:
        for name in (CONFIG, LOCK, EVENTS) if fresh() else ():
            (folder / name).unlink(missing_ok=True)
        raise


def federation_of(method: Method, prepared: Prepared) -> Federation:
    """The task's clients; for the oracle, clients drawn afresh so that they follow the target."""
    traits = recipe_of(method, prepared.custom).traits
    return prepared.federation(oracle_clients(prepared) if traits.follows_target else None)


def method_of(method: Method, training: Training, prepared: Prepared) -> Callable[..., Algorithm]:
    """The configured recipe, or the user's method, as a function of its options alone."""
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
        base = with_densities(base, prepared)
    make = partial(recipe.make, base)
    loss = loss_of(task, prepared.custom.loss)
    return lambda **options: with_loss(make(**options), loss, task.kind, recipe.name)


def _without_padding(local: Local, clients: Sequence[ClientData]) -> Local:
    """The same steps with a huge batch, which means "all examples", cut to the largest client."""
    largest = max(LAID_OUT, *(len(c.y) for c in clients))
    return replace(local, batch=largest) if local.batch > largest else local


def run_experiment(
    config: Config,
    *,
    listen: Listener = ignore_event,
    prepared: Prepared | None = None,
    engine: Engine | None = None,
    keeper: Keeper | None = None,
    clock: Clock = Idle(),
) -> Experiment:
    """Prepare (unless given) and train; with `ess = "auto"` choose one of several candidates.

    engine: by default, one that trains the clients one after the other in this process.
    clock: measures how long each activity of the run takes.
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
        # Checkpoints and events of the candidates are kept apart by this label.
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
    """Raise InputError for a method that cannot be used on this task; trains nothing.

    Returns sentences on parts of the method that have no effect there.
    """
    check_prior(training.prior, ready.task)
    given = dict(method.options)
    if given.get("ess") == "auto":  # all its candidates fit, or none: lambda = 0 stands for them
        given = {k: v for k, v in given.items() if k != "ess"} | {"lam": 0.0}
    federation = federation_of(method, ready)
    algorithm = _checked(method, training, ready, federation, given)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NeedlessWarning)  # the summary has a sentence on it
        # `run` checks its arguments at once; no round is played until its result is iterated over.
        run(algorithm, federation, training.rounds, cohort=training.cohort)
    name = recipe_of(method, ready.custom).name
    return [
        *unused(name, algorithm, federation, ready.task),
        *untrained(name, algorithm, training.rounds),
    ]


def _checked(
    method: Method, training: Training, ready: Prepared, federation: Federation,
    given: dict[str, Any],
) -> Algorithm:  # fmt: skip
    """The method with these options, after the checks of its first round."""
    # The user wrote a file, so errors name its keys instead of Python's arguments.
    with in_file_words("method", named_alike(recipe_of(method, ready.custom))):
        algorithm = method_of(method, training, ready)(**given)
        check_first_round(algorithm, federation, training, ready.task)
    return algorithm


def _automatic(
    options: Mapping[str, Any], selection: Selection, prior: Prior, ready: Prepared,
    federation: Federation, fit: Fit,
) -> tuple[Algorithm, Choice]:  # fmt: skip
    """(the method with the chosen ESS, all candidates); trains once for each ESS of the grid."""
    # Each candidate sets `ess`, or lam = 0, itself; they share all other options.
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

    options: the method's, for engines whose clients build it themselves. keeper: writes
    checkpoints; if there are some already, the run goes on from them. Raises KeyboardInterrupt,
    with an exit code, when a stop was requested. clock: measures how long each activity takes.
    """
    saver, meter, scores = Saver(keeper, label), Meter(clock), None
    measure = partial(measure_round, algorithm, federation, task, engine, metrics)
    done = saver.start(best=training.keep == "best")
    # Before the start event, because a backend that cannot train this run raises here.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NeedlessWarning)  # the summary says it
        rounds = engine.rounds(
            algorithm, federation, training, options, after=done.after, meter=meter
        )
    listen(start_event(label, done, training.rounds))
    began, over = time.perf_counter(), ends(training, done.metrics)  # a resumed run may be over
    for current in () if over else clock.each(PLANNING, _note_divergence(rounds, done)):
        seconds, meter.waited = time.perf_counter() - began - meter.waited, 0.0
        # Announced before the evaluation, which may take longer than the round did.
        weights = describe_weights(current, federation.table, task.target, algorithm)
        report_drops(engine, label, current, listen)
        listen(round_event(label, current, training.rounds, seconds, meter.last) | weights)
        done.after, done.traffic, done.missed = current, meter.last, done.missed.after(current)
        done.weight_sums = done.weight_sums.after(current, algorithm, federation.table, task.target)
        if training.evaluates(current.t):
            with clock.of(EVALUATION):
                scores = measure(current)
            _enter(done, current, scores, federation, task, algorithm, training)
            listen(evaluation_event(label, done.metrics[-1], scores))
        else:
            done.sets += tuned_early(current, algorithm, training.rounds)
        last = current.t == training.rounds or ends(training, done.metrics)
        with clock.of(CHECKPOINTING):
            saver.after_round(done, last=last)
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
    """Add a round's scores to the progress, and keep the round if it is the best so far."""
    done.metrics.append(metrics_of_round(current, scores, federation, task, algorithm))
    done.served += [] if scores.served is None else [scores.served.metrics]
    done.sets += set_round(current, algorithm)
    if training.keep == "best" and best_round(done.metrics) == current.t:
        done.best = current


def _note_divergence(played: Iterator[Round], done: Progress) -> Iterator[Round]:
    """Yield the rounds; if training diverges, attach the metrics so far to the error."""
    try:
        while (current := _next(played)) is not None:
            yield current
    except DivergedError as e:
        # A table may count such a run: early stopping would have kept a round from before.
        e.measured = tuple(done.metrics)
        raise


def _next(played: Iterator[Round]) -> Round | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NeedlessWarning)  # the summary says it
        return next(played, None)


def _outcome(
    algorithm: Algorithm, federation: Federation, task: Task, label: str, done: Progress,
    scores: Evaluation | None, engine: Engine, training: Training,
    measure: Callable[[Round], Evaluation], correct: Correcting,
) -> Outcome:  # fmt: skip
    """The outcome of a complete run.

    scores: of the last round; None if that round came from a checkpoint, and is scored again here.
    """
    last = done.best or done.after
    assert last is not None  # a run has at least one round
    # None: the run was killed between its last checkpoint and its summary. A best round that is
    # not the last has to be scored again, too.
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
) -> tuple[WeightSums | None, tuple[float, ...]]:
    """(sums over the rounds' weights, or None; the weights [M] that the results report)."""
    # With all clients in every round, all rounds use the same weights: solving once more gives
    # them to the last bit, where a mean over rounds would round.
    means = training.draws(len(federation.clients)) or done.missed.rounds
    if means and done.weight_sums.rounds:
        return done.weight_sums, done.weight_sums.weights
    all_clients = torch.arange(len(federation.clients))
    cap = federation.gate.max_weight
    return None, tuple(weigh(algorithm, last.server, all_clients, cap).tolist())
