"""Reproducing a printed table: plan it, tune if asked, train missing runs, write the results."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fedshift.engine.backend_names import ALONE
from fedshift.errors import InputError
from fedshift.experiments.config.places import Source
from fedshift.experiments.folder.progress import Asked, no_stop
from fedshift.experiments.folder.run_folder import trained_with
from fedshift.experiments.listeners import Listener, ignore_event
from fedshift.files import make_folder
from fedshift.sweeps.execute import Report, execute
from fedshift.sweeps.records import recorded_in
from fedshift.sweeps.store import Run, Store
from fedshift.sweeps.worker import Means
from fedshift_papers.protocols.study import narrowed
from fedshift_papers.reproduce.catalogue import shipped_tuning, study
from fedshift_papers.reproduce.charts import charts
from fedshift_papers.reproduce.checks import check_backend, check_grids, check_plan
from fedshift_papers.reproduce.output import (
    Outcome,
    notes_of,
    publish,
    study_of,
    write_outcome,
)
from fedshift_papers.reproduce.plan import Plan, check_overrides, forecast, wanted, with_size
from fedshift_papers.reproduce.results import Cell, collect, scores
from fedshift_papers.reproduce.tuning import (
    Records,
    add_tuned,
    choose_tuned,
    grid_runs,
    options_of,
    read_tuned,
)

TUNED, RUNS = "tuned.json", "runs"


@dataclass(frozen=True)
class Request:
    """The options of `fedshift reproduce`; None and () mean as in the paper.

    backend  how clients train, one of `fedshift.engine.backend_names.ALONE`
    train    False: draw the table from the runs that are complete
    publish  one more folder for the table, with small records of its runs
    counts   a file of label counts to draw a figure of, in place of the paper's
    """

    target: str
    out: Path
    datasets: tuple[str, ...] = ()
    splits: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    seeds: tuple[int, ...] | None = None
    rounds: int | None = None
    overrides: tuple[str, ...] = ()
    jobs: int = 1
    backend: str = "loop"
    tune: bool = False
    train: bool = True
    publish: Path | None = None
    counts: Path | None = None

    def command(self, backends: Collection[str] = ()) -> str:
        """The command line for the same table, without options on folders and speed.

        backends: those that trained its runs; named only if it is a single one other than the loop.
        """
        words = ["fedshift", "reproduce", self.target]
        for option, values in (("dataset", self.datasets), ("split", self.splits)):
            words += [w for value in values for w in (f"--{option}", value)]
        words += ["--methods", ",".join(self.methods)] if self.methods else []
        words += ["--seeds", ",".join(map(str, self.seeds))] if self.seeds is not None else []
        words += ["--rounds", str(self.rounds)] if self.rounds is not None else []
        named = [name for name in backends if name != "loop"]
        words += ["--backend", *named] if len(backends) == len(named) == 1 else []
        words += [w for o in self.overrides for w in ("-c", o)]
        words += ["--counts", self.counts.name] if self.counts is not None else []
        return shlex.join(words)


@dataclass(frozen=True)
class Reproduced:
    """The table, a report on the runs trained for it, and its page."""

    outcome: Outcome
    report: Report
    page: Path


def unsaid(_: str) -> None:
    """Say nothing."""


def reproduce(
    request: Request,
    listen: Listener = ignore_event,
    asked: Asked = no_stop,
    tell: Callable[[str], None] = unsaid,
) -> Reproduced:
    """Train the runs that are missing, and write the table's files.

    Complete runs are never trained again. tell: gets the forecast. asked: see `execute`; after a
    stop, the table is written from the runs that are complete. Raises InputError for unknown names
    before anything is trained or written. Raises DataError for damaged runs and tuned values: for
    those that exist at the start, before anything is trained.
    """
    plan = make_plan(request)
    make_places(request, plan.study.name, (RUNS,) * request.train)
    store = Store(request.out / RUNS, recorded_in(request.out))
    records: Records = {
        **read_tuned(shipped_tuning(plan.study), plan),
        **read_tuned(request.out / TUNED, plan),
    }
    _check_there(replace(plan, tuned=options_of(records)), store)
    if request.train and (text := forecast(plan, store, request.jobs)) is not None:
        tell(text)
    report, do = Report(), _executor(request, store, listen, asked)
    # The grid comes first: the table's runs use the values that it chooses.
    if request.tune and request.train:
        grid = grid_runs(plan)
        # Damage in runs that are there is reported before the others are trained.
        for run in filter(store.done, grid.values()):
            scores(store.read(run), plan.study.metric)
        report = do(grid)
        records = {**records, **add_tuned(request.out / TUNED, choose_tuned(plan, store))}
    plan = replace(plan, tuned=options_of(records))
    report = _all_wanted(plan, store, do, report) if request.train else report
    cells = collect(plan, store, report.failures)
    outcome = Outcome(plan, cells, notes_of(plan, cells, records), _command(request, cells))
    page = write_outcome(request.out / outcome.folder, outcome, store)
    if request.publish is not None:
        page = publish(request.publish, outcome, store)
        if records:
            add_tuned(request.publish / TUNED, records)
    code = asked()
    if code is not None and report.interrupted is None:  # asked to stop while the table was written
        report = replace(report, interrupted=KeyboardInterrupt(code))
    return Reproduced(outcome, report, page)


def _check_there(plan: Plan, store: Store) -> None:
    """Read and draw existing runs first, so that damage is reported before training."""
    for run in filter(store.over, wanted(plan, store).values()):
        store.read(run)
    charts(plan.study, collect(plan, store, {}), store)


def _command(request: Request, cells: Sequence[Cell]) -> str:
    used = {trained_with(v.lock) for cell in cells for v in cell.values}
    return request.command(used if used.issubset(ALONE) else ())


def make_plan(request: Request) -> Plan:
    """The plan before tuning. Raises InputError for options that are not valid."""
    if request.jobs < 1:
        raise InputError(f"--jobs {request.jobs}; give 1 or more")
    if request.rounds is not None and request.rounds < 1:
        raise InputError(f"--rounds {request.rounds}; give 1 or more")
    check_backend(request.backend, there=request.train)
    whole = study(request.target)
    chosen = narrowed(whole, request.datasets, request.splits, request.methods)
    check_overrides(chosen, request.overrides, whole)
    chosen = with_size(chosen, request.overrides)
    if request.tune:
        check_grids(chosen, whole)
    plan = Plan(chosen, request.seeds, request.rounds, request.overrides)
    check_plan(plan, networks=request.train)
    return plan


def make_places(request: Request, name: str, others: Sequence[str] = ()) -> None:
    """Make the folders for results, so that one that cannot be made is found before any training.

    others: more folders beside the table's. Raises InputError if the folder has another paper's
    table of the same name, as fedpals/table1 and made/table1.
    """
    table = name.rpartition("/")[2]
    for place in filter(None, (request.out, request.publish)):
        make_folder(place / table)
        there = study_of(place / table)
        if there not in (None, name):
            raise InputError(
                f"{place / table} holds {there}, not {name}; name another folder with "
                f"{'--out' if place == request.out else '--publish'}"
            )
    for folder in others:
        make_folder(request.out / folder)


Do = Callable[[Mapping[str, Run]], Report]


def _executor(request: Request, store: Store, listen: Listener, asked: Asked) -> Do:
    source = Source(overrides=request.overrides)

    def do(runs: Mapping[str, Run]) -> Report:
        report = execute(
            runs, store, jobs=request.jobs, means=Means(request.backend), listen=listen, asked=asked
        )
        return replace(report, failures={
            name: source.placed(why) if source.about((), why) else why
            for name, why in report.failures.items()
        })  # fmt: skip

    return do


def _all_wanted(plan: Plan, store: Store, do: Do, report: Report) -> Report:
    """Train until no more runs are wanted: some are known only once others are complete."""
    tried = {*report.failures, *report.diverged}
    while not report.interrupted:
        runs = {n: r for n, r in wanted(plan, store).items() if n not in tried}
        if not any(not store.done(run) for run in runs.values()):
            break
        report = _join(report, do(runs))
        tried |= {*report.failures, *report.diverged}
    return report


def _join(one: Report, other: Report) -> Report:
    return Report(
        (*one.trained, *other.trained),
        {**one.failures, **other.failures},
        {**one.diverged, **other.diverged},
        one.interrupted or other.interrupted,
    )
