"""The tables of a run folder: the one schema by which they are written and read."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import product
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from fedshift.errors import DataError, nearest, shown, visible


def _number(value: Any) -> Any:
    """A number as `fedshift.files.clean` writes it: null for NaN, "inf" and "-inf" as text."""
    if value is None:
        return math.nan
    return float(value) if value in ("inf", "-inf") else value


# For regression: the estimates by which rounds and settings are chosen.
ESTIMATES = ("estimated_loss", "estimated_loss_se", "estimated_rmse", "source_loss")
Measured = Annotated[float, BeforeValidator(_number)]


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """The measurements after one evaluated round. Accuracies are fractions, losses are in nats.

    Fields with a default may be missing.

    target_*             on test examples that follow T (macro F1: see `Score`)
    estimated_accuracy   sum_y T(y) recall(y) from the clients' validation counts, with its
    estimated_se         standard error
    validation_*         on validation examples that follow T, if there are any
    source_accuracy      on the clients' pooled validation examples, by which one would choose
                         without a target
    ess, ess_fraction    of the round's weights, in examples and as a share of its cohort's examples
    gap                  ||T - S^T a||_2 of the round's weights
    others               the user's metrics by name, and those of tasks without classes
    """

    round: Annotated[int, Field(ge=1)]
    train_loss: Measured
    target_accuracy: Measured
    target_loss: Measured
    target_macro_f1: Measured = math.nan
    estimated_accuracy: Measured
    estimated_se: Measured
    validation_accuracy: Measured
    validation_loss: Measured
    source_accuracy: Measured
    clients_trained: int
    ess: Measured
    ess_fraction: Measured = math.nan
    gap: Measured = math.nan
    others: Mapping[str, Measured] = field(default_factory=dict, metadata={"if any": True})

    @property
    def merit(self) -> float:
        """The number by which rounds and settings are chosen, the larger the better.

        It is the estimated accuracy, or in regression minus the estimated loss. NaN without
        validation examples.
        """
        return -self.others.get("estimated_loss", -self.estimated_accuracy)

    def numbers(self) -> dict[str, Any]:
        """All numbers by name, the user's metrics last."""
        return {k: v for k, v in vars(self).items() if k != "others"} | dict(self.others)


@dataclass(frozen=True)
class ServedMetrics:
    """Accuracies after one round, as fractions; NaN for those that the method does not have.

    system_accuracy    on all clients' test examples together, answered by the method's own rule:
                       by the model of the client that the router names, or by vote
    average_accuracy   of every client's model on its own test examples, by training sizes
    worst_accuracy     the smallest of these
    global_accuracy    of the one model that the server holds, where it is complete
    vote_accuracy      of the label that most clients' models give
    routed_posterior   accuracy when the client of largest posterior answers
    routed_density     accuracy when the client of largest density ratio answers
    mixture_accuracy   of all models, mixed by the posterior
    oracle_routed      by the client that the example comes from
    router_accuracy    how often the router names that client
    """

    round: int
    system_accuracy: float
    average_accuracy: float
    worst_accuracy: float
    global_accuracy: float
    vote_accuracy: float
    routed_posterior: float
    routed_density: float
    mixture_accuracy: float
    oracle_routed: float
    router_accuracy: float


def other_columns(rounds: Sequence[Round], final: Collection[str]) -> tuple[str, ...]:
    """The names of the user's metrics: columns of metrics.csv that are in `final`, too."""
    names = set(final) - {one.name for one in fields(Metrics)}
    return tuple(name for name in (rounds[0].values if rounds else ()) if name in names)


# (true class, predicted class) -> number of test examples, without zeros.
Confusion = Mapping[tuple[int, int], int]
# Columns that all versions have written.
ROUND_COLUMNS = (
    "round", "train_loss", "target_accuracy", "target_loss", "estimated_accuracy", "estimated_se",
    "clients_trained", "ess",
)  # fmt: skip
SERVED_COLUMNS = (
    "round", "system_accuracy", "average_accuracy", "global_accuracy", "router_accuracy",
)  # fmt: skip
CLIENT_COLUMNS = ("client", "n", "weight", "fedavg_weight", "accuracy", "n_validation")
CONFUSION_COLUMNS = ("true", "predicted", "examples")
LABEL = "label_"
REDO = "the file is damaged or from another version: run the experiment again"


@dataclass(frozen=True)
class Round:
    """One row of `metrics.csv` or `served.csv`, by column; None for an empty cell."""

    round: int
    values: Mapping[str, float | None]


@dataclass(frozen=True)
class Client:
    """One row of `clients.csv`; labels [K] are its label counts."""

    name: str
    n: float
    weight: float
    fedavg_weight: float
    accuracy: float | None
    n_validation: float | None
    labels: tuple[float, ...]


def rounds_csv(metrics: Sequence[Metrics] | Sequence[ServedMetrics]) -> str:
    """A row for each evaluated round; a cell is empty if its value does not exist."""
    rows = [m.numbers() if isinstance(m, Metrics) else vars(m) for m in metrics]
    return _csv([list(rows[0]), *(list(row.values()) for row in rows)])


def clients_csv(clients: Sequence[Client], classes: Sequence[str]) -> str:
    """One row per client, with its count of each class."""
    header = [*CLIENT_COLUMNS, *(LABEL + name for name in classes)]
    rows = [
        [c.name, c.n, c.weight, c.fedavg_weight, c.accuracy, c.n_validation, *c.labels]
        for c in clients
    ]
    return _csv([header, *rows])


def confusion_csv(counts: Sequence[Sequence[int]], classes: Sequence[str]) -> str:
    """One row per pair of classes that occurs; counts [K, K], true classes by predicted ones."""
    pairs = [
        [classes[i], classes[j], n] for i, row in enumerate(counts) for j, n in enumerate(row) if n
    ]
    return _csv([CONFUSION_COLUMNS, *pairs])


def corrected_csv(
    counts: Mapping[str, Mapping[str, Sequence[Sequence[int]]]], classes: Sequence[str]
) -> str:
    """Confusion counts of the model as trained and corrected, [K, K] by set and form."""
    rows = [
        [name, classes[i], classes[j], *given]
        for name, forms in counts.items()
        for i, j in product(range(len(classes)), repeat=2)
        if any(given := [table[i][j] for table in forms.values()])
    ]
    forms = next(iter(counts.values()))
    return _csv([("set", "true", "predicted", *forms), *rows])


def _csv(rows: Sequence[Sequence[Any]]) -> str:
    out = io.StringIO()
    # By default csv writes line endings of Windows.
    writer = csv.writer(out, lineterminator="\n")
    for row in rows:
        writer.writerow(map(_cell, row))
    return out.getvalue()


def _cell(value: Any) -> Any:
    # Names of clients and classes come from users' files, and may have control characters, which
    # must not reach a terminal.
    if isinstance(value, str):
        return visible(value)
    return "" if isinstance(value, float) and math.isnan(value) else value


def read_rounds(path: Path, text: str, needed: Sequence[str]) -> tuple[Round, ...]:
    """The rows of metrics.csv or served.csv. Raises DataError with line and column."""
    rounds = []
    for line, row in _rows(path, text, needed):
        values = {k: _value(path, line, k, v) for k, v in row.items() if k != "round"}
        rounds.append(Round(int(_given(path, line, "round", row["round"])), values))
    return tuple(rounds)


def read_clients(path: Path, text: str, classes: Sequence[str]) -> tuple[Client, ...]:
    """The rows of clients.csv. Raises DataError with line and column."""
    # In the form in which `_cell` wrote them.
    labels = tuple(visible(LABEL + name) for name in classes)
    clients = []
    for line, row in _rows(path, text, CLIENT_COLUMNS + labels):
        n, weight, fedavg = (
            _given(path, line, k, row[k]) for k in ("n", "weight", "fedavg_weight")
        )
        accuracy, checked = (_value(path, line, k, row[k]) for k in ("accuracy", "n_validation"))
        counts = tuple(_given(path, line, k, row[k]) for k in labels)
        clients.append(Client(row["client"], n, weight, fedavg, accuracy, checked, counts))
    return tuple(clients)


def read_confusion(path: Path, text: str, classes: Sequence[str]) -> Confusion:
    """The rows of confusion.csv. Raises DataError with line and column."""
    places = {visible(name): i for i, name in enumerate(classes)}
    counts = dict[tuple[int, int], int]()
    for line, row in _rows(path, text, CONFUSION_COLUMNS):
        for name in (row["true"], row["predicted"]):
            if name not in places:
                where = f'{path}, line {line}: "{shown(name)}"'
                raise DataError(f"{where} is no class of summary.json; {REDO}")
        pair = places[row["true"]], places[row["predicted"]]
        counts[pair] = int(_given(path, line, "examples", row["examples"]))
    return counts


def _rows(path: Path, text: str, needed: Sequence[str]) -> list[tuple[int, dict[str, str]]]:
    """(line number, column -> cell) of every row, after a check that all needed columns exist."""
    # newline="": a quoted name may contain a line break, which csv itself must interpret.
    reader = csv.reader(io.StringIO(text, newline=""))
    try:
        lines = [(reader.line_num, cells) for cells in reader]
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: {error}; {REDO}") from error
    header = list(map(visible, lines[0][1])) if lines else []
    for name in needed:
        if name not in header:
            near = nearest(name, header)
            raise DataError(f'{path}: no column "{shown(name)}".{near} {REDO}')
    rows = []
    for line, cells in lines[1:]:
        if len(cells) != len(header):
            raise DataError(
                f"{path}, line {line}: {len(cells)} cells; the header has {len(header)}; {REDO}"
            )
        rows.append((line, dict(zip(header, cells, strict=True))))
    return rows


def _value(path: Path, line: int, column: str, cell: str) -> float | None:
    """The number in a cell; None if it is empty, NaN or infinite (after training diverged)."""
    if not cell.strip():
        return None
    try:
        value = float(cell)
    except ValueError:
        where = f'{path}, line {line}, column "{shown(column)}"'
        raise DataError(f'{where}: "{shown(cell)}" is not a number; {REDO}') from None
    return value if math.isfinite(value) else None


def _given(path: Path, line: int, column: str, cell: str) -> float:
    value = _value(path, line, column, cell)
    if value is None:
        where = f'{path}, line {line}, column "{shown(column)}"'
        raise DataError(f"{where}: a number is needed; {REDO}")
    return value
