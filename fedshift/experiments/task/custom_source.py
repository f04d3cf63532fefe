"""Reading the `source` of [data] as a `fedshift.Task`: a table, arrays, a folder or a function."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedshift.datasets import TABLES as NATURAL_TABLES
from fedshift.errors import DataError, InputError, nearest, shown
from fedshift.experiments.config.data import Data
from fedshift.experiments.config.python_names import NATURAL, SITES, TABLES, is_python, load_python
from fedshift.experiments.config.wording import in_file_words, reworded
from fedshift.files import is_folder
from fedshift.tasks.task import Task

OF_CSV = ("separator", "decimal", "encoding", "header")
OF_TABLES = ("columns", "drop", "categories", *OF_CSV)
OF_ROWS = ("client", "label", *OF_TABLES)
OF_FOLDERS = ("size", "index")


def task_of(data: Data, seed: int) -> Task:
    """The task that [data] describes, cut by `seed`.

    Raises InputError, and DataError for files that cannot be read.
    """
    return _made(data, data.source or "", seed)


def _made(data: Data, source: str, seed: int) -> Task:
    if source == SITES:
        raise InputError(
            'data.source = "sites": the rows are on the clients\' machines, and `fedshift deploy` '
            "trains there. To simulate, give a table with all of them as source, and data.client; "
            'for a folder that is called sites, source = "./sites"'
        )
    if is_python(source):
        named = load_python("data.source", source)
        made: Task = named.call(lambda given: isinstance(given, Task))
        return replace(made, seed=seed)
    given = data.task_keys | ({} if data.size is None else {"size": data.size})
    given |= {"validation": data.validation, "test": data.test, "name": data.name, "seed": seed}
    with _in_words():
        if source == NATURAL:
            return _natural(given)
        path = Path(source)
        return _folder(path, given) if is_folder(path) else _reader(path)(path, given)


@contextlib.contextmanager
def _in_words() -> Iterator[None]:
    """Within the block, errors about arguments of `fedshift.Task` name keys of [data] instead."""
    keys = {name: name for name in Data.model_fields}
    try:
        with in_file_words("data", keys):
            yield
    except InputError as e:
        # Some advice of `fedshift.Task` makes no sense for a file: it cannot hold arrays, and calls
        # y data.label.
        message = str(e).replace("a labelled test set (x, y)", "a table of labelled examples")
        message = message.replace("(a dict by name,", "(a table by name,")
        e.args = (re.sub(r"^(\[data\]: )?y (?=has|holds|is)", "data.label ", message),)
        raise


def note_in_file_words(note: str) -> str:
    """A task's note with keys of [data] in place of arguments of `fedshift.Task`."""
    return reworded(note, {key: f"data.{key}" for key in Data.model_fields}, " = ")


def _reader(path: Path) -> Callable[[Path, dict[str, Any]], Task]:
    readers = dict.fromkeys(TABLES, _csv) | {".parquet": _parquet, ".npz": _arrays}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        if path.name in {one.name for one in NATURAL_TABLES}:
            raise InputError(
                f'data.source = "{path.name}" names no file but a table that fedshift reads by '
                f'name; give data.name = "{path.name}", and leave data.source out'
            )
        raise InputError(
            f'data.source = "{shown(str(path), 200)}" is no folder; a table ends in .csv, .tsv, '
            ".txt, .gz or .parquet, arrays in .npz; for all else give FILE.py:NAME, a function "
            "that gives a fedshift.Task"
        )
    return reader


def _natural(given: dict[str, Any]) -> Task:
    name = given.pop("name")
    _refuse((*OF_ROWS, *OF_FOLDERS, "kind"), given, "data of your own", name)
    return Task.from_name(name, target=_target(given), **given)


def _folder(path: Path, given: dict[str, Any]) -> Task:
    _refuse(OF_ROWS, given, "tables", path.name)
    return Task.from_folder(path, target=_target(given), **given)


def _csv(path: Path, given: dict[str, Any]) -> Task:
    _refuse(OF_FOLDERS, given, "folders of images", path.name)
    return Task.from_csv(path, **_columns(given, path), **given)


def _parquet(path: Path, given: dict[str, Any]) -> Task:
    _refuse(OF_FOLDERS, given, "folders of images", path.name)
    _refuse(OF_CSV, given, "CSV files", path.name)
    return Task.from_parquet(path, **_columns(given, path), **given)


def _columns(given: dict[str, Any], path: Path) -> dict[str, Any]:
    """Take client, label and target, which a table's task needs, out of `given`."""
    for key, what in (("client", "whose row it is"), ("label", "what is to be predicted")):
        if key not in given:
            raise InputError(
                f"data.{key} is missing: the column of {path.name} that says {what}; "
                f"`fedshift init {path.name}` lists those that may be meant"
            )
    return {key: given.pop(key) for key in ("client", "label")} | {"target": _target(given)}


def _arrays(path: Path, given: dict[str, Any]) -> Task:
    """A task of a .npz file: all arrays but label and client are its inputs."""
    _refuse((*OF_TABLES, *OF_FOLDERS), given, "other sources", path.name)
    label, client = given.pop("label", "y"), given.pop("client", "client")
    arrays = _loaded(path)
    for key, name in (("label", label), ("client", client)):
        if name not in arrays:
            raise InputError(
                f'data.{key} = "{shown(str(name))}": {path} has the arrays {", ".join(arrays)}.'
                f"{nearest(str(name), arrays)}"
            )
    y, clients = arrays.pop(label), arrays.pop(client)
    if not arrays:
        raise InputError(f"data.source: {path} holds nothing to learn from beside its labels")
    x = next(iter(arrays.values())) if len(arrays) == 1 else arrays
    return Task.from_arrays(x, y, client=clients, target=_target(given), **given)


def _loaded(path: Path) -> dict[str, Any]:
    try:
        with np.load(path, allow_pickle=False) as read:
            return {name: read[name] for name in read.files}
    except FileNotFoundError:
        raise DataError(f"there is no file {path}") from None
    except (OSError, ValueError, EOFError, KeyError) as e:
        raise DataError(f"{path}: cannot be read as .npz: {shown(str(e), 200)}") from None


def _refuse(keys: tuple[str, ...], given: dict[str, Any], of: str, name: str) -> None:
    if odd := [key for key in keys if key in given]:
        raise InputError(f"data.{odd[0]} is for {of}, not for {name}; leave it out")


def _target(given: dict[str, Any]) -> Any:
    if "target" not in given:
        raise InputError(
            "data.target is missing: where will the model be used? Give a client's name, label "
            'shares, "pooled" or "clients"'
        )
    return given.pop("target")
