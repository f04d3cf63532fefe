"""[data] of an experiment file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import PurePath
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    ValidationError,
    ValidationInfo,
    WrapValidator,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from fedshift.datasets import TABLES, entry
from fedshift.datasets.registry import sized
from fedshift.experiments.config.python_names import NATURAL, SITES, is_python
from fedshift.experiments.config.section import Count, Section
from fedshift.experiments.config.sites import check_declared
from fedshift.tasks.names import ordered

# Keys of data with a source that are arguments of `fedshift.Task`.
OF_TASK = (
    "client", "label", "target", "kind", "classes", "missing", "columns", "drop", "categories",
    "separator", "decimal", "encoding", "header", "index",
)  # fmt: skip
# More keys than OF_TASK that declare data which stay on the clients' machines.
OF_SITES = ("clients", "values", "input")


def _target(given: Any, validated: Callable[[Any], Any]) -> Any:
    """Give one message for all types of data.target, instead of one for each that does not fit."""
    try:
        return validated(given)
    except ValidationError:
        raise PydanticCustomError(
            "target",
            'must be a client\'s name, label shares (a list, or a table by label), "pooled" or '
            '"clients"',
        ) from None


def with_source(data: dict[str, Any]) -> dict[str, Any]:
    """[data] with the source that its name implies: a table of the library, or sites."""
    implied = dict.fromkeys((one.name for one in TABLES), NATURAL) | {SITES: SITES}
    name = data.get("name")
    return {"source": implied[name], **data} if isinstance(name, str) and name in implied else data


class Data(Section):
    """[data]: which data set, and the share of each client's examples kept for validation.

    limit, test  with shift.target = "clients", training and test file are one pool; `limit` of its
                 examples are drawn (all if left out), and each client keeps the share `test` of
                 its examples for testing
    size         pixels a side, for image sets that are decoded to a chosen size (96 if left out)
    augment      "photos" changes training images at random, see `fedshift.datasets.augment`
    source       of your own data: a table, .npz, a folder or FILE.py:NAME. "python": a program gave
                 the data. "natural" (set automatically): the table of the library called `name`.
                 "sites" (also as name): each client has its own data, see
                 `fedshift.experiments.config.sites`
    name         of a data set of the library; with a source, what results call the data
    clients, values, input  with source "sites": the names of the clients, the categories of a
                 column, and the shape of an example

    All other keys (OF_TASK) are those of `fedshift.Task`.
    """

    source: Annotated[str, Field(min_length=1)] | None = None
    name: str = "fashion-mnist-mini"
    size: Count | None = None
    augment: Literal["none", "photos"] = "none"
    validation: Annotated[float, Field(ge=0, lt=1)] = 0.2
    test: Annotated[float, Field(gt=0, lt=1)] = 0.3
    limit: Count | None = None
    client: str | None = None
    label: str | tuple[str, ...] | None = None
    target: Annotated[
        str | int | tuple[float, ...] | dict[str, float] | None, WrapValidator(_target)
    ] = None
    kind: Literal["classification", "regression", "multilabel"] | None = None
    classes: tuple[str | int, ...] | None = None
    missing: Literal["mean", "refuse"] | None = None
    columns: tuple[str, ...] | None = None
    drop: tuple[str, ...] | None = None
    categories: tuple[str, ...] | None = None
    separator: str | None = None
    decimal: str | None = None
    encoding: str | None = None
    header: tuple[str, ...] | None = None
    index: str | None = None
    clients: tuple[str, ...] | None = None
    values: dict[str, tuple[str, ...]] | None = None
    input: tuple[Count, ...] | None = None

    @field_validator("clients")
    @classmethod
    def _in_order(cls, clients: tuple[str, ...] | None) -> tuple[str, ...] | None:
        # In the order in which `fedshift.Task` numbers the clients of a table.
        return None if clients is None else ordered(clients)

    @property
    def at_sites(self) -> bool:
        """Whether the data stay on the clients' machines."""
        return self.source == SITES

    @property
    def task_keys(self) -> dict[str, Any]:
        """The arguments of `fedshift.Task` that the file gives."""
        return {k: v for k in OF_TASK if (v := getattr(self, k)) is not None}

    @model_validator(mode="before")
    @classmethod
    def _called(cls, given: Any) -> Any:
        """Name data of one's own after their source, unless the file gives a name."""
        if not isinstance(given, dict):
            return given
        given = with_source(given)
        if isinstance(given.get("source"), str):
            source = given["source"]
            name = source.rpartition(":")[2] if is_python(source) else PurePath(source).stem
            # The default share for testing is the one of `fedshift.Task`.
            return {"name": name or source, "test": 0.2, **given}
        return given

    @field_validator("name")
    @classmethod
    def _listed(cls, name: str, info: ValidationInfo) -> str:
        return name if info.data.get("source") is not None else entry(name).name

    @model_validator(mode="after")
    def _of_source(self) -> Data:
        given = list(self.task_keys)
        if self.at_sites:
            check_declared(self.model_dump(exclude_none=True))
            return self
        if odd := [key for key in OF_SITES if getattr(self, key) is not None]:
            raise ValueError(f'{odd[0]} declares data of clients; give source = "{SITES}" as well')
        if self.source is None:
            if given:
                raise ValueError(
                    f"{given[0]} is for data of your own; give their source as well, as in "
                    'source = "FILE.csv"'
                )
        elif self.limit is not None:
            raise ValueError("limit is for the sets of `fedshift datasets`; leave it out")
        elif is_python(self.source):
            given += [k for k in ("validation", "test") if getattr(self, k) != 0.2]
            if given:
                raise ValueError(
                    f"{given[0]} is for tables, arrays and folders, and {self.name} gives a whole "
                    "task; leave it out"
                )
        return self

    @model_validator(mode="after")
    def _decoded(self) -> Data:
        if self.size is not None and self.source is None and not entry(self.name).sized:
            names = " and ".join(f'"{name}"' for name in sized())
            raise ValueError(f'size is for {names}, not for "{self.name}"')
        return self
