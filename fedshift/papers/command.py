"""`fedshift reproduce`: progress while runs go on, the table beside the paper's, exit codes."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import typer

from fedshift.cli.console import counted, put, say, show_json, show_report_table, tell
from fedshift.cli.many_runs import progress_of_runs
from fedshift.cli.stopping import asked_to_stop
from fedshift.errors import InputError
from fedshift.papers.protocols.pictures import Federation, Picture
from fedshift.papers.protocols.study import Study
from fedshift.papers.reproduce.catalogue import picture, pictures, studies
from fedshift.papers.reproduce.output import document
from fedshift.papers.reproduce.pictures import document as document_of_picture
from fedshift.papers.reproduce.pictures import draw_picture, federation_of, numbers
from fedshift.papers.reproduce.reproduce import (
    Reproduced,
    Request,
    reproduce,
)
from fedshift.papers.reproduce.tables import cell_table, paper_table
from fedshift.papers.reproduce.verdict import verdicts, without_value
from fedshift.sweeps.spans import parse_seeds

MISSING, FAILED = 3, 4


def reproduce_target(
    target: str,
    *,
    datasets: Sequence[str],
    splits: Sequence[str],
    methods: str | None,
    seeds: str | None,
    rounds: int | None,
    overrides: Sequence[str],
    jobs: int,
    backend: str,
    tune: bool,
    train: bool,
    out: Path,
    publish: Path | None,
    as_json: bool,
) -> None:
    """Reproduce the target and print it."""
    request = Request(
        target, out, tuple(datasets), tuple(splits),
        () if methods is None else tuple(m.strip() for m in methods.split(",")),
        None if seeds is None else parse_seeds(seeds),
        rounds, tuple(overrides), jobs, backend, tune, train, publish,
    )  # fmt: skip
    with asked_to_stop() as stop, progress_of_runs() as listen:
        done = reproduce(request, listen, stop)
    show(done, as_json)
    leave(done)


# What a picture takes.
OF_PICTURES = {"--counts", "--out", "--publish", "--format"}


def draw_target(
    target: str,
    given: Collection[str],
    counts: Path | None,
    *,
    out: Path,
    publish: Path | None,
    as_json: bool,
) -> bool:
    """Draw the target and print its numbers, where it is a picture; whether it is.

    given: the options of the command line. Raises InputError for those that are for others.
    """
    chosen = picture(target)
    if chosen is None:
        if counts is not None:
            names = " and ".join(pictures())
            raise InputError(f"--counts is for {names}, not for {target}; leave it out")
        return False
    if others := sorted({name for name in given if name.startswith("-")} - OF_PICTURES):
        raise InputError(
            f"{', '.join(others)}: {target} trains nothing and takes "
            f"{', '.join(sorted(OF_PICTURES))}; leave the others out"
        )
    federation, command = _federation(chosen, counts)
    source = chosen.source if counts is None else f"The counts are those of {counts.name}."
    places = [place for place in (out, publish) if place is not None]
    page = draw_picture(chosen, federation, command, source, places)
    table = numbers(chosen, federation)
    if as_json:
        show_json(document_of_picture(chosen, table) | {"page": str(page)})
        return True
    show_report_table(table)
    put(f"Page: {page}")
    return True


def _federation(chosen: Picture, counts: Path | None) -> tuple[Federation, str]:
    """What the picture shows, and the command that draws it."""
    command = f"fedshift reproduce {chosen.name}"
    if counts is None:
        return chosen.counts(), command
    return federation_of(counts), f"{command} --counts {shlex.quote(counts.name)}"


def list_tables(options: Collection[str], *, as_json: bool) -> None:
    """The tables there are. Raises InputError where options were given, which are for one."""
    if options:
        raise InputError(
            f"reproduce: {', '.join(sorted(options))} given, but no table is named; fedshift "
            "reproduce alone lists what there is"
        )
    if as_json:
        drawn = [{"name": p.name, "title": p.title, "picture": True} for p in pictures().values()]
        show_json([*(_describe(study) for study in studies().values()), *drawn])
        return
    for study in studies().values():
        put(f"{study.name}: {study.title}")
        for extra, remark in ((False, ""), (True, ", not in the paper")):
            for dataset, splits in _splits(study, extra).items():
                say(f"  {dataset}{remark}: {', '.join(splits)}", indent=4)
    for one in pictures().values():
        put(f"{one.name}: {one.title}")
        say("  from label counts, without training: --counts FILE", indent=4)


def _splits(study: Study, extra: bool) -> dict[str, list[str]]:
    """What --dataset and --split take of a table."""
    splits: dict[str, list[str]] = {}
    for column in study.columns:
        if column.extra == extra:
            splits.setdefault(column.dataset, []).append(column.split)
    return splits


def _describe(study: Study) -> dict[str, Any]:
    fields = ("dataset", "split", "seeds", "rounds", "extra")
    return {
        "name": study.name,
        "title": study.title,
        "methods": list(dict.fromkeys(row.key for row in study.rows)),
        "columns": [{name: getattr(c, name) for name in fields} for c in study.columns],
    }


def show(done: Reproduced, as_json: bool) -> None:
    """Print the table with its verdicts, or one JSON document; failures go to stderr."""
    outcome = done.outcome
    for problem in outcome.problems:
        tell(f"not run: {problem}")
    for name, message in done.report.failures.items():
        tell(f"failed: {name}: {message}")
    for name, message in done.report.diverged.items():
        tell(f"diverged: {name}: {message}")
    if as_json:
        report = done.report
        state = {name: getattr(report, name) for name in ("trained", "failures", "diverged")}
        show_json(document(outcome) | state | {"page": str(done.page)})
        return
    study = outcome.plan.study
    show_report_table(paper_table(study, outcome.cells) or cell_table(study, outcome.cells))
    for sentence in (*verdicts(study, outcome.cells), *without_value(outcome.cells)):
        say(sentence, indent=0)
    if outcome.plan.overrides:
        say(f"Changed from the protocol: {', '.join(outcome.plan.overrides)}.", indent=0)
    trained = counted(len(done.report.trained), "run")
    put(f"{trained} trained now. Chosen, tuned and changed: see the page.")
    put(f"Page: {done.page}")


def leave(done: Reproduced) -> None:
    """The exit code: failed, something missing, or 0. An interruption goes on to where all end."""
    stopped = done.report.interrupted
    if stopped is not None:
        stopped.add_note("the same command goes on from here")
        raise stopped
    # A failure weighs more than a cell that could not be run.
    if done.report.failures or any(cell.failures for cell in done.outcome.cells):
        raise typer.Exit(FAILED)
    if done.outcome.problems or any(cell.absent for cell in done.outcome.cells):
        raise typer.Exit(MISSING)
