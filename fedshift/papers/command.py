"""`fedshift reproduce`: progress while runs go on, the table beside the paper's, exit codes."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from fedshift.cli.console import counted, for_bars, put, say, show_json, show_report_table, tell
from fedshift.cli.stopping import asked_to_stop
from fedshift.errors import InputError
from fedshift.papers.protocols.study import Study
from fedshift.papers.reproduce.catalogue import studies
from fedshift.papers.reproduce.output import document
from fedshift.papers.reproduce.reproduce import (
    Reproduced,
    Request,
    parse_seeds,
    reproduce,
)
from fedshift.papers.reproduce.tables import cell_table, paper_table
from fedshift.papers.reproduce.verdict import verdicts, without_value

MISSING, FAILED = 3, 4
# Seconds between two lines of progress, where there is no terminal.
BETWEEN = 30


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
    live = LiveRuns() if sys.stderr.isatty() else PlainRuns()
    with asked_to_stop() as stop, live as listen:
        done = reproduce(request, listen, stop)
    show(done, as_json)
    leave(done)


def list_tables(options: Collection[str], *, as_json: bool) -> None:
    """The tables there are. Raises InputError where options were given, which are for one."""
    if options:
        raise InputError(
            f"reproduce: {', '.join(sorted(options))} given, but no table is named; fedshift "
            "reproduce alone lists what there is"
        )
    if as_json:
        show_json([_describe(study) for study in studies().values()])
        return
    for study in studies().values():
        put(f"{study.name}: {study.title}")
        for extra, remark in ((False, ""), (True, ", not in the paper")):
            for dataset, splits in _splits(study, extra).items():
                say(f"  {dataset}{remark}: {', '.join(splits)}", indent=4)


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
    if done.report.failures or any(cell.failures for cell in done.outcome.cells):
        raise typer.Exit(FAILED)
    if done.outcome.problems or any(cell.absent for cell in done.outcome.cells):
        raise typer.Exit(MISSING)


class PlainRuns:
    """A line when a run begins, goes on with a later round, or ends, and one every half minute."""

    def __init__(self) -> None:
        self.total = self.over = 0
        self.rounds: dict[str, int] = {}
        self.last: dict[str, float] = {}

    def __call__(self, event: dict[str, Any]) -> None:
        if event["event"] == "queue":
            self.total, self.over = event["runs"], 0
            tell(f"{counted(event['runs'], 'run')} to do, {event['complete']} complete")
        elif event["event"] == "start":
            self.rounds[event["run"]] = event["rounds"]
            tell(f"{event['run']}: {counted(event['rounds'], 'round')}")
        elif event["event"] == "round":
            self._round(event["run"], event["round"])
        elif event["event"] == "over":
            self.over += 1
            tell(f"[{self.over}/{self.total}] {_end_line(event)}")

    def _round(self, run: str, t: int) -> None:
        now, resumed = time.monotonic(), t > 1 and run not in self.last
        if resumed or now - self.last.setdefault(run, now) > BETWEEN:
            self.last[run] = now
            tell(f"{run}: {'goes on with ' * resumed}round {t}/{self.rounds[run]}")

    def __enter__(self) -> PlainRuns:
        return self

    def __exit__(self, *exc: object) -> None:
        pass


class LiveRuns:
    """On a terminal: a bar for all runs, and one for each under way."""

    def __init__(self) -> None:
        self.bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TimeElapsedColumn(),
            console=for_bars(),
        )
        self.whole = self.bars.add_task("runs", total=0)
        self.tasks: dict[str, Any] = {}

    def __call__(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "queue":
            self.bars.reset(self.whole, total=event["runs"])
        elif kind == "start":
            self.tasks[event["run"]] = self.bars.add_task(event["run"], total=event["rounds"])
        elif kind == "round":
            self.bars.update(self.tasks[event["run"]], completed=event["round"])
        elif kind == "over":
            self.bars.remove_task(self.tasks.pop(event["run"]))
            self.bars.advance(self.whole)
            self.bars.console.print(_end_line(event), markup=False, highlight=False)

    def __enter__(self) -> LiveRuns:
        self.bars.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.bars.stop()


def _end_line(event: dict[str, Any]) -> str:
    end = f"failed: {event['error']}" if event["error"] else "done"
    return f"{event['run']}: {end} ({event['seconds']:.0f} s)"
