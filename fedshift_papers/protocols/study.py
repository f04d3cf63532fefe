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
# Where a printed cell stands in its table: column title, split, row label.
Place = tuple[str, str, str]


@dataclass(frozen=True)
class Printed:
    """A cell of the paper, in the paper's unit; sd is None if the paper prints no deviation."""

    mean: float
    sd: float | None


def printed_rows(name: str) -> list[dict[str, str]]:
    """The rows of NAME.csv, which lies beside this file, as text."""
    path = files("fedshift_papers.protocols") / f"{name}.csv"
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def printed(name: str, place: Callable[[Mapping[str, str]], Place]) -> dict[Place, Printed]:
    """The cells of NAME.csv; `place` says where a row belongs: (column title, split, row label).

    A row has the cell's mean under "mean" or "value", and its deviation, if any, under "std".
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
    """What a cell shows: the value of `key` in a run's summary, times `scale`, with `digits`.

    stop      the rounds that count: "best" is the round of lowest loss on validation examples that
              follow the target, "final" the last round, "last" the mean of the last `last` rounds
    span, of  if span is not 0: the mean, or the least value, of the last `span` rounds instead
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
        """The range of values that a cell can have, such as 0 to 100 for an accuracy in %."""
        return bounds_of(self.key, scale=self.scale)


@dataclass(frozen=True)
class Row:
    """A line of the table: a method with its options, and what is shown of its runs.

    key     the name that --methods takes; several rows may have the same (FedPALS at four lambdas)
    grid    hyper-parameters that --tune chooses, each with the values to try
    ess     ESS fractions to try for every seed (0 is lambda = 0); the one that is best on
            validation examples is shown
    scaled  options that count rounds: they shrink with a shortened run
    reads   a key of the summary to show instead of the table's key, in the same unit
    shows   a metric to show instead of the table's, if the unit differs as well
    against the row to compare with, if it is not the table's baseline; "-" for no comparison
    before  options that count rounds before training begins; the column's rounds do not include
            these
    picked_by  the key of the summary that decides between ESS fractions, or values of a grid
    tuned_as   the row whose tuned values this one takes, since both read the same runs
    grid_tables  tables of the experiment file that are added while a grid is trained
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
        """The number of rounds before the model's training begins, under these options."""
        return sum(int(options[name]) for name in self.before)

    @property
    def available(self) -> bool:
        """Whether this version of the library has the recipe."""
        return recipes.is_method(self.method)


@dataclass(frozen=True)
class Column:
    """A column of the table: a data set under one split, as tables of an experiment file.

    split   "name=value"; a number as value is the column's place along a sweep's axis
    seeds   the number of seeds that the paper has
    extra   true for a column that the paper lacks: it is used only if --dataset names it
    differs a few words on how the column departs from the paper
    chosen  sentences on what the paper leaves open for this column, and what we took
    by_method  row key -> changes of `settings` for that method in this column, such as its
               learning rate; its table "method" holds the recipe's options
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
        """The column's name as readers see it: "Fashion-MNIST C=3"."""
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
        """The column's place along its axis; None for a split without a number."""
        try:
            return float(self.split.partition("=")[2])
        except ValueError:
            return None

    def method_options(self, row: Row) -> Options:
        """Options that the row's method has in this column alone."""
        return self.by_method.get(row.key, {}).get("method", {})

    def tables(self, row: Row) -> dict[str, dict[str, Any]]:
        """The tables of the experiment file for this row, without [method]."""
        row_tables = {k: v for k, v in self.by_method.get(row.key, {}).items() if k != "method"}
        return {
            name: {**table, **row_tables.get(name, {})} for name, table in self.settings.items()
        }

    def missing(self) -> str | None:
        """How to get the data if they are missing or too small; None if they are there."""
        return missing_data(*self.data)

    @property
    def data(self) -> tuple[str, int | None]:
        """The data set's name, and the size of images that the column asks for, if any."""
        return self.settings["data"]["name"], self.settings["data"].get("size")


def missing_data(name: str, size: int | None = None) -> str | None:
    """How to get a data set that is missing or too small; None if it is there."""
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

    printed   (column title, split, row label) -> the cell that the paper prints
    chosen    sentences on what the paper leaves open everywhere, and what we took
    rounds    rounds of the usual column; --rounds scales those of other columns in proportion
    verdict   labels of rows: a sentence below the table says whether each beats the baseline
    compared  pairs of row labels: a sentence says whether the first beats the second
    interval  95 % intervals over seeds, by Student's t or by bootstrap
    log_log   whether curves are drawn a second time, along logarithmic axes
    rivals    a name for a group of rows -> their labels; sentences below the table give the margin
              of each row of `verdict` over the best row of the group
    seconds   row key -> processor seconds of a round, as measured on our machine, to forecast how
              long the table takes
    log_axes  names of axes (`Column.axis`) that are drawn logarithmically
    by_round  metrics that are drawn round by round, beside the table's own drawings
    plot      the kind of drawing: "rows" a bar per row, a drawing per column;
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
        """Whether the study needs every round of its runs, and not the last one alone."""
        return self.plot in ("curves", "absent") or bool(self.by_round or self.metric.span)

    def metric_of(self, row: Row) -> Metric:
        """The metric that the cells of this row show."""
        return row.shows or replace(self.metric, key=row.reads or self.metric.key)


def narrowed(
    study: Study, datasets: Sequence[str], splits: Sequence[str], methods: Sequence[str]
) -> Study:
    """The study with the named columns and rows only.

    Where nothing is named, everything stays except the extra columns. Raises InputError for an
    unknown name, with the known ones and the nearest match.
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
