"""`fedshift init`: describe a table, and write an experiment on it that can be run at once."""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedshift.cli.console import counted, percent, put, say, show_json, show_table
from fedshift.cli.first_files import CONFIG, NET, config_text, net_text
from fedshift.diagnosis import Diagnosis
from fedshift.errors import InputError, nearest, shown
from fedshift.experiments.config.data import OF_TASK, Data
from fedshift.experiments.config.load import apply_overrides, validate
from fedshift.experiments.config.python_names import TABLES
from fedshift.experiments.config.wording import in_file_words
from fedshift.experiments.task.custom_source import OF_CSV, note_in_file_words, task_of
from fedshift.files import make_folder, write
from fedshift.tasks.building import Built
from fedshift.tasks.doubts import doubts
from fedshift.tasks.look import MOST_CLASSES, ColumnLook, candidates, look
from fedshift.tasks.names import Coded, coded, listed
from fedshift.tasks.rows import Columns
from fedshift.tasks.tables import check_uses, read_table
from fedshift.tasks.task import Task

SHARES = "label shares or counts (a table by name, or one number per class)"
# The most rows of a printed table; a last line says how many more there are.
MOST = 24
TYPED = ("client", "label", "target")
QUESTIONS = {
    "client": "which column says whose row it is",
    "label": "which column is to be predicted",
}


@dataclass(frozen=True)
class Asked:
    """The arguments and options of `fedshift init`."""

    source: Path
    client: str | None
    label: str | None
    target: str | None
    folder: Path
    overrides: Sequence[str] = ()

    @property
    def files(self) -> tuple[Path, Path]:
        """The experiment and the network that are written."""
        return self.folder / CONFIG, self.folder / NET


def init(asked: Asked, *, as_json: bool) -> None:
    """Describe, diagnose and write. Raises InputError if a file to be written exists already."""
    _check_places(asked)
    given = _given(asked)
    with _in_words():
        table = _table(asked, given)
        data, columns = _section(asked, table, given), look(table)
        _check_client(table, data)
        task = task_of(data, seed=0)  # reads the file as a run would
        built, diagnosis = task.build(), task.diagnose()
    notes = [
        _worded(note_in_file_words(note)) for note in (*built.notes, *_doubts(table, data, built))
    ]
    make_folder(asked.folder)
    texts = config_text(_from(asked.folder, data), task), net_text(built)
    for path, text in zip(asked.files, texts, strict=True):
        write(path, text)
    if as_json:
        show_json(_facts(asked, columns, task, notes, diagnosis))
        return
    say(f"{shown(asked.source.name)}: {counted(len(table), 'row')}, {len(columns)} columns.")
    _show_columns(columns)
    _show_clients(task)
    if task.kind == "regression":
        say(f'"{shown(str(data.label))}" holds numbers, which are predicted as such (regression).')
    for sentence in (*notes, *diagnosis.verdict):
        say(sentence)
    put(f"Wrote {' and '.join(map(str, asked.files))}. Next: fedshift run {asked.files[0]}")


def _check_places(asked: Asked) -> None:
    for path in asked.files:
        if os.path.lexists(path):
            raise InputError(f"{path}: is there already, and nothing is overwritten; give --folder")
    if not asked.source.name.lower().endswith(TABLES):
        cure = "unpack it, or save it as CSV"
        if asked.source.is_dir() or asked.source.suffix in (".npz", ".py"):
            cure = "an experiment file names arrays (.npz), folders of images and functions as well"
            cure += ", with data.source"
        raise InputError(f"{asked.source}: init looks at tables ({', '.join(TABLES)}); {cure}")


@contextlib.contextmanager
def _in_words() -> Iterator[None]:
    """Within the block, errors about arguments and keys of [data] name this command's options."""
    try:
        with in_file_words("data", {key: key for key in Data.model_fields}):
            yield
    except InputError as e:
        e.args = (_worded(str(e)),)
        raise


def _worded(message: str) -> str:
    """A message with this command's options in place of keys of [data]."""
    message = message.removeprefix("[data]: ").replace(SHARES, "label shares, as ill=0.7,well=0.3")
    message = re.sub(r"\bdata\.(client|label|target)\b(?: =|:)?", r"--\1", message)
    value = r"\[[^]]*\]|\"[^\"]*\"|[\w.]+"
    return re.sub(rf"\bdata\.(\w+) = ({value})", r"-c 'data.\1=\2'", message)


def _given(asked: Asked) -> dict[str, Any]:
    """The keys of [data] that -c gives. Raises InputError for others."""
    tables: dict[str, Any] = {}
    apply_overrides(tables, asked.overrides)
    keys = [f"{section}.{key}" for section, of in tables.items() for key in dict(of)]
    allowed = [f"data.{key}" for key in (*OF_TASK, "validation", "test") if key not in TYPED]
    if odd := [key for key in keys if key not in allowed]:
        raise InputError(
            f"-c {shown(odd[0])}: init takes {', '.join(allowed)}; the rest is set in the "
            f"experiment that it writes.{nearest(odd[0], allowed)}"
        )
    given = dict(tables.get("data", {}))
    validate({"data": given | {"source": str(asked.source)}}, overrides=asked.overrides)
    return given


def _table(asked: Asked, given: dict[str, Any]) -> Columns:
    """The table, read as the task will read it."""
    drop, names = given.get("drop", []), given.get("categories", [])
    wanted = [name for name in (asked.client, asked.label, *drop, *names) if name]
    written = {key: given[key] for key in OF_CSV if key in given}
    return read_table(asked.source, wanted, leave=drop, names=names, **written)[0]


def _section(asked: Asked, table: Columns, given: dict[str, Any]) -> Data:
    """[data] for the table. If a column was not named, raises InputError that lists candidates."""
    client, label = (getattr(asked, what) or _ask(asked, table, what) for what in QUESTIONS)
    if client == label:
        raise InputError(f'--client and --label are both "{shown(client)}"; give two columns')
    check_uses(client, [label], given.get("columns"), given.get("drop", []))
    looked = {column.name: column for column in look(table)}.get(label)
    if looked is None or (looked.kind == "text" and 2 * looked.values > len(table)):
        raise InputError(f'--label "{shown(label)}" holds free text; give a column of few values')
    numbers = looked.kind == "numbers" and (looked.values > MOST_CLASSES or not looked.whole)
    kind = {"kind": "regression"} if numbers else {}
    whose = table.of.get(client)  # a number holds no "="
    clients = whose.names if isinstance(whose, Coded) else ()
    names = {"source": str(asked.source), "client": client, "label": label}
    target = {"target": _target(asked.target or "pooled", clients)}
    return validate({"data": kind | given | names | target}).data


def _check_client(table: Columns, data: Data) -> None:
    """Raise InputError if most values of the client column are in a single row."""
    counts = coded(table.of[str(data.client)]).counts()
    if (alone := int((counts == 1).sum())) * 2 > len(counts):
        named = [
            c.name for c in candidates(table, "client") if c.name not in (data.client, data.label)
        ]
        may = f" It may be {listed(named)}." if named else ""
        raise InputError(
            f'--client "{shown(str(data.client))}": {alone:,} of its {len(counts):,} values are in '
            f"one row alone; give the column that says whose row it is, such as a site.{may}"
        )


def _doubts(table: Columns, data: Data, built: Built) -> list[str]:
    learned = [column.name for column in built.encoding.columns if column.name in table.of]
    return doubts(table, str(data.client), str(data.label), learned)


def _target(typed: str, clients: Sequence[str]) -> str | dict[str, float]:
    """The target as typed; ill=0.7,well=0.3 are label shares, unless a client has that name."""
    if "=" not in typed or typed in clients or os.path.exists(typed):
        return typed
    shares: dict[str, float] = {}
    for part in typed.split(","):
        # Split at the last "=", since a label may contain one.
        label, _, number = part.rpartition("=")
        label = label.strip()
        try:
            share = float(number)
        except ValueError:
            share = math.nan
        if not label or not math.isfinite(share):
            raise InputError(
                f'--target {shown(typed)}: "{shown(part)}" is no label with its share; give each '
                "label once, as in --target ill=0.7,well=0.3"
            )
        if label in shares:
            raise InputError(f'--target {shown(typed)}: "{shown(label)}" is there twice')
        shares[label] = share
    return shares


def _from(folder: Path, data: Data) -> Data:
    """[data] with paths relative to a folder."""
    source, target = str(data.source), data.target
    if isinstance(target, str) and target.lower().endswith(TABLES):
        target = os.path.relpath(target, folder)
    return data.model_copy(update={"source": os.path.relpath(source, folder), "target": target})


def _ask(asked: Asked, table: Columns, what: str) -> str:
    """Raise InputError with the candidates for a column; it is never guessed."""
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
    """Print each client's labelled rows and, in classification, its label shares."""
    labels, places = task.labels, task.places
    rows = []
    for code, name in enumerate(places.names):
        counts = labels.counts((places.codes == code).nonzero()[0])
        total = int(counts.sum())
        role = " (target)" if name == task.target.name else ""
        shares = (percent(c / total) if total else "–" for c in counts)
        rows.append((f"{name}{role}", f"{total:,}", *shares))
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
