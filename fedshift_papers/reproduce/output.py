"""Writing the files of a reproduced table, and its published page."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fedshift import __version__
from fedshift.experiments.folder.run_folder import trained_with
from fedshift.files import clean, write
from fedshift.report.layout import figure, html_page, items, note, section, table
from fedshift.report.shapes import alone, escape, sheet
from fedshift.report.svg import svg
from fedshift.report.tables import csv_text, escape_markdown, latex, markdown
from fedshift.sweeps.records import RECORDS, read_records, write_records
from fedshift.sweeps.store import Store
from fedshift_papers.reproduce.charts import charts
from fedshift_papers.reproduce.plan import Plan
from fedshift_papers.reproduce.results import Cell
from fedshift_papers.reproduce.routing_charts import Drawn
from fedshift_papers.reproduce.tables import (
    cell_table,
    facts_of,
    numbers_table,
    paper_table,
    runs_by_seed,
    seeds_table,
)
from fedshift_papers.reproduce.verdict import margins, stopped_early, verdicts, without_value

PAGE, RESULTS, SHEET = "table.md", "results.json", "plots.svg"
BOOTSTRAP = (
    "Intervals: percentile bootstrap over seeds, 10,000 resamples, the same for all cells of "
    "equally many seeds. With three seeds that is the range of the seeds, which covers a mean in "
    "75 % of cases and not in 95 %; fewer seeds have none."
)


@dataclass(frozen=True)
class Outcome:
    """Everything that a table's files show, once the runs are over.

    notes   sentences on what was chosen, tuned or changed
    """

    plan: Plan
    cells: tuple[Cell, ...]
    notes: tuple[str, ...]
    command: str

    @property
    def folder(self) -> str:
        """The name of the table's folder: "table1" for "fedpals/table1"."""
        return self.plan.study.name.rpartition("/")[2]

    @property
    def problems(self) -> tuple[str, ...]:
        """Why some cells could not be run, each once."""
        return tuple(dict.fromkeys(c.problem for c in self.cells if c.problem))


def notes_of(plan: Plan, cells: Sequence[Cell], tuned: Mapping[Any, Any]) -> tuple[str, ...]:
    """The sentences at the foot: verdicts, choices left open by the paper, tuning, changes."""
    open_ = (*plan.study.chosen, *(text for c in plan.study.columns for text in c.chosen))
    notes = [*verdicts(plan.study, cells), *margins(plan.study, cells)]
    notes += [*without_value(cells), *stopped_early(cells)]
    notes += [*(f"Chosen: {text}" for text in dict.fromkeys(open_))]
    notes += [BOOTSTRAP] if plan.study.interval == "bootstrap" else []
    for cell in cells:
        record = tuned.get((cell.column.key, cell.row.label))
        values = ", ".join(f"{k} = {cell.options[k]:g}" for k in cell.row.grid)
        where = f"{cell.column.heading}, {cell.row.label}: {values}"
        if cell.row.grid and record is not None:
            notes.append(_tuned(where, record, _tuned_how(plan, record)))
        elif cell.problem is None and cell.row.grid.keys() - cell.column.method_options(cell.row):
            notes.append(f"Chosen: {where}, a default (--tune has not been run).")
    notes += [f"Changed from the protocol: {override}." for override in plan.overrides]
    notes += [f"Run with: {text}." for text in _versions(cells)]
    return tuple(notes)


def _tuned(where: str, record: Mapping[str, Any], how: str) -> str:
    if record.get("undecided"):
        return (
            f"Kept, as all of the grid have one validation accuracy: {where}, the default ({how})."
        )
    return f"Tuned on validation: {where} ({how})."


def _tuned_how(plan: Plan, record: Mapping[str, Any]) -> str:
    """On what a value was tuned: seed, rounds, and changes to the protocol if they differ."""
    how = f"seed {record['seed']}, {record['rounds']} round{'s' * (record['rounds'] != 1)}"
    changed = record.get("changed", [])
    # Tuned under the same changes as the table's runs: the page names these once, elsewhere.
    if tuple(changed) == plan.overrides:
        return how
    return f"{how}, with {', '.join(changed) or 'nothing changed from the protocol'}"


def _versions(cells: Sequence[Cell]) -> list[str]:
    """The distinct environments of the runs (versions, platform, backend), a line for each."""
    lines: dict[str, None] = {}
    for value in (v for c in cells for v in c.values):
        lock = value.lock
        named = ", ".join(f"{k} {v}" for k, v in sorted(lock.get("packages", {}).items()))
        backend = trained_with(lock)
        how = "" if backend == "loop" else f"; backend {backend}"
        lines[f"Python {lock.get('python')}, {named}; {lock.get('platform')}{how}"] = None
    return list(lines)


def write_outcome(folder: Path, outcome: Outcome, store: Store) -> Path:
    """Write every file of the table into `folder` and return the page."""
    study, cells = outcome.plan.study, outcome.cells
    drawn = charts(study, cells, store)
    _write_page(folder, outcome, drawn, store)
    write(folder / "table.tex", _latex(outcome))
    write(folder / "table.csv", csv_text(numbers_table(cells)))
    write(folder / "seeds.csv", csv_text(seeds_table(cells)))
    write(folder / RESULTS, json.dumps(document(outcome), indent=1) + "\n")
    write(folder / "index.html", _html(outcome, drawn, store))
    return folder / "index.html"


def publish(folder: Path, outcome: Outcome, store: Store) -> Path:
    """Write the table's page to a folder of its own, with a record of each run that it reads.

    From these records the same table can be drawn again without training. Records that are there
    already stay. Returns the page.
    """
    place = folder / outcome.folder
    records = {name: record.files for name, record in read_records(place / RECORDS).items()}
    # Only curves need the rounds of a run, which would be most of its record.
    curves = outcome.plan.study.curved
    for cell in outcome.cells:
        records |= {run.name: store.files(run, metrics=False) for run in cell.lost}
        runs = [run for v in cell.values for run in (v.run, *v.others)]
        records |= {run.name: store.files(run, metrics=curves) for run in runs}
    write_records(place / RECORDS, records)
    # The page is drawn from the records just written: so it is certain that they are enough.
    small = Store(place, read_records(place / RECORDS))
    drawn = charts(outcome.plan.study, outcome.cells, small)
    return _write_page(place, outcome, drawn, small, one_file=True)


def _write_page(
    folder: Path, outcome: Outcome, drawn: Mapping[str, Drawn], store: Store, one_file: bool = False
) -> Path:
    drawings = {name: (svg(chart.chart), chart.caption) for name, chart in drawn.items()}
    captions = write_drawings(folder, outcome.plan.study.title, drawings, one_file)
    write(folder / PAGE, markdown_page(outcome, captions, store))
    return folder / PAGE


def write_drawings(
    folder: Path, title: str, drawings: Mapping[str, tuple[str, str]], one_file: bool
) -> dict[str, tuple[str, ...]]:
    """Write drawings, each to its file or all to one, and return the captions by file.

    drawings    file name -> (the drawing, its caption)
    one_file    what is published is kept among other files for years, so it is few files
    """
    files = {name: alone(text) for name, (text, _) in drawings.items()}
    captions: dict[str, tuple[str, ...]] = {name: (text,) for name, (_, text) in drawings.items()}
    if one_file and files:
        several = len(files) > 1
        files = {SHEET: sheet(title, [*drawings.values()]) if several else files.popitem()[1]}
        captions = {SHEET: tuple(text for _, text in drawings.values())}
    for name, text in files.items():
        write(folder / name, text)
    return captions


def study_of(folder: Path) -> str | None:
    """The study whose table is in a folder, by the page's title; None without a page."""
    try:
        title = re.match(r"# (\S+): ", (folder / PAGE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return title and title[1]


def document(outcome: Outcome) -> dict[str, Any]:
    """The table as one JSON value, with all that its other forms show."""
    plan = outcome.plan
    value: dict[str, Any] = clean(
        {
            "study": plan.study.name,
            "title": plan.study.title,
            "metric": asdict(plan.study.metric),
            "fedshift": __version__,
            "command": outcome.command,
            "changed": plan.overrides,
            "cells": [_cell(c) for c in outcome.cells],
            "notes": outcome.notes,
            "problems": outcome.problems,
        }
    )
    return value


def _cell(cell: Cell) -> dict[str, Any]:
    return {
        "dataset": cell.column.dataset,
        "split": cell.column.split,
        "row": cell.row.label,
        "method": cell.row.method,
        "options": dict(cell.options),
        "paper": cell.printed and asdict(cell.printed),
        "here": cell.moments and asdict(cell.moments),
        "difference": cell.difference and asdict(cell.difference),
        "rounds": cell.rounds,
        "paper_rounds": cell.column.rounds,
        "paper_seeds": cell.column.seeds,
        "note": cell.note,
        "failures": cell.failures,
        "absent": cell.absent,
        "diverged": cell.diverged,
        "stopped": cell.stopped,
        "seeds": [facts_of(v) for v in cell.values],
    }


def markdown_page(outcome: Outcome, captions: Mapping[str, Sequence[str]], store: Store) -> str:
    """The page in Markdown: tables with links to runs, drawings, and the notes at the foot."""
    study, like = outcome.plan.study, paper_table(outcome.plan.study, outcome.cells)
    runs = runs_by_seed(outcome.cells, store, "[{}]({})", "{} `{}`")
    linked = markdown(replace(cell_table(study, outcome.cells), caption=""), runs)
    tables = [*([markdown(like)] if like else []), linked]
    foot = (*outcome.problems, *outcome.notes)
    return page_text(study.name, study.title, outcome.command, tables, captions, foot)


def page_text(
    name: str, title: str, command: str, tables: Sequence[str],
    captions: Mapping[str, Sequence[str]], foot: Sequence[str],
) -> str:  # fmt: skip
    """A table's or figure's page in Markdown; captions by the file name of their drawings."""
    parts = [f"# {name}: {escape_markdown(title)}\n", f"`{command}`\n", *tables]
    for file, texts in captions.items():
        lines = [escape_markdown(text) for text in texts]
        if len(lines) > 1:
            lines = ["From top to bottom:\n", *(f"{i}. {t}" for i, t in enumerate(lines, 1))]
        parts += [f"![{file}]({file})\n", "\n".join(lines) + "\n"]
    parts += ["".join(f"- {escape_markdown(n)}\n" for n in foot)]
    return "\n".join(parts)


def _latex(outcome: Outcome) -> str:
    like = paper_table(outcome.plan.study, outcome.cells)
    tables = [latex(like)] if like else []
    tables.append(latex(cell_table(outcome.plan.study, outcome.cells)))
    return "\n".join([*tables, *(f"% {note}" for note in (*outcome.problems, *outcome.notes)), ""])


def _html(outcome: Outcome, drawn: Mapping[str, Drawn], store: Store) -> str:
    study = outcome.plan.study
    like = paper_table(study, outcome.cells)
    beside = "Beside the paper" if study.printed else "The table"
    parts = [note(study.name), f"<p><code>{escape(outcome.command)}</code></p>"]
    parts += [section("problems", "Not run", items(outcome.problems))] if outcome.problems else []
    parts += [section("table", beside, table(like))] if like else []
    parts += [section("plots", "Drawings", *(figure(c.chart, c.caption) for c in drawn.values()))]
    runs = runs_by_seed(outcome.cells, store, '<a href="{1}">{0}</a>', "{} <code>{}</code>")
    linked = table(replace(cell_table(study, outcome.cells), caption=""), runs)
    parts += [section("cells", "Every cell, with its runs", linked)]
    foot = "What was found, chosen" if study.verdict else "What was chosen"
    parts += [section("notes", f"{foot}, tuned or changed", items(outcome.notes))]
    return html_page(study.title, parts)
