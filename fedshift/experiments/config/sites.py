"""What an experiment declares of data that stay at its clients: [data] with source = "sites".

The file has names, classes and columns (or the shape of an example), and no row. What it does not
declare, such as means and categories, sites and server find out together before round 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedshift.errors import nearest, shown, visible
from fedshift.tasks.columns import is_id

ALLOWED = {
    "source", "name", "augment", "validation", "test", "clients", "label", "target", "kind",
    "classes", "missing", "columns", "categories", "values", "input",
}  # fmt: skip
# What client and server must agree on: a target is the server's alone.
AGREED = ("clients", "label", "classes", "missing", "columns", "categories", "values", "input")


def check_declared(data: Mapping[str, Any]) -> None:
    """Raise ValueError for a declaration that sites cannot follow, or that lacks something."""
    if odd := [key for key in data if key not in ALLOWED]:
        raise ValueError(
            f'{odd[0]} is for data that lie beside this file; with source = "sites" it belongs '
            "into each client's site.toml, or is left out"
        )
    for key, what in (
        ("clients", 'the names of the sites, as in clients = ["coast", "east"]'),
        ("classes", "the labels, in the order of the network's outputs"),
    ):
        if len(set(data.get(key, ()))) < 2:
            raise ValueError(f"{key} is missing or has less than two entries: {what}")
        if len(set(map(str, data[key]))) < len(data[key]):
            raise ValueError(f"{key} names one of its entries twice")
    for key in ("clients", "label"):
        # They are written into the files of sites, whose lines they must not end.
        names = [data[key]] if isinstance(data.get(key), str) else data.get(key, ())
        if odd := [name for name in map(str, names) if name != visible(name)]:
            raise ValueError(f'{key}: "{shown(odd[0])}" has a control character; leave it out')
    if data.get("kind", "classification") != "classification":
        raise ValueError(f'kind = "{data["kind"]}": sites train classifiers; simulate other kinds')
    if data.get("target") in data["clients"]:
        raise ValueError(
            f'target = "{data["target"]}" trains, too; give label shares, "pooled", "clients", or '
            "a table of labelled examples that the server has"
        )
    if ("columns" in data) == ("input" in data):
        raise ValueError(
            "give columns, the columns that a table's network learns from, or input, the shape of "
            "an example, as in input = [3, 32, 32]"
        )
    _check_columns(data)


def _check_columns(data: Mapping[str, Any]) -> None:
    columns = data.get("columns", ())
    if len(set(columns)) < len(columns) or data.get("columns") == ():
        raise ValueError("columns is empty, or names a column twice")
    if columns and not isinstance(data.get("label"), str):
        raise ValueError("label is missing: the column that is to be predicted")
    if data.get("label") in columns:
        raise ValueError(f'label = "{data["label"]}" is also one of columns')
    for key in ("categories", "values"):
        for name in data.get(key, ()):
            if name not in columns:
                raise ValueError(
                    f'{key}: "{shown(name)}" is none of columns.{nearest(name, columns)}'
                )
    for name, texts in (data.get("values") or {}).items():
        if not texts:
            raise ValueError(
                f'values: "{shown(name)}" has an empty list; give its texts, or name the column in '
                "categories, and the sites' own are taken"
            )
        if len({*texts}) < len(texts):
            raise ValueError(f'values: "{shown(name)}" names one of its texts twice')
    if ids := [name for name in columns if is_id(name)]:
        raise ValueError(
            f'columns: "{shown(ids[0])}" is called as numbers of rows are, from which nothing can '
            "be learned; leave it out, or rename it"
        )


def categories_of(data: Mapping[str, Any]) -> tuple[str, ...]:
    """The columns that are categories."""
    named = {*(data.get("categories") or ()), *(data.get("values") or ())}
    return tuple(name for name in data.get("columns") or () if name in named)
