"""Reading tables column by column; CSV in pieces, so that memory never has a wide copy of it."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedshift.arguments import called
from fedshift.errors import DataError, InputError, shown
from fedshift.tasks.cells import EXACT, about_words, check_lengths, exact_names
from fedshift.tasks.making import Rows
from fedshift.tasks.names import Coded, Mask, as_number, coded, named, ordered, whole_names
from fedshift.tasks.rows import (
    Columns,
    Numbers,
    check_column,
    column_of,
    inputs_of,
    single,
    take_columns,
)
from fedshift.tasks.sniffing import Format, sniffed
from fedshift.tasks.values import MARKS, about_kind, in_seconds, is_truth, reader_of, seconds

# Rows in a piece, and the most different texts of a column before it counts as free text.
PIECE, TEXTS = 1 << 16, 20_000
FILES = (".csv", ".tsv", ".txt", ".gz", ".parquet")


def rows_of(
    table: Columns,
    client: str,
    label: str | Sequence[str],
    columns: Sequence[str] | None = None,
    drop: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> Rows:
    """Examples, labels and clients of a table; label: a column, or several columns of 0 and 1.

    Raises InputError, with the nearest name, for a column that does not exist.
    """
    labels = [label] if isinstance(label, str) else list(label)
    check_uses(client, labels, columns, drop)
    for name in (client, *labels):
        check_column(name, list(table.of))
    if client in labels:
        raise InputError(f'client and label are both "{shown(client)}"; give two columns')
    if len(labels) == 1:
        label = labels[0]
    rest = Columns({n: v for n, v in table.of.items() if n not in (client, *labels)})
    y = [table.of[name] for name in labels]
    x = take_columns(rest, columns, drop)
    if isinstance(label, str):
        return Rows(x, y[0], table.of[client], tuple(notes))
    return Rows(x, _stacked(y), table.of[client], tuple(notes), tuple(labels))


def names_in(given: Sequence[str] | None) -> Sequence[str] | None:
    """The names of columns that a user gives; a text is one name, and not its letters."""
    return [given] if isinstance(given, str) else given


def check_uses(
    client: str, labels: Sequence[str], columns: Sequence[str] | None, drop: Sequence[str]
) -> None:
    """Raise InputError for a column of two uses: client or label, and to learn from or to drop."""
    roles = {client: "client"} | dict.fromkeys(labels, "label")
    for option, names in (("columns", columns or ()), ("drop", drop)):
        for name in names:
            if name in roles:
                raise InputError(
                    f'{option} names "{shown(name)}", which is the {roles[name]}: it is read, and '
                    f"never learned from. Leave it out of {option}"
                )
            if option == "drop" and name in (columns or ()):
                raise InputError(f'columns and drop both name "{shown(name)}"; leave it out of one')


def check_other_file(path: str | os.PathLike[str], target: Any) -> None:
    """Raise InputError if the target is the table itself, whose rows train."""
    same = False
    if isinstance(target, str | os.PathLike):
        with contextlib.suppress(OSError, ValueError):
            same = os.path.samefile(path, target)
    if same:
        raise InputError(
            f'target="{shown(str(target))}" is the table itself, whose rows train; give "pooled" '
            "to test on rows of all clients that are set apart"
        )


def of_frame(
    frame: Any, names: Sequence[str], aside: tuple[str, Any] | None = None
) -> tuple[Columns, list[str]]:
    """(the columns of a DataFrame or a dict of columns, notes); numbers as text become numbers.

    names: columns that are categories or names, as are those of pandas' type "category". In these
    True and False are names, in others 1 and 0. aside: as in `read_table`.
    """
    if hasattr(frame, "to_pandas"):
        frame = frame.to_pandas()
    _check_frame(frame, names)
    given = {str(name): frame[name] for name in frame}
    mask = named(given[aside[0]], aside[1]) if aside and aside[0] in given else None
    table = inputs_of(frame, mask)
    if not isinstance(table, Columns):
        raise InputError("frame holds no named columns; give a DataFrame, or use from_arrays")
    notes: list[str] = []
    made: dict[str, Numbers | Coded] = {}
    for name, column in table.of.items():
        if name in names:
            column = coded(given[name]) if _is_name(given[name]) else column
        elif not isinstance(column, Coded):
            notes += about_kind(name, given[name])
        elif str(getattr(given[name], "dtype", "")) != "category":
            notes += about_kind(name, given[name])
            column = _numbers_in(name, column, notes, mask)
        made[name] = column
    return Columns(made), notes


def _is_name(values: Any) -> bool:
    """Whether a column of names is no column of numbers: booleans, and long whole numbers."""
    import pandas as pd

    whole = getattr(getattr(values, "dtype", None), "kind", "O") in "iu"
    long = whole and bool(pd.Series(values).dropna().abs().ge(EXACT).any())
    return long or is_truth(values)


def _check_frame(frame: Any, names: Sequence[str]) -> None:
    """Raise InputError for an object without columns, and for double or multi-level names."""
    if not isinstance(frame, Mapping) and not hasattr(frame, "columns"):
        raise InputError(f"frame is {called(frame)}; give a DataFrame, or use from_arrays")
    if getattr(getattr(frame, "columns", None), "nlevels", 1) > 1:
        raise InputError(
            "the table's columns have names of several levels; give each one name, as by "
            'frame.columns = ["_".join(name) for name in frame.columns]'
        )
    columns, index = single([*frame]), getattr(getattr(frame, "index", None), "names", ())
    for name in names:
        if name not in map(str, columns) and name in index:
            raise InputError(f'"{shown(name)}" is the table\'s index; give frame.reset_index()')


def labelled(
    target: Any, label: str | Sequence[str], names: Sequence[str] = (), read: Any = None
) -> Any:
    """A target that is a table, or the name of its file, as a pair (x, y); others unchanged.

    names: as in `of_frame`, in addition to a single label.
    """
    if isinstance(target, str | os.PathLike) and str(target).lower().endswith(FILES):
        target = read(Path(target)) if read else read_table(Path(target), [], label=label)[0]
    elif hasattr(target, "iloc") and getattr(target, "ndim", 1) == 2:
        target = of_frame(target, [*names, *([label] if isinstance(label, str) else [])])[0]
    if not isinstance(target, Columns):
        return target
    labels = [label] if isinstance(label, str) else list(label)
    for name in labels:
        check_column(name, list(target.of), "the target's table has")
    y = [target.of[name] for name in labels]
    return target, y[0] if isinstance(label, str) else _stacked(y)


def _stacked(columns: Sequence[Numbers | Coded]) -> Any:
    if odd := [c for c in columns if isinstance(c, Coded)]:
        raise InputError(f'a label column holds "{shown(odd[0].names[0])}"; give 0 or 1 in each')
    return np.stack([np.asarray(c) for c in columns], axis=1)


def read_table(
    path: Path,
    wanted: Sequence[str],
    *,
    leave: Sequence[str] = (),
    names: Sequence[str] = (),
    label: str | Sequence[str] = "",
    aside: tuple[str, Any] | None = None,
    wide: bool = False,
    **given: Any,
) -> tuple[Columns, list[str]]:
    """(the columns of a CSV or Parquet file, notes for the user).

    wanted  columns that must exist
    leave   columns to skip
    names   columns that are categories or names, however many different ones they have
    label   of a single column, in which texts such as "True" are names of classes
    aside   (the column of clients, the client that is the target): its rows must not influence how
            columns are read
    wide    numbers of a CSV file stay float64, for callers that decide on precision later

    Raises DataError for a file that is no such table.
    """
    if path.suffix == ".parquet":
        classes = [label] if isinstance(label, str) else []
        table, notes = of_frame(read_parquet(path), [*names, *classes], aside)
        return Columns({n: v for n, v in table.of.items() if n not in leave}), notes
    form = sniffed(path, wanted, **given)
    use = [name for name in form.header if name not in leave]
    form, pieces = _read(path, form, use, names, aside, wide)
    notes, mask = form.notes, None
    if aside is not None and aside[0] in use:
        mask = named(_merged(pieces[aside[0]] or []), aside[1])
    asked = [aside[0] if aside else "", *([label] if isinstance(label, str) else label)]
    made: dict[str, Numbers | Coded] = {}
    for name in use:
        parts = pieces.pop(name)
        if parts is None:
            notes.append(
                f'Column "{shown(name)}" holds more than {TEXTS:,} different texts, as free text '
                "or names do; it was left out."
            )
            continue
        column = _merged(parts)
        if name in asked:
            notes += about_words(path, form, name, column)
        if isinstance(column, Coded) and name not in names:
            column = _numbers_in(name, column, notes, mask, form.number, name == label, wide)
        made[name] = exact_names(path, form, name, column) if name in asked else column
    return Columns(made), notes


def read_parquet(path: Path) -> Any:
    """A Parquet file as a DataFrame. Raises InputError if pyarrow is not installed."""
    import pandas as pd

    try:
        return pd.read_parquet(path)
    except ImportError:
        raise InputError(
            f'{path}: Parquet is read by pyarrow; run `pip install "fedshift[parquet]"`'
        ) from None
    except (OSError, ValueError) as e:
        raise DataError(f"cannot read {path}: {shown(str(e), 200)}") from None


def _read(
    path: Path,
    form: Format,
    use: Sequence[str],
    names: Sequence[str],
    aside: tuple[str, Any] | None,
    wide: bool,
) -> tuple[Format, dict[str, list[Numbers | Coded] | None]]:
    """(the format, corrected if needed; the pieces of each column, or None for free text)."""
    import pandas as pd

    typed, last = True, form.header[-1]
    # Two things may turn out wrong further down, each once: the encoding, and columns of numbers.
    for _ in range(3):
        try:
            texts = aside[0] if aside else None
            given = _pieces(path, form, names, typed, texts)
            pieces = _collected(given, use, names, aside, wide)
            if last not in use or _lacks_values(pieces[last]):
                check_lengths(path, form, _count(pieces))
            return form, pieces
        except UnicodeDecodeError:
            form = replace(form, encoding="cp1252")  # only the first lines were valid UTF-8
        except (pd.errors.ParserError, pd.errors.EmptyDataError) as e:
            reason = " ".join(str(e).split()).removeprefix("Error tokenizing data. C error: ")
            raise DataError(f"{path}: {shown(reason, 200)}; look at that line") from None
        except InputError:  # before ValueError, of which it is a subclass
            raise
        except ValueError:
            typed = False  # a column that began with numbers has text further down
    raise DataError(f'{path} cannot be read as a table; give its encoding="..."')


def _pieces(
    path: Path, form: Format, names: Sequence[str], typed: bool, texts: str | None
) -> Iterator[Any]:
    """DataFrames of PIECE rows; typed: read columns in the types that the first rows suggest.

    texts: a column that is read as it is written. pandas makes numbers of categories that look like
    such, so that "01" would be "1".
    """
    import pandas as pd

    # No "usecols": with it, pandas silently cuts lines that have too many cells.
    options = form.options
    # Names are read as text: as floats, different numbers of 17 digits would be the same.
    kinds: dict[str, Any] = {name: "category" for name in names if name in form.header}
    kinds |= {name: str for name in form.header if name == texts}
    if typed:
        sample = pd.read_csv(path, nrows=1000, **options)
        numeric = {name for name in sample if sample[name].dtype.kind in "iuf"}
        kinds = {n: np.float64 if n in numeric else "category" for n in sample} | kinds
    with pd.read_csv(path, chunksize=PIECE, dtype=kinds, **options) as pieces:
        yield from pieces


def _collected(
    pieces: Iterator[Any],
    use: Sequence[str],
    names: Sequence[str],
    aside: tuple[str, Any] | None,
    wide: bool,
) -> dict[str, list[Numbers | Coded] | None]:
    parts: dict[str, list[Numbers | Coded] | None] = {name: [] for name in use}
    texts: dict[str, set[str]] = {name: set() for name in use}
    for piece in pieces:
        clients = whole_names(coded(piece[aside[0]])) if aside and aside[0] in use else None
        mask = named(clients, aside[1]) if aside and clients else None
        for name, before in parts.items():
            if before is None:
                continue
            values = piece[name]
            if values.dtype.kind in "iuf":
                before.append(column_of(name, values, mask, wide=wide))
                continue
            part = clients if clients and aside and name == aside[0] else coded(values)
            # A large file has one code for each cell: with 32 bits they take half the memory.
            before.append(Coded(part.codes.astype(np.int32), part.names))
            texts[name].update(_names_at(part, mask))
            if len(texts[name]) > TEXTS and name not in names:
                parts[name] = None
    return parts


def _count(pieces: Mapping[str, list[Numbers | Coded] | None]) -> int:
    """The number of rows."""
    kept = next((parts for parts in pieces.values() if parts is not None), [])
    return sum(len(part.codes if isinstance(part, Coded) else part) for part in kept)


def _lacks_values(parts: list[Numbers | Coded] | None) -> bool:
    """Whether a column misses a value, or is free text, which was not kept."""
    if parts is None:
        return True
    return any(bool((p.codes < 0 if isinstance(p, Coded) else np.isnan(p)).any()) for p in parts)


def _names_at(part: Coded, mask: Mask | None) -> Sequence[str]:
    """The names that occur outside the mask."""
    if mask is None:
        return part.names
    counts = part.counts(np.flatnonzero(~mask))
    return [name for name, count in zip(part.names, counts, strict=True) if count]


def _merged(parts: list[Numbers | Coded]) -> Numbers | Coded:
    """A column from its pieces; if any piece has names, all numbers become names."""
    if not any(isinstance(part, Coded) for part in parts):
        return np.concatenate([np.asarray(part) for part in parts])
    each = [coded(part) for part in parts]
    names = ordered({text for part in each for text in part.names})
    place = {text: i for i, text in enumerate(names)}
    codes = [
        np.array([*(place[t] for t in part.names), -1], dtype=np.int32)[part.codes] for part in each
    ]
    return Coded(np.concatenate(codes), names)


def _numbers_in(
    name: str, column: Coded, notes: list[str], mask: Mask | None,
    number: Callable[[str], float] = as_number, classes: bool = False, wide: bool = False,
) -> Numbers | Coded:  # fmt: skip
    """A column of texts as numbers, if most of its entries are numbers.

    Other entries must be marks of missing values, or InputError is raised. A column that has only
    true and false, or only durations, becomes numbers, too, unless these are classes.
    """
    judged = column.counts(None if mask is None else np.flatnonzero(~mask))
    used = [text for text, count in zip(column.names, judged, strict=True) if count]
    read = number if classes else reader_of(used, number)
    numbers = np.array([*map(read, column.names), math.nan])
    is_number = np.isfinite(numbers[:-1])
    if 2 * judged[is_number].sum() <= judged.sum():
        return column
    odd = [text for text, ok in zip(column.names, is_number, strict=True) if not ok]
    if others := [text for text in odd if text.lower() not in MARKS]:
        words = {"truth": "True or False", "seconds": "durations"}
        what = words.get(read.__name__, "numbers")
        raise InputError(
            f'column "{shown(name)}" holds {what} and "{shown(others[0])}"; empty that cell, or '
            f'give categories=["{shown(name)}"] or drop=["{shown(name)}"]'
        )
    if read is seconds:
        notes.append(in_seconds(name))
    if odd:
        count = int(column.counts()[~is_number].sum())
        marks = " and ".join(f'"{shown(text)}"' for text in odd)
        notes.append(f'Column "{shown(name)}": {marks} stands for a missing number, {count} times.')
    return column_of(name, numbers[column.codes], mask, wide=wide)
