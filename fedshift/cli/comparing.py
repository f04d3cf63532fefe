"""`fedshift compare`: many runs of one experiment file, and their table."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import typer

from fedshift.cli import console
from fedshift.cli.many_runs import progress_of_runs
from fedshift.cli.stopping import asked_to_stop
from fedshift.errors import InputError
from fedshift.experiments.config.custom import Custom
from fedshift.experiments.experiment import check_method
from fedshift.fitting.keys import with_names
from fedshift.sweeps.compare import PAGE, Compared, check_folder, compare, jobs_that_fit
from fedshift.sweeps.from_file import plan_of
from fedshift.sweeps.plan import Plan
from fedshift.sweeps.populations import Populations
from fedshift.sweeps.spans import parse_seeds
from fedshift.sweeps.worker import Means

# The exit code if some runs failed or diverged.
FAILED = 4


@dataclass(frozen=True)
class Asked:
    """The arguments and options of `fedshift compare`."""

    file: Path
    methods: str
    seeds: str
    overrides: Sequence[str]
    vary: str
    targets: str | None
    base: str
    metric: str | None
    jobs: int | None
    backend: str
    workers: int | None
    out: Path | None
    resume: bool


def compare_asked(asked: Asked, *, as_json: bool) -> None:
    """Train the runs and print the table; the exit code says whether a run failed."""
    default = "0" if asked.vary == "target" else "0-4"
    plan, source = plan_of(
        asked.file, _split(asked.methods), parse_seeds(asked.seeds or default), asked.overrides,
        vary=asked.vary, base=asked.base, metric=asked.metric,
        targets=None if asked.targets is None else _split(asked.targets),
    )  # fmt: skip
    folder = asked.out or Path("runs") / f"{plan.title}-compare"
    check_folder(folder, asked.resume)
    if not asked.backend.startswith("cuda"):
        # A process that has used a GPU cannot fork others that train. Hidden from torch, the GPU
        # does not get in the way.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    jobs, lowered = jobs_that_fit(asked.jobs, asked.workers, plan)
    console.warn_of_data_folders()
    populations = Populations()
    with source.placing():
        added, unused = _check_tasks(plan, populations)
    # With several targets, each would have notes of its own.
    notes = [*(() if plan.targets else added.notes), *unused, *[lowered] * bool(lowered)]
    means = Means(asked.backend, asked.workers, populations, populations.load)
    with asked_to_stop() as stop, progress_of_runs() as listen:
        done = compare(
            plan, folder, means, jobs=jobs, notes=notes, listen=listen, asked=stop,
            # With several targets, a number stands for another client in every run.
            words=lambda text: text if plan.targets else with_names(text, added.clients),
        )  # fmt: skip
    _show(done, as_json)
    _leave(done)


def _split(names: str) -> list[str]:
    return [name.strip() for name in names.split(",") if name.strip()]


def _check_tasks(plan: Plan, populations: Populations) -> tuple[Custom, list[str]]:
    """(what the runs have beside their configurations, sentences on methods).

    Loads the data and builds every network once, so that mistakes show before anything is trained.
    """
    custom, notes = None, dict[str, None]()
    for contender in plan.contenders:
        for point in contender.points:
            run = point.runs[plan.seeds[0]]
            ready = populations(run)
            custom = custom or ready.custom
            try:
                unused = check_method(run.config.method, run.config.training, ready)
                notes |= dict.fromkeys(unused)
            except InputError as e:
                raise InputError(f"{contender.label}: {e}") from None
    assert custom is not None  # a plan has a method
    return custom, [*notes]


def _show(done: Compared, as_json: bool) -> None:
    table = done.table
    if as_json:
        console.show_json(table.document())
        return
    console.show_report_table(table.shown())
    for sentence in table.notes:
        console.say(sentence, indent=0)
    console.put(f"Report: {table.folder / PAGE}")


def _leave(done: Compared) -> None:
    stopped = done.report.interrupted
    if stopped is not None:
        stopped.add_note("the same command with --resume goes on from here")
        raise stopped
    if done.report.failures or done.report.diverged:
        raise typer.Exit(FAILED)
