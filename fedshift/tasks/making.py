"""Making a task of examples, labels, clients and target as users give them, with checks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypedDict, get_type_hints

import numpy as np
import torch
from torch import Tensor

from fedshift.arguments import called
from fedshift.data import first_not_finite
from fedshift.errors import InputError, nearest, shown, unknown
from fedshift.tasks.columns import Rules
from fedshift.tasks.names import (
    Coded,
    Mask,
    about_spelling,
    as_number,
    coded,
    listed,
    many,
    named,
    ordered,
    plain,
    reordered,
    with_classes,
)
from fedshift.tasks.rows import Columns, Inputs, inputs_of
from fedshift.tasks.target import Target, is_test_set, target_of
from fedshift.tasks.tensors import Tensors
from fedshift.tasks.values import plain_column, reader_of

# With several labels per row, the SETS most frequent sets are classes of the label table, and all
# others are one more class.
SETS = 20
OTHERS = "other sets"


class Options(TypedDict, total=False):
    """Options of every way to make a task.

    classes     the labels in the order of the network's outputs, by default ordered by number or
                alphabet; if labels are whole numbers 0..K-1, also the names of all K
    validation  the share of each client's rows, by label, that is held out for validation
    test        the share that is held out for testing, unless the target is a client or a test set
    seed        of the cut
    kind        "classification", "regression" (y is numbers) or "multilabel" (y [n, L] of 0 and 1)
    bins        in regression, the number of classes of the label table, between quantiles
    missing     "mean", or "refuse" to raise InputError for missing values
    categories  columns of numbers that stand for categories
    transform   (x, torch.Generator) -> x, a random change of training examples at each reading
    name        of the data, in reports
    """

    classes: Sequence[Any] | None
    validation: float
    test: float
    seed: int
    kind: str
    bins: int
    missing: str
    categories: Sequence[str]
    transform: Callable[[Any, torch.Generator], Any] | None
    name: str


class Rows(NamedTuple):
    """Examples, labels and the client of each row, as users give them.

    notes: sentences from reading the data. labels: names of the columns of y, if it has several.
    """

    x: Any
    y: Any
    client: Any
    notes: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()


def task_fields(rows: Rows, target: Any, options: Options) -> dict[str, Any]:
    """The fields of `fedshift.tasks.task.Task`.

    Raises InputError for lengths that differ, an invalid target, and unknown options.
    """
    if odd := [name for name in options if name not in get_type_hints(Options)]:
        raise unknown("option of a task", odd[0], get_type_hints(Options))
    fields: dict[str, Any] = {"kind": "classification", "seed": 0, "name": "yours", **options}
    _check_kind(fields["kind"], target, options)
    classes, missing = fields.pop("classes", None), fields.pop("missing", "mean")
    categories = fields.pop("categories", ())
    inputs, outside = inputs_of(rows.x, _aside(rows, target)), 0
    check_rules(inputs, missing, categories)
    y, notes = rows.y, [*rows.notes]
    if is_test_set(target):
        x_test, y_test = _pair(target)
        inputs, outside = _with_test_set(inputs, inputs_of(x_test), y_test)
        y = _joined(y, y_test)
    places = _places(rows.client, len(inputs), outside)
    classes = rows.labels if rows.labels and classes is None else classes
    labels, values, outputs = labels_of(y, fields["kind"], classes, len(inputs), outside)
    goal = Target("test set") if outside else target_of(target, places.names, labels.names)
    if outside:
        _check_test_labels(labels, len(inputs) - outside, fields["kind"])
    clients, empty = clients_with_labels(places, labels, goal)
    _check_finite(inputs, places)
    notes += _about_rows(places, labels, outside, empty)
    return fields | {
        "clients": clients,
        "target": goal,
        "inputs": inputs,
        "labels": labels,
        "places": places,
        "values": values,
        "outputs": outputs,
        "outside": outside,
        "rules": Rules(tuple(categories), missing),
        "notes": tuple(notes),
    }


def _check_kind(kind: str, target: Any, options: Options) -> None:
    """Raise InputError for options and targets that have no meaning for this kind of task."""
    shares = hasattr(target, "__len__") and not isinstance(target, str)
    if kind == "regression" and shares and not is_test_set(target):
        raise InputError(
            'target: label shares have no meaning where y is numbers; give a client, "pooled", '
            '"clients" or a test set'
        )
    if kind == "regression" and options.get("classes") is not None:
        raise InputError("classes name labels, and y is numbers; give bins=10 for as many bins")
    if kind != "regression" and "bins" in options:
        raise InputError(f'bins are of numbers to predict, and this task is "{kind}"; leave it out')


def _places(client: Any, n: int, outside: int) -> Coded:
    """The client of each of n rows; the last `outside` rows, a test set's, have none."""
    places = coded(_per_row("client", client, n - outside), "client")
    if not places.names:
        what = "is empty in every row" if n else "has no rows, and neither has x"
        raise InputError(f"client {what}; nothing is left to train on")
    if not outside:
        return places
    return Coded(np.concatenate([places.codes, np.full(outside, -1)]), places.names)


def labels_of(
    y: Any, kind: str, classes: Sequence[Any] | None, n: int, outside: int
) -> tuple[Coded, Tensor | None, tuple[str, ...]]:
    """(labels [n], the truth [n, L] if it is not classes, else None; names of the L outputs)."""
    if kind == "regression":
        values = _floats(_per_row("y", y, n))[:, None]
        # A single class for now: the bins follow from training rows, once these are chosen.
        codes = np.where(torch.isfinite(values[:, 0]).numpy(), 0, -1)
        return Coded(codes, ("any",)), values, ("value",)
    if kind == "multilabel":
        return _sets(_matrix(y, n), classes, n - outside)
    labels = coded(_per_row("y", y, n), "y")
    if classes is not None:
        labels = with_classes(labels, classes)
    many = len(labels.names)
    # So many different labels are no classes: the column has numbers to predict, or names.
    if many > 100 and 2 * many > n:
        text = any(map(math.isnan, map(as_number, labels.names)))
        what, cure = "values", 'for numbers to predict give kind="regression"'
        if text:
            what, cure = "texts", "as names or free text have; give a column of few values"
        raise InputError(f"y has {many:,} different {what} in {n:,} rows; {cure}")
    if many < 2:
        raise InputError(
            f"y has {many} class{'' if many == 1 else 'es'} ({listed(labels.names)}); at least 2 "
            "are needed"
        )
    return labels, None, ()


def check_rules(inputs: Inputs, missing: str, categories: Sequence[str]) -> None:
    """Raise InputError for an unknown way with missing values, and for unknown columns."""
    if missing not in ("mean", "refuse"):
        raise unknown("way with missing values", missing, ("mean", "refuse"))
    if isinstance(categories, str):
        raise InputError(f'categories="{shown(categories)}": give a list of columns')
    names = list(inputs.of) if isinstance(inputs, Columns) else []
    for name in categories:
        if name not in names:
            raise InputError(
                f'categories: there is no column "{shown(str(name))}".{nearest(str(name), names)}'
            )


def _aside(rows: Rows, target: Any) -> Mask | None:
    """Which rows are of the client that is the target, in a table that is still to be read."""
    read = isinstance(rows.x, Columns | Tensors) or isinstance(rows.client, str)
    return None if read or not hasattr(rows.client, "__len__") else named(rows.client, target)


def clients_with_labels(
    places: Coded, labels: Coded, goal: Target
) -> tuple[tuple[str, ...], list[str]]:
    """(clients that train, clients that are left out because they have no labelled row).

    Raises InputError if nothing is left to train or to test on.
    """
    counts = places.counts(np.flatnonzero(labels.codes >= 0))
    empty = [name for name, count in zip(places.names, counts, strict=True) if not count]
    if goal.name in empty:
        raise InputError(
            f'the target "{shown(goal.name)}" has no row with a label to test on; to estimate its '
            "accuracy, give label shares or counts (a dict by name, or one number per class)"
        )
    left_out = {*empty, goal.name}
    clients = tuple(c for c in places.names if c not in left_out)
    if not clients:
        raise InputError(
            "no client has a row with a label; nothing is left to train on. Look at client= and y"
        )
    return clients, empty


def _check_finite(inputs: Inputs, places: Coded) -> None:
    """Raise InputError for a tensor with NaN or infinity; it names the row and its client."""
    for name, v in inputs.of.items() if isinstance(inputs, Tensors) else ():
        row = first_not_finite(v)
        if row is not None:
            client = places.codes[row]
            whose = f' (client "{shown(places.names[client])}")' if client >= 0 else ""
            raise InputError(
                f"{shown(name)} holds NaN or infinity in row {row}{whose}; fill it in, leave the "
                "row out, or give a table (from_frame), where values may be missing"
            )


def _pair(target: Any) -> tuple[Any, Any]:
    """(x, y) of a test set. Raises InputError for a table, since nothing says what its label is."""
    if isinstance(target, tuple):
        return target
    if hasattr(target, "iloc"):
        raise InputError("target is a table without a word on its label; give the pair (x, y)")
    return target.x, target.y


def _with_test_set(inputs: Inputs, test: Inputs, y: Any) -> tuple[Inputs, int]:
    """(the clients' examples with the target's behind them, how many the target has)."""
    if type(inputs) is not type(test):
        raise InputError("the target's examples and the clients' must both be tables, or arrays")
    labels = len(y.codes if isinstance(y, Coded) else y)
    if len(test) != labels or not labels:
        raise InputError(f"the target has {len(test)} examples and {labels} labels; give as many")
    return inputs.joined(test), labels  # type: ignore[arg-type]


def _check_test_labels(labels: Coded, n: int, kind: str) -> None:
    """Raise InputError if the test set, behind n rows of clients, has no label that these have."""
    counts = [labels.counts(rows) for rows in np.split(np.arange(len(labels.codes)), [n])]
    mine, others = ([a for a, k in zip(labels.names, c, strict=True) if k] for c in counts)
    if not others:
        raise InputError(
            "target: its rows have no label to test on; to estimate the accuracy there, give label "
            "shares or counts (a dict by name, or one number per class)"
        )
    if kind == "classification" and mine and not {*mine} & {*others}:
        raise InputError(
            f"target: its labels ({listed(others)}) are none of the clients' ({listed(mine)}); "
            "write them alike"
        )


def _per_row(name: str, values: Any, n: int) -> Any:
    """The values as [n]. Raises InputError for another shape."""
    if isinstance(values, Coded):
        return values
    values = plain(values)
    if values is None or isinstance(values, str) or not hasattr(values, "__len__"):
        raise InputError(f"{name} is {called(values)}; give one entry for each of the {n} rows")
    shape: tuple[int, ...] = tuple(getattr(values, "shape", (len(values),)))
    if shape[1:] == (1,):
        values = np.asarray(values).reshape(-1)
    elif len(shape) != 1:
        more = '; for several labels per row give kind="multilabel"' if name == "y" else ""
        raise InputError(f"{name} has shape {shape}; give one entry per row{more}")
    if len(values) != n:
        raise InputError(f"{len(values)} entries of {name} for {n} rows; give as many")
    return values


def _floats(values: Any) -> Tensor:
    import pandas as pd

    if isinstance(values, Coded):
        numbers = [*map(reader_of(values.names), values.names)]
        if odd := [n for n, v in zip(values.names, numbers, strict=True) if np.isnan(v)]:
            raise InputError(_no_number(f'"{shown(odd[0])}"'))
        values = np.array([*numbers, np.nan])[values.codes]
    column = plain_column("y", values)
    if getattr(column.dtype, "kind", "") == "M":
        raise InputError(_no_number("dates"))
    try:
        numbers = pd.to_numeric(pd.Series(column)).to_numpy(np.float32, na_value=np.nan)
    except (ValueError, TypeError) as e:
        raise InputError(_no_number(shown(str(e), 80))) from None
    if np.isinf(numbers).any():
        raise InputError("y holds infinity; leave such rows out")
    return torch.from_numpy(numbers.copy())  # pandas' memory may be read-only


def _no_number(what: str) -> str:
    return f"y holds what is no number ({what}), and regression predicts numbers"


def _matrix(y: Any, n: int) -> Tensor:
    if isinstance(y, Coded):
        raise InputError(
            f'kind="multilabel" and one label column, of {many(len(y.names), "class")} '
            f"({listed(y.names)}); give label= a list of columns of 0 and 1, or leave kind out"
        )
    try:
        made = torch.as_tensor(np.asarray(plain(y), dtype=np.float32))
    except (TypeError, ValueError):
        raise InputError(
            f"y is {called(y)} that holds text; several labels per row are [{n}, L] of 0 and 1"
        ) from None
    if made.ndim != 2 or len(made) != n or made.shape[1] < 2:
        raise InputError(
            f"y has shape {tuple(made.shape)}; several labels per row are [{n}, L] of 0 and 1"
        )
    odd = made[~((made == 0) | (made == 1) | made.isnan())]
    if len(odd):
        raise InputError(f"y holds {odd[0].item():g}; several labels per row are 0 or 1 each")
    return made


def _sets(
    y: Tensor, classes: Sequence[Any] | None, n: int
) -> tuple[Coded, Tensor, tuple[str, ...]]:
    """(each row's set of labels as a class, y, names of the labels).

    Only the sets that are most frequent at the clients are classes of their own.
    """
    outputs = tuple(map(str, classes)) if classes else tuple(map(str, range(y.shape[1])))
    if len(outputs) != y.shape[1]:
        raise InputError(f"{len(outputs)} classes for the {y.shape[1]} columns of y; give as many")
    whole = ~y.isnan().any(1).numpy()
    texts = np.array([_set_name(outputs, row) for row in y.tolist()], dtype=object)
    often = [text for text, _ in Counter(texts[:n][whole[:n]].tolist()).most_common(SETS)]
    frequent = set(often)
    texts[[text not in frequent for text in texts]] = OTHERS
    texts[~whole] = None  # with a label missing, the set is unknown: the row counts as unlabelled
    return coded(texts), y, outputs


def _set_name(outputs: Sequence[str], row: Sequence[float]) -> str:
    return "+".join(o for o, v in zip(outputs, row, strict=True) if v) or "none"


def _joined(y: Any, other: Any) -> Any:
    """The labels of the clients' rows with those of the test set behind them."""
    if isinstance(y, Coded) or isinstance(other, Coded):
        one, two = coded(y), coded(other)
        names = ordered({*one.names, *two.names})
        return Coded(
            np.concatenate([reordered(c, names, "label").codes for c in (one, two)]), names
        )
    return np.concatenate([np.asarray(plain(y)), np.asarray(plain(other))])


def _about_rows(places: Coded, labels: Coded, outside: int, empty: list[str]) -> list[str]:
    n = len(places.codes) - outside
    notes = [
        *about_spelling("Clients", places.names),
        *about_spelling("Labels", labels.used),
    ]
    without = (labels.codes[:n] < 0) & (places.codes[:n] >= 0)
    if without.any():
        counts = Coded(places.codes[:n][without], places.names).counts()
        each = [f"{c}: {k:,}" for c, k in zip(places.names, counts, strict=True) if k]
        left_out = many(int(without.sum()), "row")
        notes.append(f"Left out without a label: {left_out} ({listed(each)}).")
    if count := int((labels.codes[n:] < 0).sum()):
        notes.append(f"Left out of the test set, without a label: {many(count, 'row')}.")
    if count := int((places.codes[:n] < 0).sum()):
        notes.append(f"Left out because they name no client: {many(count, 'row')}.")
    if empty:
        notes.append(f"Clients without a labelled row were left out: {listed(empty)}.")
    return notes
