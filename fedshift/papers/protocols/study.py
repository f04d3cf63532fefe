"""A printed table or figure as data: what is compared with what, where, and what was printed."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from typing import Any, Literal

from fedshift import recipes
from fedshift.datasets import known
from fedshift.datasets.images import check_not_enlarged
from fedshift.errors import DataError, InputError, unknown
from fedshift.report.intervals import Bounds, bounds_of

Options = Mapping[str, Any]
Plot = Literal[
    "bars", "rows", "sweep", "panels", "values", "projection", "curves", "routing", "lines",
    "absent",
]  # fmt: skip
Interval = Literal["t", "bootstrap"]
# Of a printed cell: column title, split, row label.
Place = tuple[str, str, str]


@dataclass(frozen=True)
class Printed:
    """A cell of the paper, in the paper's unit; sd is None where none is printed."""

    mean: float
    sd: float | None


def printed_rows(name: str) -> list[dict[str, str]]:
    """The rows of NAME.csv as they are."""
    path = files("fedshift.papers.protocols") / f"{name}.csv"
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def printed(name: str, place: Callable[[Mapping[str, str]], Place]) -> dict[Place, Printed]:
    """The cells of NAME.csv; `place` says where a row belongs: (column title, split, row label).

    A cell's mean is under "mean" or "value", its deviation under "std" where there is one.
    """
    cells = {}
    for row in printed_rows(name):
        sd = row.get("std")
        cells[place(row)] = Printed(
            float(row.get("mean") or row["value"]), float(sd) if sd else None
        )
    return cells


@dataclass(frozen=True)
class Metric:
    """What a cell holds: `scale` times the key of a run's summary, with so many digits.

    `stop` says which rounds count: "best" is the one of lowest loss on validation examples that
    follow the target, "final" the last, "last" the mean over the `last` last rounds.
    span, of: in place of one round's value the mean, or the least, of the last `span` rounds.
    """

    name: str = "accuracy, %"
    key: str = "target_accuracy"
    scale: float = 100.0
    digits: int = 1
    stop: Literal["best", "final", "last"] = "best"
    last: int = 0
    span: int = 0
    of: Literal["mean", "least"] = "mean"

    @property
    def within(self) -> Bounds:
        """Where a cell can lie."""
        return bounds_of(self.key, scale=self.scale)


@dataclass(frozen=True)
class Row:
    """A method of the table: a recipe and its options.

    key     what --methods takes; rows may share one (FedPALS at four lambdas)
    grid    hyper-parameters that --tune chooses, each with its values
    ess     ESS fractions to try for every seed (0 is lambda = 0), the best on validation counts
    scaled  options that count rounds: a shortened run shortens them alike
    reads   the summary's key in place of the table's, where rows differ in what they show
    shows   what a row shows in place of the table's metric, where its unit is another, too
    against the row that this one is compared with, where it is not the table's baseline; "-" none
    before  options that count rounds before training begins, which are none of the column's
    picked_by  the summary's key by which the best of several ESS fractions, or of a grid, is chosen
    tuned_as   the row whose tuned values this one takes, since both read the same runs
    grid_tables  tables of the experiment file on top of the column's where a grid is trained
    """

    label: str
    key: str
    method: str
    options: Options = field(default_factory=dict)
    grid: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    ess: tuple[float, ...] = ()
    scaled: tuple[str, ...] = ()
    reads: str = ""
    shows: Metric | None = None
    against: str = ""
    before: tuple[str, ...] = ()
    picked_by: str = "validation_accuracy"
    tuned_as: str = ""
    grid_tables: Mapping[str, Options] = field(default_factory=dict)

    def rounds_before(self, options: Options) -> int:
        """Rounds of a run with these options in which nothing is trained yet."""
        return sum(int(options[name]) for name in self.before)

    @property
    def available(self) -> bool:
        """Whether this version has the recipe."""
        return self.method in recipes.__all__


@dataclass(frozen=True)
class Column:
    """A data set under one split, and the experiment file's tables that make it.

    split   "name=value"; its value is where the column stands in a sweep
    seeds   how many the paper has
    extra   not in the paper: only used where --dataset names it
    differs in what the column departs from the paper as it stands, in a few words
    chosen  what the paper leaves open for this column, and what we took
    by_method  row key -> tables on top of `settings` for that method here, such as its learning
               rate; "method" holds options
    """

    dataset: str
    title: str
    split: str
    settings: Mapping[str, Options]
    rounds: int
    seeds: int = 8
    extra: bool = False
    differs: str = ""
    chosen: tuple[str, ...] = ()
    by_method: Mapping[str, Mapping[str, Options]] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """The name that tuned values and results use: "fashion-mnist C=3"."""
        return f"{self.dataset} {self.split}"

    @property
    def heading(self) -> str:
        """For readers: "Fashion-MNIST C=3"."""
        return f"{self.title} {self.split}"

    @property
    def file(self) -> str:
        """The beginning of its drawings' file names: "fashion-mnist-C=3"."""
        return f"{self.dataset}-{self.split}"

    @property
    def axis(self) -> str:
        """What the split varies: "C" for "C=3"."""
        return self.split.partition("=")[0]

    @property
    def x(self) -> float | None:
        """Where the column stands along its axis, None for a split without a number."""
        try:
            return float(self.split.partition("=")[2])
        except ValueError:
            return None

    def method_options(self, row: Row) -> Options:
        """Options that the row's method has in this column and not elsewhere."""
        return self.by_method.get(row.key, {}).get("method", {})

    def tables(self, row: Row) -> dict[str, dict[str, Any]]:
        """The experiment file's tables for a row, but its method."""
        row_tables = {k: v for k, v in self.by_method.get(row.key, {}).items() if k != "method"}
        return {
            name: {**table, **row_tables.get(name, {})} for name, table in self.settings.items()
        }

    def missing(self) -> str | None:
        """What to do about data that are not there, or too small; None where they are."""
        return missing_data(*self.data)

    @property
    def data(self) -> tuple[str, int | None]:
        """The data set, and the size of its images where it is asked for."""
        return self.settings["data"]["name"], self.settings["data"].get("size")


def missing_data(name: str, size: int | None = None) -> str | None:
    """What to do about a data set that is not there, or too small; None where it is."""
    sets = {one.name: one for one in known()}
    if name not in sets:
        return f'this version cannot load the data set "{name}"'
    one = sets[name]
    if not one.available:
        return (
            f'data set "{name}" was not found. Get it: {one.how}; or name the folder above it '
            "in $FEDSHIFT_DATA."
        )
    try:
        if size is not None and one.found is not None:
            check_not_enlarged(one.found, size)
    except DataError as e:
        return str(e)
    return None


@dataclass(frozen=True)
class Study:
    """One table or figure of a paper.

    printed   (column title, split, row label) -> the printed cell
    chosen    what the paper leaves open everywhere, and what we took
    rounds    of the usual column; --rounds scales the others alike
    verdict   labels of the rows of which the foot says whether they beat the baseline
    compared  pairs of rows' labels: the foot says whether the first beats the second
    interval  95 % intervals over seeds by Student's t or by bootstrap
    log_log   curves are drawn once more, along logarithmic axes
    rivals    words -> labels of rows; the foot has the margin of `verdict` over the best of each
    seconds   row key -> processor seconds of a round as measured here, for a forecast
    log_axes  what splits vary and drawings have along a logarithmic axis
    by_round  what is drawn by round beside the table's own drawings
    plot      "rows" a bar per row, a drawing per column;
              "values" a line per row over each axis of the splits; "panels" (a) the projection
              distance and (b) those lines; "sweep" those lines and every seed over the distance;
              "projection" means and deviations over the projection distance
    """

    name: str
    title: str
    rows: tuple[Row, ...]
    columns: tuple[Column, ...]
    rounds: int
    chosen: tuple[str, ...]
    metric: Metric = Metric()
    printed: Mapping[Place, Printed] = field(default_factory=dict)
    plot: Plot = "bars"
    baseline: str = "FedAvg"
    verdict: tuple[str, ...] = ()
    compared: tuple[tuple[str, str], ...] = ()
    interval: Interval = "t"
    log_log: bool = False
    rivals: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    log_axes: tuple[str, ...] = ()
    by_round: tuple[Metric, ...] = ()

    @property
    def curved(self) -> bool:
        """Whether drawings need every round of its runs."""
        return self.plot in ("curves", "absent") or bool(self.by_round or self.metric.span)

    def metric_of(self, row: Row) -> Metric:
        """What the cells of a row hold."""
        return row.shows or replace(self.metric, key=row.reads or self.metric.key)


def narrowed(
    study: Study, datasets: Sequence[str], splits: Sequence[str], methods: Sequence[str]
) -> Study:
    """The study with the named columns and rows only; nothing named keeps all but the extra ones.

    Raises InputError, with what there is and the nearest match, for a name that is not there.
    """
    _check("data set", datasets, [c.dataset for c in study.columns], study)
    # Data sets first: --split chooses among the columns of those that are left.
    columns = [c for c in study.columns if c.dataset in datasets or not (datasets or c.extra)]
    _check("split", splits, [c.split for c in columns], study)
    columns = [c for c in columns if c.split in splits or not splits]
    _check("method", methods, [r.key for r in study.rows], study)
    rows = tuple(r for r in study.rows if r.key in methods or not methods)
    absent = [r.method for r in rows if methods and not r.available]
    if absent:
        raise InputError(
            f'this version has no method "{absent[0]}"; `fedshift methods` lists what it has'
        )
    return replace(study, rows=rows, columns=tuple(columns))


def _check(what: str, given: Sequence[str], allowed: Sequence[str], study: Study) -> None:
    for name in given:
        if name not in allowed:
            raise unknown(f"{what} of {study.name}", name, set(allowed))
