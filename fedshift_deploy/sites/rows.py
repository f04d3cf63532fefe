"""A client's own rows: read as its site.toml says, and checked against the experiment.

Errors here have two texts. The message may be sent to the server. `detail` has lines and values of
the site's data, and is for the site's operator alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from fedshift.errors import FedshiftError, InputError, nearest, shown, visible
from fedshift.experiments.config.data import Data
from fedshift.experiments.config.load import read_section
from fedshift.experiments.config.python_names import TABLES, is_python, load_python
from fedshift.experiments.config.section import Section
from fedshift.experiments.config.sites import categories_of
from fedshift.tasks.encoding import codes_in
from fedshift.tasks.names import Coded, Ints, as_number, coded, listed, text_of
from fedshift.tasks.rows import Columns, Inputs, Numbers, column_of, inputs_of
from fedshift.tasks.sniffing import sniffed
from fedshift.tasks.tables import read_table
from fedshift.tasks.tensors import Tensors
from fedshift.tasks.values import MARKS, reader_of

FILE = "site.toml"
# Limits on the texts of a column of categories: how many, and how long. All of them go to the
# server, so that a column of free text would send it what it must not see.
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
    """A site's data do not fit. The message is for the server: no row, value or path is in it.

    detail: the message for the site's operator, with rows, values and paths.
    """

    def __init__(self, public: str, detail: str) -> None:
        super().__init__(public)
        self.detail = visible(detail, keep="\n")


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
    """A site's examples: columns or a tensor, and the class of each, -1 if it has no label.

    numbered: whether the labels are numbers 0..K-1, of classes that have names
    """

    inputs: Inputs
    codes: Ints
    numbered: bool = False


@contextlib.contextmanager
def discreet(what: str) -> Iterator[None]:
    """Turn every error within the block into a SiteError; its message is `what` alone."""
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
        site = read_section(folder / FILE, SiteFile).data
        if is_python(site.source):
            rows = _of_function(folder, site, data)
        else:
            rows = _of_file(folder / site.source, site, data)
        if not (rows.codes >= 0).any():
            _refuse("no row has a label", "nothing to train on")
        return rows


@dataclass(frozen=True)
class _Table:
    """The site's names of a table and its columns, and how to say where a row is.

    columns: the experiment's names -> the site's. first: the number of lines above the first row.
    number: parses a number as this file writes it.
    """

    name: str
    columns: Mapping[str, str]
    label: str
    first: int = 0
    what: str = "row"
    number: Callable[[str], float] = as_number

    def at(self, row: int) -> str:
        return f"{self.name}, {self.what} {self.first + row + 1}"


def _table(site: SiteTable, data: Data, name: str, header: Sequence[str]) -> _Table:
    """The names of a table. Raises an error for columns that are not in its header."""
    columns = data.columns or ()
    if odd := [one for one in site.columns or () if one not in columns]:
        raise InputError(
            f'{FILE}: columns: "{shown(odd[0])}" is none of the experiment\'s; these are '
            f"{listed(columns, 12)}.{nearest(odd[0], columns)}"
        )
    table = _Table(
        name,
        {one: one for one in columns} | (site.columns or {}),
        str(data.label) if site.label is None else site.label,
    )
    for one, here in {str(data.label): table.label, **table.columns}.items():
        if here not in header:
            raise SiteError(
                f'column "{shown(one)}" is missing',
                f'{name} has no column "{shown(here)}"; it has {listed(list(header), 12)}.'
                f"{nearest(here, header)} Where it has another name, say so in {FILE}",
            )
    return table


def _of_file(path: Path, site: SiteTable, data: Data) -> SiteRows:
    if data.columns is None:
        _refuse(f"{path} is a table", "the experiment has no columns; give a function")
    if path.suffix.lower() not in TABLES or path.suffix == ".parquet":
        raise InputError(f"{path}: no CSV file; for all else give a function, as site.py:load")
    form = site.model_dump(exclude={"source", "label", "columns"}, exclude_none=True)
    file = sniffed(path, (), **form)
    table = _table(site, data, str(path), file.header)
    table = replace(table, first=file.first, what="line", number=file.number)
    used = {table.label, *table.columns.values()}
    texts = [table.columns[name] for name in categories_of(data.model_dump())]
    read = partial(
        read_table, path, [], leave=[n for n in file.header if n not in used], label=table.label,
        wide=True, **form,
    )  # fmt: skip
    try:
        return _fitted(read(names=texts)[0], table, data)
    except SiteError:
        raise
    except InputError:
        # Read once more with all columns as text: the checks then find the line at fault.
        _fitted(read(names=file.header)[0], table, data)
        raise


def _of_function(folder: Path, site: SiteTable, data: Data) -> SiteRows:
    file, _, name = site.source.rpartition(":")
    load = load_python("site.source", f"{folder / file}:{name}")
    given = load.call(lambda made: isinstance(made, tuple | Mapping) or hasattr(made, "columns"))
    where = f"what {site.source} returned"
    if isinstance(given, tuple):
        if data.input is None:
            _refuse(f"{where} is a pair", "the experiment declares columns: a table")
        x, y = given
        return _labelled(_tensor(x, data, where), coded(y), data, _Table(where, {}, ""))
    if data.columns is None:
        _refuse(f"{where} is a table", "the experiment declares input: a pair (x, y)")
    table = _table(site, data, where, [str(one) for one in given])
    texts = {table.columns[one] for one in categories_of(data.model_dump())}
    columns = {
        one: coded(given[one]) if one in texts else column_of(one, given[one], wide=True)
        for one in {table.label, *table.columns.values()}
    }
    return _fitted(Columns(columns), table, data)


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


def _fitted(read: Columns, table: _Table, data: Data) -> SiteRows:
    """The declared columns in the experiment's order and names, checked one by one."""
    declared, texts, made = data.values or {}, categories_of(data.model_dump()), {}
    for name in data.columns or ():
        if table.columns[name] not in read.of:
            _refuse("free text", "more texts than a category has", name)
        column = read.of[table.columns[name]]
        if name in texts:
            column = coded(column)
            _check_texts(name, column, declared.get(name), table)
        elif isinstance(column, Coded):
            column = _numbers(name, column, table)
        missing = column.codes < 0 if isinstance(column, Coded) else np.isnan(column)
        if data.missing == "refuse" and missing.any():
            where = table.at(int(missing.argmax()))
            _refuse(f"{where}: no value", 'the experiment has missing = "refuse"', name)
        made[name] = column
    return _labelled(Columns(made), coded(read.of[table.label]), data, table)


def _numbers(name: str, column: Coded, table: _Table) -> Numbers:
    """A column of texts as numbers; marks such as "?" count as missing."""
    read = reader_of(column.names, table.number)
    values = np.array([*map(read, column.names), np.nan])
    for code, text in enumerate(column.names):
        if not np.isfinite(values[code]) and text.lower() not in MARKS:
            where = table.at(int((column.codes == code).argmax()))
            _refuse(f'{where}: "{shown(text)}"', "the experiment declares numbers", name)
    return np.where(np.isfinite(values), values, np.nan)[column.codes]


def _check_texts(name: str, column: Coded, allowed: Sequence[str] | None, table: _Table) -> None:
    """Refuse categories that are not declared, and more texts than a server should get."""
    if allowed is not None:
        codes = codes_in(column, allowed)
        if (odd := codes == len(allowed)).any():
            row = int(odd.argmax())
            text, names = column.names[column.codes[row]], listed(allowed, 12)
            what = f'{table.at(row)}: "{shown(text)}"'
            _refuse(what, f"the experiment declares {names}.{nearest(text, allowed)}", name)
    elif len(column.names) > MOST_TEXTS or any(len(text) > LONGEST for text in column.names):
        what = f"{len(column.names):,} texts"
        _refuse(what, f"at most {MOST_TEXTS:,}, of {LONGEST} characters each, are categories", name)


def _labelled(inputs: Inputs, labels: Coded, data: Data, table: _Table) -> SiteRows:
    """Each row with its class: by name, or, if no label is a class's name, by number 0..K-1."""
    classes = [*map(text_of, data.classes or ())]
    code = {name: i for i, name in enumerate(classes)}
    numbered = not {*labels.names} & {*classes}
    if numbered:
        code |= {str(i): i for i in range(len(classes))}
    for at, text in enumerate(labels.names):
        rows = labels.codes == at
        if text not in code and rows.any():
            of, names = f'column "{shown(str(data.label or "label"))}"', listed(classes, 12)
            raise SiteError(
                # The site's own label may be sensitive, so the server's message leaves it out.
                f"{of} has a label that is none of the classes: {names}",
                f'{of}: {table.at(int(rows.argmax()))}: "{shown(text)}"; the classes are {names}.'
                f"{nearest(text, classes)}",
            )
    codes = np.array([*(code.get(text, -1) for text in labels.names), -1])[labels.codes]
    return SiteRows(inputs, codes, numbered)


def _refuse(what: str, expected: str, column: str = "") -> NoReturn:
    """Raise a SiteError; the server learns the column and what was expected, and not the value."""
    of = f'column "{shown(column)}"' if column else ""
    # A "Did you mean" would give away the site's value, so it is cut from the server's message.
    public = expected.partition(". Did you mean")[0].rstrip(".")
    raise SiteError(
        f"{of}: {public}" if of else public,
        f"{of}: {what}; {expected}" if of else f"{what}; {expected}",
    )
