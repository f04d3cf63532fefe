"""The command `fedshift reproduce`: progress of the runs, printed results, exit codes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cache
from typing import Any

import typer

from fedshift.cli.console import counted, put, say, show_json, show_report_table, tell
from fedshift.cli.many_runs import progress_of_runs
from fedshift.cli.stopping import asked_to_stop
from fedshift.errors import InputError
from fedshift_papers.pictures.figures import figures
from fedshift_papers.pictures.picture import Figure
from fedshift_papers.protocols.study import missing_data
from fedshift_papers.reproduce.catalogue import (
    Missing,
    Target,
    absent,
    folders_with,
    measured_columns,
    state_of,
    targets,
)
from fedshift_papers.reproduce.catalogue import target as find_target
from fedshift_papers.reproduce.figure_pages import Drawing, document_of, draw
from fedshift_papers.reproduce.output import document
from fedshift_papers.reproduce.reproduce import (
    Reproduced,
    Request,
    reproduce,
)
from fedshift_papers.reproduce.tables import cell_table, paper_table
from fedshift_papers.reproduce.verdict import margins, verdicts, without_value

MISSING, FAILED = 3, 4


def reproduce_target(request: Request, *, as_json: bool) -> None:
    """Train or draw the requested table or figure, print it, and exit with its code.

    Raises InputError for --counts with a target that is not drawn from label counts.
    """
    one = find_target(request.target)
    if request.counts is not None and (not isinstance(one, Figure) or one.of_counts is None):
        names = " and ".join(n for n, f in figures().items() if f.of_counts is not None)
        raise InputError(f"--counts is for {names}, not for {one.name}; leave it out")
    if isinstance(one, Figure):
        show_figure(draw(one, request), as_json)
        return
    with asked_to_stop() as stop, progress_of_runs() as listen:
        done = reproduce(request, listen, stop, tell)
    show(done, as_json)
    exit_by_result(done)


def list_tables(options: Collection[str], *, as_json: bool) -> None:
    """Print all tables and figures, each with what is missing or done.

    Raises InputError if options were given: they would be for a single table.
    """
    if options:
        raise InputError(
            f"reproduce: {', '.join(sorted(options))} given, but no table is named; fedshift "
            "reproduce alone lists what there is"
        )
    missing = cache(missing_data)  # many tables use the same data, and looking for them takes time
    if as_json:
        show_json([_describe(one, missing) for one in targets().values()])
        return
    for one in targets().values():
        put(f"{one.name}: {one.title}")
        say(f"  {state_of(one, missing)}", indent=4)
        for remark, sets in _sets(one).items():
            for dataset, splits in sets.items():
                say(f"  {dataset}{remark}{_splits(one, dataset, splits)}", indent=4)


def _splits(one: Target, dataset: str, splits: Sequence[str]) -> str:
    """ ": C=3, C=2 (measured here: C=3)"; nothing for a figure that is drawn from data alone."""
    if isinstance(one, Figure):
        return ""
    here = [
        c.split for c in one.columns if c.dataset == dataset and c.heading in measured_columns(one)
    ]
    which = f": {', '.join(here)}" if len(here) < len(splits) else ""
    return f": {', '.join(splits)}" + (f" (measured here{which})" if here else "")


def _sets(one: Target) -> dict[str, dict[str, list[str]]]:
    """Data sets and their splits, as --dataset and --split take them, by a remark on them."""
    sets: dict[str, dict[str, list[str]]] = {"": {}, ", not in the paper": {}}
    usual, extra = sets.values()
    if isinstance(one, Figure):
        usual |= {name: [] for name in one.datasets}
        extra |= {name: [] for name in one.extra}
        return sets
    for column in one.columns:
        group = extra if column.extra else usual
        group.setdefault(column.dataset, []).append(column.split)
    return sets


def _describe(one: Target, missing: Missing) -> dict[str, Any]:
    state = {
        "state": state_of(one, missing),
        "measured": folders_with(one.name),
        "missing": absent(one, missing),
    }
    if isinstance(one, Figure):
        sets = {"datasets": one.datasets, "extra": one.extra}
        return {"name": one.name, "title": one.title, **sets, **state}
    fields = ("dataset", "split", "seeds", "rounds", "extra")
    return {
        "name": one.name,
        "title": one.title,
        "methods": list(dict.fromkeys(row.key for row in one.rows)),
        "columns": [
            {name: getattr(c, name) for name in fields}
            | {"measured": c.heading in measured_columns(one)}
            for c in one.columns
        ],
        **state,
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
    cells = outcome.cells
    for sentence in (*verdicts(study, cells), *margins(study, cells), *without_value(cells)):
        say(sentence, indent=0)
    if outcome.plan.overrides:
        say(f"Changed from the protocol: {', '.join(outcome.plan.overrides)}.", indent=0)
    trained = counted(len(done.report.trained), "run")
    put(f"{trained} trained now. Chosen, tuned and changed: see the page.")
    put(f"Page: {done.page}")


def show_figure(drawing: Drawing, as_json: bool) -> None:
    """Print a figure's tables and where its page is. Exit with code 3 if data are missing."""
    for problem in drawing.problems:
        tell(f"not drawn: {problem}")
    if as_json:
        show_json(document_of(drawing) | {"page": str(drawing.page)})
    else:
        for shown in drawing.shown.values():
            for table in shown.tables:
                show_report_table(table)
        put(f"Page: {drawing.page}")
    if drawing.problems:
        raise typer.Exit(MISSING)


def exit_by_result(done: Reproduced) -> None:
    """Exit with the code for failed runs or for missing cells; return if there are none.

    An interruption is raised again: the command line handles it for all commands alike.
    """
    stopped = done.report.interrupted
    if stopped is not None:
        stopped.add_note("the same command goes on from here")
        raise stopped
    # A failure weighs more than a cell that could not be run.
    if done.report.failures or any(cell.failures for cell in done.outcome.cells):
        raise typer.Exit(FAILED)
    if done.outcome.problems or any(cell.absent for cell in done.outcome.cells):
        raise typer.Exit(MISSING)
