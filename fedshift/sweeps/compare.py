"""Training the runs of a plan, and writing the table of their results."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from fedshift.engine.choosing.loop_or_workers import forks_safely
from fedshift.errors import DataError, InputError, shown
from fedshift.experiments.folder.progress import Asked, no_stop
from fedshift.experiments.listeners import Listener, ignore_event
from fedshift.files import clean, is_folder, make_folder, write
from fedshift.record.folder import METRICS, SERVED, read_run
from fedshift.record.in_use import alone_in
from fedshift.report.intervals import Moments, bounds_of, moments
from fedshift.sweeps.execute import Report, execute
from fedshift.sweeps.plan import Plan, units_in_words
from fedshift.sweeps.results import (
    Row,
    RunResult,
    chosen_by,
    metric_of,
    rows_of,
    run_results,
    smaller_is_better,
)
from fedshift.sweeps.starting import Forks
from fedshift.sweeps.store import Run, Store
from fedshift.sweeps.table import Table
from fedshift.sweeps.worker import Means

RUNS, PAGE = "runs", "compare.html"
INTERVALS = (
    "± is the standard deviation over seeds; in brackets, the 95 % t-interval of the mean paired "
    "difference (none below three seeds, not adjusted for the number of methods)."
)


class Compared(NamedTuple):
    """The table, and a report on the runs that were trained for it."""

    table: Table
    report: Report


def cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def jobs_that_fit(jobs: int | None, workers: int | None, plan: Plan) -> tuple[int, str]:
    """(how many runs to train at once, a sentence if these are fewer than were asked for).

    `jobs` times `workers` never exceeds the number of cores; None means as many as fit. It is one
    run at a time if processes cannot be forked, or if runs have several threads, which do not
    survive a fork. Raises InputError for numbers below 1, and for workers of runs with several
    threads.
    """
    for name, value in (("jobs", jobs), ("workers", workers)):
        if value is not None and value < 1:
            raise InputError(f"{name} = {value}; give 1 or more")
    runs, each = plan.runs.values(), workers or 1
    threads = max(run.config.training.threads for run in runs)
    if threads > 1 and workers is not None:
        raise InputError(
            f"training.threads = {threads}, and workers have one thread each; set it to 1, or "
            "leave out workers"
        )
    most, why = max(1, cores() // each), f"this machine has {cores()} cores"
    why += f", and each run {each} workers" * (each > 1)
    if threads > 1:
        most, why = 1, f"training.threads = {threads}, and runs at once have one thread each"
    elif not forks_safely():
        most, why = 1, "no copies of this process can train (a Mac, a GPU, or a thread)"
    if jobs is None or jobs <= most:
        return min(jobs or most, len(runs)), ""
    return most, f"jobs = {jobs} became {most}: {why}."


def compare(
    plan: Plan,
    folder: Path,
    means: Means,
    *,
    jobs: int = 1,
    notes: Iterable[str] = (),
    words: Callable[[str], str] = str,
    listen: Listener = ignore_event,
    asked: Asked = no_stop,
) -> Compared:
    """Train the runs of the plan that `folder` does not have yet, and write the table there.

    Each run equals `fedshift run` of the same configuration bit for bit, whatever `jobs` is. It has
    one torch thread. means: the backend, and what makes the tasks of runs. words: rewrites messages
    about runs in the caller's words.

    Raises InputError if another process works in the folder. Raises DataError for runs in it that
    were trained on other data, or are damaged. A run that fails or diverges is a line of the table.
    """
    means.engine  # noqa: B018 - an impossible backend is refused here
    make_folder(folder / RUNS)
    with alone_in(folder):
        store = Store(folder / RUNS)
        _check_data(plan, store, means)
        report = execute(
            plan.runs, store, jobs=jobs, means=means, start=Forks(), listen=_by_label(plan, listen),
            asked=asked,
        )  # fmt: skip
        table = table_of(plan, store, report, folder, notes, words)
        write_table(table)
    return Compared(table, report)


def _by_label(plan: Plan, listen: Listener) -> Listener:
    """A listener that gets the names of the table for runs: "fedavg lr=0.1, seed 0"."""
    names: dict[str, str] = {}
    for contender in plan.contenders:
        for point in contender.points:
            for seed, run in point.runs.items():
                label = " ".join(filter(None, (contender.label, point.label)))
                # Settings that come to the same configuration share a run, under the first label.
                names.setdefault(run.name, f"{label}, {units_in_words([seed], plan.targets)}")

    def tell(event: dict[str, Any]) -> None:
        listen(event | {"run": names[event["run"]]} if event["event"] != "queue" else event)

    return tell


def _check_data(plan: Plan, store: Store, means: Means) -> None:
    """Raise DataError if a complete run was trained on other data than there are now.

    Names of clients and classes are no part of the checksums, and are compared on their own.
    """
    # One run for each set of data is enough: preparing every run would take too long.
    populations: dict[tuple[str, tuple[str, ...]], Run] = {}
    for run in filter(store.done, plan.runs.values()):
        lock, its = store.read(run).lock, read_run(store.path(run))
        names = (*(client.name for client in its.clients), *its.summary.classes)
        populations.setdefault(
            (f"{lock.get('data_sha256')} {lock.get('split_sha256')}", names), run
        )
    for (key, names), run in populations.items():
        now, where = means.prepare(run), store.path(run)
        cure = "give another folder, or delete this one to train its runs again"
        if key != f"{now.data.sha256} {now.split_sha256}":
            raise DataError(
                f"{where}: trained on other data, or on another cut of them, than there are now; "
                f"{cure}"
            )
        numbers = map(str, range(len(now.task.clients)))
        present = (*(now.custom.clients or numbers), *now.task.classes)
        if changed := [pair for pair in zip(names, present, strict=False) if pair[0] != pair[1]]:
            was, name = (shown(text) for text in changed[0])
            raise DataError(f'{where}: there "{name}" was named "{was}"; {cure}')


def table_of(
    plan: Plan, store: Store, report: Report, folder: Path, notes: Iterable[str],
    words: Callable[[str], str],
) -> Table:  # fmt: skip
    """The table of the runs that are complete."""
    runs = tuple(replace(m, why=words(m.why)) for m in run_results(plan, store, report))
    metric = metric_of(plan, runs)
    rows = rows_of(plan, runs, metric)
    curves = {row.label: _curve(row.runs, store, metric) for row in rows}
    intervals = INTERVALS.replace("seeds", "targets") if plan.targets else INTERVALS
    choice = [_choice_note(plan, rows)] if plan.has_grid else []
    every = [plan.varied, *plan.about, intervals, *choice, *notes]
    if smaller_is_better(metric):
        every.insert(0, f"{metric}: smaller is better, and so is a negative difference.")
    return Table(plan.title, metric, plan.base, rows, runs, tuple(every), curves, folder)


def _choice_note(plan: Plan, rows: Sequence[Row]) -> str:
    """A sentence on how the setting of each method was chosen."""
    served = any("average_accuracy" in m.facts for row in rows for m in row.runs)
    by = "on the clients' validation examples"
    if not served and plan.rule == "estimate":
        by = "at the target, as estimated from the clients' validation examples,"
    elif not served:
        by = "on validation examples that follow the target"
    moved = {chosen_by(plan, row.runs) for row in rows} == {"estimated_accuracy_corrected"}
    by += " of the corrected model," * moved
    errors = any("estimated_loss" in m.facts for row in rows for m in row.runs)
    what = ("squared error", "lowest") if errors else ("accuracy", "highest")
    chosen = f"Chosen: the setting whose {what[0]} {by} is {what[1]}."
    chosen += " No test example was looked at."
    first = [r.label for r in rows if r.validation and not any(r.validation.values())]
    why = f" Without any, the first setting stands for {', '.join(first)}." if first else ""
    return chosen + why


def _curve(runs: Iterable[RunResult], store: Store, metric: str) -> dict[int, Moments]:
    """The metric over the seeds by round; {} if no round has it."""
    curves: list[dict[int, float]] = []
    # Metrics of models that clients serve themselves are in a file of their own.
    for file in (METRICS, SERVED):
        with contextlib.suppress(DataError):  # this file has no such column
            curves = curves or [store.curve(m.run, metric, file) for m in runs if m.state == "done"]
    common = sorted(set(curves[0]).intersection(*curves[1:])) if curves else []
    bounds = bounds_of(metric, (v for c in curves for v in c.values()))
    return {t: moments([c[t] for c in curves], within=bounds) for t in common}


def write_table(table: Table) -> None:
    """Write the table in all its forms beside its runs."""
    folder = table.folder
    write(folder / "table.md", f"# {table.title}\n\n{table.markdown()}")
    write(folder / "table.csv", table.csv())
    write(folder / "runs.csv", table.runs_csv())
    write(folder / "table.tex", table.latex())
    write(folder / "results.json", json.dumps(clean(table.document()), indent=1) + "\n")
    table.report(folder / PAGE)


def check_folder(folder: Path, resume: bool) -> None:
    """Raise InputError for a folder with other things, and for --resume without a comparison."""
    there = is_folder(folder / RUNS)
    if resume and not there:
        raise InputError(f"{folder}: no comparison is there to go on with; leave out --resume")
    if not resume and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        cure = "go on with it by --resume, or give" if there else "give"
        raise InputError(f"{folder}: exists and is not an empty folder; {cure} another --out")
