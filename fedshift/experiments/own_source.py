"""From [data] with a `source` to a `fedshift.Task`: a table, arrays, a folder, or a function."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fedshift.errors import DataError, InputError, nearest, shown
from fedshift.experiments.config_data import Data
from fedshift.experiments.python_names import is_python, load_python
from fedshift.experiments.wording import in_file_words
from fedshift.tasks.task import Task

# Keys of [data] that are for tables alone.
OF_TABLES = ("columns", "drop", "categories")


def task_of(data: Data) -> Task:
    """The task that [data] describes. Raises InputError, or DataError for files it cannot read."""
    source = data.source or ""
    if is_python(source):
        expects = "a function without arguments that gives a fedshift.Task"
        named = load_python("data.source", source, expects)
        task: Task = named.call(lambda task: isinstance(task, Task))
        return task
    given = data.own_keys | {"validation": data.validation, "test": data.test, "name": data.name}
    with in_file_words("data", {name: name for name in given} | {"y": "label"}):
        return _read(Path(source), given)


def _read(path: Path, given: dict[str, Any]) -> Task:
    if path.suffix == ".npz":
        return _arrays(path, given)
    raise InputError(f'data.source = "{shown(str(path), 200)}": give .npz or FILE.py:NAME')


def _arrays(path: Path, given: dict[str, Any]) -> Task:
    """x is what is neither label nor client: one array, or several by name."""
    if odd := [key for key in OF_TABLES if key in given]:
        raise InputError(f"data.{odd[0]} is for tables, and {path.name} holds arrays; leave it out")
    label, client = given.pop("label", "y"), given.pop("client", "client")
    arrays = _loaded(path)
    for key, name in (("label", label), ("client", client)):
        if name not in arrays:
            raise InputError(
                f'data.{key} = "{shown(str(name))}": {path} has the arrays {", ".join(arrays)}.'
                f"{nearest(str(name), arrays)}"
            )
    y, of = arrays.pop(label), arrays.pop(client)
    if not arrays:
        raise InputError(f"data.source: {path} holds nothing beside {label} and {client}")
    x = next(iter(arrays.values())) if len(arrays) == 1 else arrays
    return Task.from_arrays(x, y, client=of, target=_target(given), **given)


def _loaded(path: Path) -> dict[str, Any]:
    try:
        with np.load(path, allow_pickle=False) as read:
            return {name: read[name] for name in read.files}
    except FileNotFoundError:
        raise InputError(f'data.source = "{path}": there is no such file') from None
    except (OSError, ValueError, EOFError, KeyError) as e:
        raise DataError(f"{path}: cannot be read as .npz: {shown(str(e), 200)}") from None


def _target(given: dict[str, Any]) -> Any:
    if "target" not in given:
        raise InputError(
            "data.target is missing: where will the model be used? Give a client's name, label "
            'shares, "pooled" or "clients"'
        )
    return given.pop("target")
