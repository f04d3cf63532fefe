"""`fedshift init`: look at a table, say what is in it, and write an experiment on it that runs."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedshift.cli.console import counted, percent, put, say, show_json, show_table
from fedshift.cli.first_files import CONFIG, NET, config_text, net_text
from fedshift.diagnosis import Diagnosis
from fedshift.errors import InputError, shown
from fedshift.experiments.config_data import Data
from fedshift.experiments.custom_source import task_of
from fedshift.experiments.python_names import TABLES
from fedshift.files import write
from fedshift.tasks.look import MOST_CLASSES, ColumnLook, candidates, look
from fedshift.tasks.rows import Columns
from fedshift.tasks.tables import read_table
from fedshift.tasks.task import Task

# Rows of a printed table; of a longer one only the rest is counted.
MOST = 24
QUESTIONS = {
    "client": "which column says whose row it is",
    "label": "which column is to be predicted",
}


@dataclass(frozen=True)
class Asked:
    """What was typed after `fedshift init`."""

    source: Path
    client: str | None
    label: str | None
    target: str | None
    folder: Path

    @property
    def files(self) -> tuple[Path, Path]:
        """The experiment and the network that are written."""
        return self.folder / CONFIG, self.folder / NET


def init(asked: Asked, *, as_json: bool) -> None:
    """Look, diagnose, write. Raises InputError where a file to be written is there already."""
    for path in asked.files:
        if os.path.lexists(path):
            raise InputError(f"{path}: is there already, and nothing is overwritten; give --folder")
    if not asked.source.name.lower().endswith(TABLES):
        raise InputError(
            f"{asked.source}: init looks at tables ({', '.join(TABLES)}); an experiment file names "
            "arrays (.npz), folders of images and functions as well, with data.source"
        )
    table, _ = read_table(asked.source, [name for name in (asked.client, asked.label) if name])
    data, columns = _section(asked, table), look(table)
    with _in_words():
        task = task_of(data, seed=0)  # which reads the file as a run does
        built, diagnosis = task.build(), task.diagnose()
    asked.folder.mkdir(parents=True, exist_ok=True)
    texts = config_text(_from(asked.folder, data), task), net_text()
    for path, text in zip(asked.files, texts, strict=True):
        write(path, text)
    if as_json:
        show_json(_facts(asked, columns, task, built.notes, diagnosis))
        return
    say(f"{shown(asked.source.name)}: {counted(len(table), 'row')}, {len(columns)} columns.")
    _show_columns(columns)
    _show_clients(task)
    for sentence in (*built.notes, *diagnosis.verdict):
        say(sentence)
    put(f"Wrote {' and '.join(map(str, asked.files))}. Next: fedshift run {asked.files[0]}")


@contextlib.contextmanager
def _in_words() -> Iterator[None]:
    """Errors about keys of [data] as such about this command's options."""
    try:
        yield
    except InputError as e:
        e.args = (re.sub(r"\bdata\.(client|label|target)(?: =|:)? ", r"--\1 ", str(e)),)
        raise


def _section(asked: Asked, table: Columns) -> Data:
    """[data] for the table. Raises InputError that lists candidates where a column is not named."""
    names = {what: getattr(asked, what) or _ask(asked, table, what) for what in QUESTIONS}
    if names["label"] not in table.of:  # which the reader has left out
        raise InputError(f'--label "{names["label"]}" holds free text; give a column of few values')
    numbers = [
        c for c in look(table)
        if c.kind == "numbers" and (c.values > MOST_CLASSES or not c.whole)
    ]  # fmt: skip
    kind = {"kind": "regression"} if names["label"] in {c.name for c in numbers} else {}
    given = {"source": str(asked.source), "target": asked.target or "pooled"}
    return Data.model_validate(names | kind | given)


def _from(folder: Path, data: Data) -> Data:
    """The same with paths as they are from a folder."""
    source, target = str(data.source), data.target
    if isinstance(target, str) and target.lower().endswith(TABLES):
        target = os.path.relpath(target, folder)
    return data.model_copy(update={"source": os.path.relpath(source, folder), "target": target})


def _ask(asked: Asked, table: Columns, what: str) -> str:
    """None is guessed."""
    columns = [c for c in candidates(table, what) if c.name not in (asked.client, asked.label)]
    if not columns:
        names = ", ".join(shown(name, 30) for name in list(table.of)[:MOST])
        raise InputError(f"--{what}: {QUESTIONS[what]}? None has few values; there are {names}")
    each = ", ".join(f"{shown(c.name, 30)} ({counted(c.values, 'value')})" for c in columns)
    raise InputError(
        f"--{what}: {QUESTIONS[what]}? It may be {each}. Give it, as in --{what} "
        f'"{shown(columns[0].name, 30)}"'
    )


def _show_columns(columns: Sequence[ColumnLook]) -> None:
    rows = [(c.name, c.kind, f"{c.values:,}", f"{c.missing:,}") for c in columns]
    _show("Columns", ("column", "kind", "values", "missing"), rows)


def _show_clients(task: Task) -> None:
    """Rows and label shares of every client, the target's as well; of numbers, rows alone."""
    labels, places = task.labels, task.places
    rows = []
    for code, name in enumerate(places.names):
        counts = labels.counts((places.codes == code).nonzero()[0])
        total = max(1, int(counts.sum()))
        role = " (target)" if name == task.target.name else ""
        rows.append((f"{name}{role}", f"{total:,}", *(percent(c / total) for c in counts)))
    few = 2 <= len(labels.names) <= MOST // 2
    header = ("client", "rows", *(f"{one} %" for one in labels.names))
    _show("Clients", header if few else header[:2], [row if few else row[:2] for row in rows])


def _show(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    show_table(title, header, rows[:MOST])
    if len(rows) > MOST:
        put(f"... and {len(rows) - MOST} more")


def _facts(
    asked: Asked, columns: Sequence[ColumnLook], task: Task, notes: Sequence[str],
    diagnosis: Diagnosis,
) -> dict[str, Any]:  # fmt: skip
    return {
        "rows": len(task.places.codes),
        "columns": [vars(c) for c in columns],
        "kind": task.kind,
        "clients": list(task.clients),
        "classes": list(task.classes),
        "target": task.target.text,
        "notes": list(notes),
        "diagnosis": diagnosis.to_json(),
        "files": [str(path) for path in asked.files],
    }
