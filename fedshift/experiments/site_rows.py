"""A client's own rows: read as its site.toml says, and tried against what the experiment declares.

Errors here have two texts: what a server may read, and `detail` with lines and values of the site's
data, which is for its operator alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from fedshift.errors import FedshiftError, InputError, nearest, shown, visible
from fedshift.experiments.config_data import Data
from fedshift.experiments.declared import categories_of
from fedshift.experiments.load import read_section
from fedshift.experiments.python_names import TABLES, is_python, load_python
from fedshift.experiments.section import Section
from fedshift.tasks.encoding import codes_in
from fedshift.tasks.names import Coded, Ints, as_number, coded, listed, text_of
from fedshift.tasks.rows import Columns, Inputs, Numbers, column_of, inputs_of
from fedshift.tasks.sniffing import sniffed
from fedshift.tasks.tables import read_table
from fedshift.tasks.tensors import Tensors
from fedshift.tasks.values import MARKS, reader_of

FILE = "site.toml"
# Different texts of one column of categories, and their length: the server gets all of them.
MOST_TEXTS, LONGEST = 1000, 200
TEMPLATE = """\
# Where {site}'s own rows are. This file and the rows stay on this machine.
# experiment.toml, beside it, says which columns and labels are expected; try them with
#     fedshift deploy check .
[data]
source = "data.csv"          # beside this file; or "site.py:load", a function of yours
# label = "{label}"          # where the column has another name here
# columns = {{ age = "Alter" }}  # the same for columns to learn from
# separator, decimal, encoding and header are looked up in the file where they are left out
"""


class SiteError(InputError):
    """Data of a site that do not fit: the text has no row, value or path of the site's.

    detail: what its operator needs to know, with them.
    """

    def __init__(self, public: str, detail: str) -> None:
        super().__init__(public)
        self.detail = visible(detail)


class SiteTable(Section):
    """[data] of site.toml; columns: the experiment's name of a column -> the site's own."""

    source: str
    label: str | None = None
    columns: dict[str, str] | None = None
    separator: str | None = None
    decimal: str | None = None
    encoding: str | None = None
    header: tuple[str, ...] | None = None


class SiteFile(Section):
    """site.toml."""

    data: SiteTable


@dataclass(frozen=True, eq=False)
class SiteRows:
    """A site's examples: columns or a tensor, and the class of each, -1 without one."""

    inputs: Inputs
    codes: Ints


@contextlib.contextmanager
def discreet(what: str) -> Iterator[None]:
    """Every error within as a SiteError whose text is `what` alone."""
    try:
        yield
    except SiteError:
        raise
    except FedshiftError as e:
        raise SiteError(what, str(e)) from e
    except Exception as e:
        raise SiteError(what, f"{type(e).__name__}: {e}") from e


def rows_of_site(folder: Path, data: Data) -> SiteRows:
    """The rows that `folder`/site.toml names. Raises SiteError where they do not fit `data`."""
    with discreet("its data cannot be read"):
        table = read_section(folder / FILE, SiteFile).data
        if is_python(table.source):
            rows = _of_function(folder, table, data)
        else:
            rows = _of_file(folder / table.source, table, data)
        if not (rows.codes >= 0).any():
            _refuse("no row has a label", "nothing to train on")
        return rows


@dataclass(frozen=True)
class _Place:
    """Where rows are: lines of a file, or rows of what a function returned."""

    name: str
    first: int = 0
    what: str = "row"

    def at(self, row: int) -> str:
        return f"{self.name}, {self.what} {self.first + row + 1}"


def _of_file(path: Path, table: SiteTable, data: Data) -> SiteRows:
    if data.columns is None:
        _refuse(
            f"{path} is a table", "the experiment has no columns; give a function, site.py:load"
        )
    if path.suffix.lower() not in TABLES or path.suffix == ".parquet":
        raise InputError(f"{path}: no CSV file; for all else give a function, as site.py:load")
    form = {
        key: value for key in ("separator", "decimal", "encoding", "header")
        if (value := getattr(table, key)) is not None
    }  # fmt: skip
    own = {name: name for name in data.columns} | (table.columns or {})
    label = table.label or str(data.label)
    file = sniffed(path, (), **form)
    _check_columns(own, label, data, file.header, str(path))
    place = _Place(str(path), file.first, "line")
    leave = [name for name in file.header if name not in {label, *own.values()}]
    texts = [own[name] for name in categories_of(data.model_dump())]
    try:
        read = read_table(path, [], leave=leave, names=texts, label=label, wide=True, **form)[0]
    except InputError:
        # Once more, all as text: the error then names the line.
        read = read_table(path, [], leave=leave, names=file.header, label=label, **form)[0]
        _fitted(read, own, label, data, place, file.number)
        raise
    return _fitted(read, own, label, data, place, file.number)


def _of_function(folder: Path, table: SiteTable, data: Data) -> SiteRows:
    file, _, name = table.source.rpartition(":")
    load = load_python("site.source", f"{folder / file}:{name}")
    place = _Place(f"what {table.source} returned")
    given = load.call(lambda made: isinstance(made, tuple | Mapping) or hasattr(made, "columns"))
    if isinstance(given, tuple):
        if data.input is None:
            _refuse(f"{table.source} returned a pair", "the experiment declares columns: a table")
        x, y = given
        return SiteRows(_tensor(x, data, table.source), _classes(coded(y), data, place))
    if data.columns is None:
        _refuse(f"{table.source} returned a table", "the experiment declares input: a pair (x, y)")
    own = {name: name for name in data.columns} | (table.columns or {})
    label = table.label or str(data.label)
    _check_columns(own, label, data, [str(n) for n in given], table.source)
    texts = {own[name] for name in categories_of(data.model_dump())}
    columns = {
        name: coded(given[name]) if name in texts else column_of(name, given[name], wide=True)
        for name in {label, *own.values()}
    }
    return _fitted(Columns(columns), own, label, data, place)


def _tensor(x: Any, data: Data, source: str) -> Tensors:
    inputs = inputs_of(x)
    if not isinstance(inputs, Tensors) or inputs.form != "one":
        _refuse(
            f"{source}: x is no array", f"an array [n, {listed([*map(str, data.input or ())])}]"
        )
    shape = tuple(inputs.of["x"].shape[1:])
    if shape != data.input:
        _refuse(
            f"examples are {shape}", f"the experiment declares input = {list(data.input or ())}"
        )
    if not bool(inputs.of["x"].double().sum().isfinite()):
        _refuse("x holds NaN or infinity", "fill it in, or leave such rows out")
    return inputs


def _check_columns(own: Mapping[str, str], label: str, data: Data, header: Any, where: str) -> None:
    """Refuse names in site.toml that the experiment has not, and columns that are not there."""
    columns = data.columns or ()
    if odd := [name for name in own if name not in columns]:
        raise InputError(
            f'{FILE}: columns: "{shown(odd[0])}" is none of the experiment\'s; these are '
            f"{listed(columns, 12)}.{nearest(odd[0], columns)}"
        )
    for name, here in {str(data.label): label, **own}.items():
        if here not in header:
            raise SiteError(
                f'column "{shown(name)}" is missing',
                f'{where} has no column "{shown(here)}"; it has {listed(list(header), 12)}.'
                f"{nearest(here, header)} Where it has another name, say so in {FILE}",
            )


def _fitted(
    table: Columns,
    own: Mapping[str, str],
    label: str,
    data: Data,
    place: _Place,
    number: Callable[[str], float] = as_number,
) -> SiteRows:
    """The declared columns in the experiment's order and names, checked one by one."""
    declared, texts, made = data.values or {}, categories_of(data.model_dump()), {}
    for name in data.columns or ():
        if own[name] not in table.of:
            _refuse(f'column "{name}" holds free text', "more texts than a category has", name)
        column = table.of[own[name]]
        if name in texts:
            column = coded(column)
            _check_texts(name, column, declared.get(name), place)
        elif isinstance(column, Coded):
            column = _numbers(name, column, place, number)
        missing = column.codes < 0 if isinstance(column, Coded) else np.isnan(column)
        if data.missing == "refuse" and missing.any():
            where = place.at(int(missing.argmax()))
            _refuse(f"{where}: no value", 'the experiment has missing = "refuse"', name)
        made[name] = column
    return SiteRows(Columns(made), _classes(coded(table.of[label]), data, place))


def _numbers(name: str, column: Coded, place: _Place, number: Callable[[str], float]) -> Numbers:
    """Texts that are numbers; marks such as "?" are missing."""
    read = reader_of(column.names, number)
    values = np.array([*map(read, column.names), np.nan])
    for code, text in enumerate(column.names):
        if not np.isfinite(values[code]) and text.lower() not in MARKS:
            where = place.at(int((column.codes == code).argmax()))
            _refuse(f'{where}: "{shown(text)}"', "the experiment declares numbers", name)
    return np.where(np.isfinite(values), values, np.nan)[column.codes]


def _check_texts(name: str, column: Coded, allowed: Any, place: _Place) -> None:
    """Refuse categories that are not declared, and more texts than a server should get."""
    if allowed is not None:
        codes = codes_in(column, allowed)
        if (odd := codes == len(allowed)).any():
            row = int(odd.argmax())
            text, names = column.names[column.codes[row]], listed(allowed, 12)
            what = f'{place.at(row)}: "{shown(text)}"'
            _refuse(what, f"the experiment declares {names}.{nearest(text, allowed)}", name)
    elif len(column.names) > MOST_TEXTS or any(len(text) > LONGEST for text in column.names):
        what = f"{len(column.names):,} texts"
        _refuse(what, f"at most {MOST_TEXTS:,}, of {LONGEST} characters each, are categories", name)


def _classes(labels: Coded, data: Data, place: _Place) -> Ints:
    """Each row's class: by its name, or by its number 0..K-1 where classes are other names."""
    classes = [*map(text_of, data.classes or ())]
    code = {name: i for i, name in enumerate(classes)}
    if not {*labels.names} & {*classes}:
        code |= {str(i): i for i in range(len(classes))}
    for at, text in enumerate(labels.names):
        rows = labels.codes == at
        if text not in code and rows.any():
            what = f'{place.at(int(rows.argmax()))}: "{shown(text)}"'
            near = nearest(text, classes)
            _refuse(
                what, f"the classes are {listed(classes, 12)}.{near}", str(data.label or "label")
            )
    return np.array([*(code.get(text, -1) for text in labels.names), -1])[labels.codes]


def _refuse(what: str, expected: str, column: str = "") -> NoReturn:
    """A SiteError; the server reads which column it is, and what was expected of it."""
    of = f'column "{shown(column)}"' if column else ""
    # The nearest match is a value of the site's neighbourhood; the sentence before it is not.
    public = expected.partition(". Did you mean")[0].rstrip(".")
    raise SiteError(
        f"{of}: {public}" if of else public,
        f"{of}: {what}; {expected}" if of else f"{what}; {expected}",
    )
