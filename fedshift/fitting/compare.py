"""`fedshift.compare`: several methods over several seeds on one task, as one table."""

from __future__ import annotations

import contextlib
import hashlib
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np

from fedshift import recipes
from fedshift.algorithms.method import Method as Algorithm
from fedshift.arguments import called, check_whole
from fedshift.calls import called_as
from fedshift.errors import InputError
from fedshift.experiments.config.custom import Metric
from fedshift.experiments.experiment import check_method
from fedshift.experiments.measures.custom_metrics import try_metrics
from fedshift.experiments.task.preparing import Prepared
from fedshift.fitting.bars import shown_progress
from fedshift.fitting.class_weights import Weights
from fedshift.fitting.fit import leaving_torch, remove
from fedshift.fitting.keys import SECTIONS, by_name, with_names
from fedshift.fitting.many_bars import LiveRuns, NotebookRuns
from fedshift.fitting.methods import Method, as_method
from fedshift.fitting.planning import Loss, check_task, checked_metrics
from fedshift.fitting.planning import Plan as Fit
from fedshift.fitting.planning import plan as plan_fit
from fedshift.fitting.sources import mark_of
from fedshift.sweeps.compare import compare as do_runs
from fedshift.sweeps.compare import jobs_that_fit
from fedshift.sweeps.plan import Contender, Plan, Point, check_choice, check_metric, check_vary
from fedshift.sweeps.store import Run, run_of
from fedshift.sweeps.table import Table
from fedshift.sweeps.targets import about_targets, targets_of
from fedshift.sweeps.worker import Means
from fedshift.tasks.task import Task

Given = str | Callable[..., Algorithm] | Algorithm | Method
# Keys for which a list is a single value, and not several to compare.
LISTS = ("hidden", "grid")
# Keywords of `fit` that `compare` does not have, and what to do instead.
NONE_HERE = {
    "callbacks": "its runs may train in other processes; give them to fit",
    "loggers": "its runs may train in other processes; give them to fit",
    "method": 'write methods=["fedavg", "fedpals"]',
    "seed": "write seeds=[0, 1, 2], or seeds=5 for 0 to 4",
    "resume": "the same call with the same folder= goes on",
}


@called_as('fs.compare(task, net, ["fedavg", "fedpals"], seeds=5)')
@leaving_torch()
def compare(
    task: Task,
    net: Any,
    methods: Sequence[Given] | Mapping[str, Given],
    *,
    seeds: int | Sequence[int] | None = None,
    targets: Sequence[str] | None = None,
    jobs: int | None = None,
    vary: str = "training",
    base: str = "",
    metric: str | None = None,
    name: str | None = None,
    metrics: Mapping[str, Metric] | Metric | None = None,
    loss: Loss | None = None,
    class_weights: Weights | None = None,
    backend: str = "loop",
    workers: int | None = None,
    progress: bool | None = None,
    folder: str | Path | None = None,
    **keys: Any,
) -> Table:
    """Train a network by several methods over several seeds, and compare them in a table.

    Each run equals `fit` with the same arguments and seed bit for bit, whatever `jobs` is. A run
    that fails or diverges is a line of the table, and the others go on.

    net, metrics, loss, class_weights   as in `fit`
    methods  a list of methods, each as in `fit`; a dict also names them
    seeds    5 (the default) for seeds 0 to 4, or a list of seeds
    targets  with vary="target": the clients to hold out in turn; by default all of them
    jobs     how many runs to train at once, each in a process; by default one per core
    vary     "training": all seeds cut the task alike; "split": every seed cuts it anew; "target":
             each client in turn is the target, as in `task.held_out`, and trains nothing.
             Differences are paired by target then, and there is one seed, by default 0
    base     the method to which differences are taken; by default the first
    metric   the number to compare, by its name in summary.json; by default the target accuracy
    folder   for runs and table; the same call goes on there with a sweep that was stopped. By
             default a temporary folder, which exists as long as the table
    keys     as in `fit`; an option applies to the methods that have it. A list, such as
             lr=[0.01, 0.1], makes a grid, from which validation chooses for each method

    >>> columns = {"client": "hospital", "label": "outcome"}
    >>> task = fs.Task.from_csv("patients.csv", **columns, target="north")
    >>> methods = ["fedavg", fs.method("fedpals", ess=0.5)]
    >>> table = fs.compare(task, "linear", methods, rounds=2, seeds=2, jobs=1)
    >>> [row.label for row in table.rows]
    ['fedavg', 'fedpals(ess=0.5)']

    Raises InputError for arguments that do not fit together, with a cure, before any training.
    """
    check_task(task)
    check_vary(vary)
    extras = {"metrics": metrics, "loss": loss, "class_weights": class_weights, "name": name}
    tasks = _Tasks(task, net, vary, extras, _targets(task, vary, targets), seeds)
    check_metric(metric, checked_metrics(metrics))
    with by_name(tasks.clients):
        plan = tasks.plan(_named(methods), tasks.units, keys, base, metric)
        at_once, lowered = jobs_that_fit(jobs, workers, plan)
        means = Means(backend, workers, tasks, tasks.load)
        notes = [*tasks.notes, *[lowered] * bool(lowered)]
        shown = shown_progress(progress, LiveRuns, NotebookRuns)
        with _place(folder) as place, shown as listen:
            how: dict[str, Any] = {"jobs": at_once, "listen": listen, "words": tasks.words}
            done = do_runs(plan, place, means, notes=notes, **how)
            if done.report.interrupted is not None:
                raise done.report.interrupted
    if folder is None:
        weakref.finalize(done.table, remove, place, os.getpid())  # until then the table reads it
    return done.table


@contextlib.contextmanager
def _place(folder: str | Path | None) -> Iterator[Path]:
    """The folder for runs and table; if the call fails, a temporary folder is deleted."""
    place = Path(mkdtemp(prefix="fedshift-")) if folder is None else Path(folder)
    try:
        yield place
    except BaseException as e:
        if folder is None:
            remove(place, os.getpid())
        elif isinstance(e, KeyboardInterrupt):
            e.add_note(f'the same call with folder="{folder}" goes on from here')
        raise


def _named(methods: Any) -> dict[str, Given]:
    """The methods by their names in the table."""
    if isinstance(methods, Mapping):
        return dict(methods)
    if isinstance(methods, str) or not isinstance(methods, Sequence):
        raise InputError(f'methods is {called(methods)}; give a list, as ["fedavg", "fedpals"]')
    named: dict[str, Given] = {}
    for one in methods:
        label = _label(as_method(one))
        if label in named:
            raise InputError(
                f"methods: {label} is there twice; name them, as in "
                f'{{"{label}": ..., "{label} again": ...}}'
            )
        named[label] = one
    return named


def _label(of: Method) -> str:
    """The method's name with its options, without those that list several values."""
    return replace(of, options={k: v for k, v in of.options.items() if not _spans(k, v)}).label


def _seeds(seeds: int | Sequence[int]) -> tuple[int, ...]:
    if isinstance(seeds, np.ndarray):
        seeds = seeds.tolist()
    if isinstance(seeds, Sequence | range) and not isinstance(seeds, str):
        for seed in seeds:
            check_whole("seed", seed, 0)
        if len(set(seeds)) < len(seeds):
            raise InputError(f"seeds = {list(seeds)}: a seed is there twice; give each once")
        return tuple(map(int, seeds))
    check_whole("seeds", seeds, 1)
    return tuple(range(seeds))


def _targets(task: Task, vary: str, targets: Sequence[str] | None) -> tuple[str, ...]:
    """The clients to hold out in turn; () if seeds vary. Raises InputError for unknown names."""
    if vary == "target":
        return targets_of(task, targets)
    if targets is not None:
        raise InputError(f'targets are for vary="target", and vary is "{vary}"; leave them out')
    return ()


def _one_seed(seeds: int | Sequence[int] | None) -> int:
    """The seed of all runs, if targets vary."""
    given = (0,) if seeds is None else _seeds(seeds)
    if len(given) > 1:
        raise InputError(
            f'seeds = {seeds}: with vary="target" differences are paired by target, and there is '
            "one seed; give seeds=[0], or leave it out"
        )
    return given[0]


def _spans(key: str, value: Any) -> bool:
    """Whether a value lists several values to choose from."""
    several = isinstance(value, list) and len(value) > 0
    return several and (key not in LISTS or all(isinstance(v, list | tuple) for v in value))


@dataclass(frozen=True)
class _Asked:
    """What makes a run: its method, the keywords of one setting, and its seed."""

    method: Given
    keys: Mapping[str, Any]
    seed: int  # or the target's place among the targets, if these vary


class _Tasks:
    """Plans runs as `fit` does, and makes their tasks. Runs with the same cut share its data."""

    def __init__(
        self, task: Task, net: Any, vary: str, extras: Mapping[str, Any],
        targets: tuple[str, ...], seeds: int | Sequence[int] | None,
    ) -> None:  # fmt: skip
        self.task, self.net, self.vary, self.extras = task, net, vary, extras
        self.targets, self.seed = targets, _one_seed(seeds) if targets else 0
        whole = tuple(range(len(targets)))
        self.units = whole or _seeds(5 if seeds is None else seeds)
        # If targets vary, every client trains in some run, and each run lacks another one.
        self.clients = task.places.names if targets else task.clients
        self.cut = task
        self.asked: dict[str, _Asked] = {}
        self.notes: dict[str, None] = {}

    def plan(
        self, methods: Mapping[str, Given], seeds: tuple[int, ...], keys: Mapping[str, Any],
        base: str, metric: str | None,
    ) -> Plan:  # fmt: skip
        """Every run of every method at every setting."""
        for key in keys.keys() & NONE_HERE.keys():
            raise InputError(f"compare takes no {key}: {NONE_HERE[key]}")
        runs: dict[tuple[str, str], dict[int, Run]] = {}
        first: Fit | None = None
        for seed in seeds:
            for label, given in methods.items():
                # To try a method takes a while, and its result is the same for every seed.
                its, anew = _keys_for(given, methods.values(), keys), seed == seeds[0]
                for setting, method, there in _points(given, its):
                    with self._naming(label, seed, methods, keys):
                        planned, run = self._run(_Asked(method, there, seed))
                        notes = _try(planned, metrics=first is None) if anew else []
                    self._note(notes)
                    runs.setdefault((label, setting), {})[seed] = run
                    first = first or planned
        contenders = tuple(
            Contender(name, tuple(Point(s, of) for (label, s), of in runs.items() if label == name))
            for name in methods
        )
        rule = first.config.selection.rule if first else "estimate"
        title = self.extras["name"] or self.task.name
        about = about_targets(self.task, self.targets) if self.targets else ()
        made = Plan(title, contenders, seeds, self.vary, base, metric, rule, self.targets, about)
        if made.has_grid and first is not None:
            of = first.prepared.task
            held_out = any(len(one.y) for one in of.validation)
            check_choice(rule, held_out, of.target_validation is not None)
        return made

    def _note(self, notes: Sequence[str]) -> None:
        # With targets, each has notes of its own: the table would have one for every client.
        self.notes |= {} if self.targets else dict.fromkeys(notes)

    def words(self, text: str) -> str:
        """A message with clients' names for numbers; not with targets, which number them anew."""
        return text if self.targets else with_names(text, self.task.clients)

    @contextlib.contextmanager
    def _naming(
        self, label: str, seed: int, methods: Mapping[str, Given], keys: Mapping[str, Any]
    ) -> Iterator[None]:
        """Within the block, an error gets the method's name, unless all methods would raise it."""
        try:
            yield
        except InputError as e:
            every = [self._error(one, seed, methods, keys) for one in methods.values()]
            if any(text != str(e) for text in every):
                e.args = (f"{label}: {e}",)
            raise

    def _error(
        self, given: Given, seed: int, methods: Mapping[str, Given], keys: Mapping[str, Any]
    ) -> str:
        """The message of the error that planning a method raises, or ""."""
        try:
            for _, method, there in _points(given, _keys_for(given, methods.values(), keys)):
                _try(self._planned(_Asked(method, there, seed)), metrics=True)
        except InputError as e:
            return str(e)
        return ""

    def _run(self, asked: _Asked) -> tuple[Fit, Run]:
        planned = self._planned(asked)
        self._note(planned.notes)
        # The target is no part of the configuration if the task was made in Python.
        target = f" held out: {self.targets[asked.seed]}" if self.targets else ""
        run = run_of(planned.config, _mark(planned) + target)
        self.asked[run.name] = asked
        return planned, run

    def _planned(self, asked: _Asked) -> Fit:
        keys = {**self.extras, **asked.keys}
        seed = self.seed if self.targets else asked.seed
        return plan_fit(self._cut(asked), self.net, asked.method, seed=seed, **keys)

    def _cut(self, asked: _Asked) -> Task:
        """The task, cut as the run needs it; the last cut is kept for the next run."""
        if self.vary == "split" and self.cut.seed != asked.seed:
            self.cut = replace(self.task, seed=asked.seed)
        if self.targets and self.cut.target.name != (name := self.targets[asked.seed]):
            self.cut = self.task.held_out(name)
        return self.cut

    def __call__(self, run: Run) -> Prepared:
        """The task of a run."""
        return self._planned(self.asked[run.name]).prepared

    def load(self, run: Run) -> None:
        """Cut the run's task in this process, for forks to share."""
        self._cut(self.asked[run.name]).build()


def _try(planned: Fit, *, metrics: bool) -> list[str]:
    """Raise InputError for metrics, or a method, that would fail in every run.

    Returns sentences on parts of the method that have no effect on this task.
    """
    prepared = planned.prepared
    if metrics:
        try_metrics(prepared.custom.metrics, prepared.model, prepared.task)
    return check_method(planned.config.method, planned.config.training, prepared)


def _keys_for(given: Given, all_: Any, keys: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords without options that only other methods have."""

    def options(one: Given) -> set[str]:
        if isinstance(one, str):
            return set(recipes.fitting(one, keys).options)
        return set() if isinstance(one, Method) else set(as_method(one).recipe.options)

    its, others = options(given), set[str]().union(*map(options, all_))
    general = {k for names in SECTIONS.values() for k in names}
    # A key that no method has is kept, so that planning the run raises an error for it.
    return {k: v for k, v in keys.items() if k in general | its or k not in others}


def _points(given: Given, keys: Mapping[str, Any]) -> Iterator[tuple[str, Given, dict[str, Any]]]:
    """(label, method, keywords) of every setting: all combinations of listed values."""
    options = given.options if isinstance(given, Method) else {}
    of_method = [k for k, v in options.items() if _spans(k, v)]
    others = [k for k, v in keys.items() if _spans(k, v)]
    for chosen in product(*(options[k] for k in of_method), *(keys[k] for k in others)):
        named = zip([*of_method, *others], chosen, strict=True)
        # A list of one value leaves nothing to choose, so the label does not mention it.
        label = ", ".join(f"{k}={v}" for k, v in named if len({**keys, **options}[k]) > 1)
        here = dict(zip(of_method, chosen[: len(of_method)], strict=True))
        there = dict(zip(others, chosen[len(of_method) :], strict=True))
        method = replace(given, options={**options, **here}) if isinstance(given, Method) else given
        yield label, method, {**keys, **there}


def _mark(planned: Fit) -> str:
    """A hash of what determines a run beside its configuration: the network, and Python objects."""
    model, digest = planned.prepared.model, hashlib.sha256()
    for parts in model.init():
        for name, tensor in sorted(parts.items()):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().contiguous().numpy().tobytes())
    digest.update(f"{mark_of(model.net)} {planned.prepared.custom.mark}".encode())
    return digest.hexdigest()
