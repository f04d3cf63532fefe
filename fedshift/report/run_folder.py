"""A run folder read back into one frozen value, every missing or damaged file named."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from fedshift.errors import DataError, nearest, shown, visible
from fedshift.files import is_file, is_folder
from fedshift.report.cohorts import Cohorts
from fedshift.report.difference_fields import Differences, Importance, lengths
from fedshift.report.label_set_fields import LabelSets
from fedshift.report.serving_fields import Last, Serving

# A loss or a standard error that is infinite is the text "inf", because JSON has no infinity.
Number = Annotated[float, Field(allow_inf_nan=False)] | Literal["inf", "-inf"]
Share = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Lambda = Annotated[float, Field(ge=0, allow_inf_nan=False)] | Literal["inf"] | None

LABEL = "label_"
ROUND_COLUMNS = (
    "round", "train_loss", "target_accuracy", "target_loss", "estimated_accuracy", "estimated_se",
    "clients_trained", "ess",
)  # fmt: skip
SERVED_COLUMNS = (
    "round", "system_accuracy", "average_accuracy", "global_accuracy", "router_accuracy",
)  # fmt: skip
CLIENT_COLUMNS = ("client", "n", "weight", "fedavg_weight", "accuracy", "n_validation")


@dataclass(frozen=True)
class CurvePoint:
    """One lambda: the ESS it reaches and how far its mixture is from the target (L2 and L1)."""

    lam: Lambda
    ess_fraction: Share
    distance: Share
    l1: Share


@dataclass(frozen=True)
class Final:
    """The last evaluation: target and estimate, recall per class [K], accuracy per client [M].

    target_macro_f1 is None in folders of versions that did not measure it. bytes_* are of the
    tensors of the last round, the mean over its clients, and of the whole model.
    """

    round: int
    target_accuracy: Share | None
    target_loss: Number | None
    target_recall: tuple[Share | None, ...]
    recall_estimate: tuple[Share | None, ...]
    estimated_accuracy: Share | None
    estimated_se: Number | None
    client_accuracy: tuple[Share | None, ...]
    target_macro_f1: Share | None = None
    bytes_down: Count | None = None
    bytes_up: Count | None = None
    bytes_model: Count | None = None


@dataclass(frozen=True)
class Candidate:
    """One ESS that a selection rule could choose, with what each rule would look at."""

    label: str
    ess_fraction: Share | None
    estimated_accuracy: Share | None
    estimated_se: Number | None
    validation_accuracy: Share | None
    target_accuracy: Share | None
    source_accuracy: Share | None = None


@dataclass(frozen=True)
class Selection:
    """Which candidate was used, by what rule, and what every rule would have picked."""

    rule: str
    chosen: str | int | None
    candidates: tuple[Candidate, ...]
    picks: dict[str, str] | None = None


@dataclass(frozen=True)
class Summary:
    """`summary.json`: K classes, M clients; label_counts [M, K], target [K], weights [M].

    distance and l1_distance are those of the target to the mixture that the run trained on.
    last, serving: where clients serve models of their own; None elsewhere, and in old folders.
    label_sets, importance: for methods with label sets, and that weigh examples.
    differences: where the clients' inputs differ. cohorts: where rounds draw some clients.
    """

    fedshift: str | None
    name: str
    method: str
    dataset: str
    classes: tuple[str, ...]
    target: tuple[Share, ...]
    label_counts: tuple[tuple[Count, ...], ...]
    weights: tuple[Share, ...]
    fedavg_weights: tuple[Share, ...]
    lam: Lambda
    ess: Share | None
    ess_fraction: Share | None
    distance: Share | None
    l1_distance: Share | None
    certified: bool | None
    curve: tuple[CurvePoint, ...]
    final: Final
    selection: Selection | None
    why: tuple[str, ...]
    hull_distance: Share | None = None
    last: Last | None = None
    serving: Serving | None = None
    label_sets: LabelSets | None = None
    differences: Differences | None = None
    importance: Importance | None = None
    cohorts: Cohorts | None = None

    @property
    def hull(self) -> float | None:
        """How far the target is from every mixture: as given, else from the curve's lambda = 0."""
        if self.hull_distance is not None:
            return self.hull_distance
        return next((p.distance for p in self.curve if p.lam == 0.0), None)


@dataclass(frozen=True)
class Round:
    """One row of `metrics.csv` or `served.csv`, by column; None where the cell is empty."""

    round: int
    values: Mapping[str, float | None]


@dataclass(frozen=True)
class Client:
    """One row of `clients.csv`."""

    name: str
    n: float
    weight: float
    fedavg_weight: float
    accuracy: float | None
    n_validation: float | None


@dataclass(frozen=True)
class RunResult:
    """All of a run folder that a report shows; `served` are the rows of `served.csv`."""

    folder: Path
    summary: Summary
    rounds: tuple[Round, ...]
    clients: tuple[Client, ...]
    lock: Mapping[str, Any]
    config: str
    served: tuple[Round, ...] = ()


_SUMMARY = TypeAdapter(Summary)


def read_run(folder: Path) -> RunResult:
    """The run in `folder`.

    Raises `DataError`, with the file and the place in it, when the folder or one of
    summary.json, metrics.csv, clients.csv, lock.json and config.resolved.toml (and served.csv where
    clients serve models of their own) is missing, cannot be parsed, lacks a field or contradicts
    another file on the classes or the clients.
    """
    if not is_folder(folder):
        raise DataError(f"no run folder {folder}; `fedshift run FILE.toml` makes one")
    summary = _summary(folder / "summary.json")
    path = folder / "clients.csv"
    clients, counts = _clients(path, summary.classes)
    _agree(path, summary, clients, counts)
    lock = _lock(folder / "lock.json")
    config = _text(folder / "config.resolved.toml")
    rounds = _rounds(folder / "metrics.csv", ROUND_COLUMNS)
    served = summary.serving and _rounds(folder / "served.csv", SERVED_COLUMNS)
    return RunResult(folder, summary, rounds, clients, lock, config, served or ())


def _summary(path: Path) -> Summary:
    text = _text(path)
    try:
        summary = _SUMMARY.validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        where = f'{path}: "{place}"' if place else str(path)
        more = f" ({error.error_count() - 1} more)" if error.error_count() > 1 else ""
        raise DataError(f"{where}: {first['msg']}{more}; {_REDO}") from error
    for name, found, needed in _lengths(summary):
        if found != needed:
            raise DataError(f'{path}: "{name}" has {found} entries, {needed} are needed; {_REDO}')
    if (summary.last is None) != (summary.serving is None):
        raise DataError(f'{path}: only one of "last" and "serving" is there; {_REDO}')
    return summary


_REDO = "the file is damaged or from another version: run the experiment again"


def _lengths(summary: Summary) -> list[tuple[str, int, int]]:
    K, M, final = len(summary.classes), len(summary.label_counts), summary.final
    sets = summary.label_sets
    per_class = {
        "target": summary.target,
        **({"label_sets.holders": sets.holders} if sets else {}),
        **({"label_sets.absent_rounds": sets.absent_rounds} if sets else {}),
        "final.target_recall": final.target_recall,
        "final.recall_estimate": final.recall_estimate,
        **{f"label_counts.{i}": row for i, row in enumerate(summary.label_counts)},
    }
    per_client = {
        "weights": summary.weights,
        "fedavg_weights": summary.fedavg_weights,
        "final.client_accuracy": final.client_accuracy,
    }
    at_least_one = [("classes", min(K, 1), 1), ("label_counts", min(M, 1), 1)]
    return [
        *at_least_one,
        *((name, len(v), K) for name, v in per_class.items()),
        *((name, len(v), M) for name, v in per_client.items()),
        *(summary.serving.lengths(M, K) if summary.serving else ()),
        *lengths(summary.differences, summary.importance, M),
    ]


def _rounds(path: Path, needed: Sequence[str]) -> tuple[Round, ...]:
    rows = _rows(path, needed)
    made = []
    for line, row in rows:
        values = {k: _value(path, line, k, v) for k, v in row.items() if k != "round"}
        made.append(Round(int(_given(path, line, "round", row["round"])), values))
    return tuple(made)


def _clients(
    path: Path, classes: Sequence[str]
) -> tuple[tuple[Client, ...], tuple[tuple[float, ...], ...]]:
    labels = tuple(visible(LABEL + name) for name in classes)
    clients, counts = [], []
    for line, row in _rows(path, CLIENT_COLUMNS + labels):
        n, weight, fedavg = (
            _given(path, line, k, row[k]) for k in ("n", "weight", "fedavg_weight")
        )
        accuracy, checked = (_value(path, line, k, row[k]) for k in ("accuracy", "n_validation"))
        clients.append(Client(row["client"], n, weight, fedavg, accuracy, checked))
        counts.append(tuple(_given(path, line, k, row[k]) for k in labels))
    return tuple(clients), tuple(counts)


def _agree(
    path: Path,
    summary: Summary,
    clients: Sequence[Client],
    counts: Sequence[tuple[float, ...]],
) -> None:
    """Refuse two files of different runs: a report must not mix them."""
    M = len(summary.label_counts)
    if len(clients) != M:
        raise DataError(f"{path}: {len(clients)} clients; summary.json has {M}; {_REDO}")
    for client, row, expected in zip(clients, counts, summary.label_counts, strict=True):
        if row != expected:
            said = f'label counts of client "{shown(client.name)}" differ from summary.json'
            raise DataError(f"{path}: {said}; {_REDO}")


def _lock(path: Path) -> Mapping[str, Any]:
    text = _text(path)
    try:
        lock = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{path}, line {error.lineno}: {error.msg}; {_REDO}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: {shown(str(error), 200)}; {_REDO}") from error
    if not isinstance(lock, dict):
        raise DataError(f"{path}: an object of versions is needed; {_REDO}")
    return lock


def _rows(path: Path, needed: Sequence[str]) -> list[tuple[int, dict[str, str]]]:
    """(line number, column -> cell) of every row, after checking that all needed columns exist."""
    reader = csv.reader(io.StringIO(_text(path), newline=""))
    try:
        lines = [(reader.line_num, cells) for cells in reader]
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: {error}; {_REDO}") from error
    header = list(map(visible, lines[0][1])) if lines else []
    for name in needed:
        if name not in header:
            near = nearest(name, header)
            raise DataError(f'{path}: no column "{shown(name)}".{near} {_REDO}')
    rows = []
    for line, cells in lines[1:]:
        if len(cells) != len(header):
            raise DataError(
                f"{path}, line {line}: {len(cells)} cells; the header has {len(header)}; {_REDO}"
            )
        rows.append((line, dict(zip(header, cells, strict=True))))
    return rows


def _value(path: Path, line: int, column: str, cell: str) -> float | None:
    """The number in a cell; None where it is empty, NaN or infinite (a loss that diverged)."""
    if not cell.strip():
        return None
    try:
        value = float(cell)
    except ValueError:
        where = f'{path}, line {line}, column "{shown(column)}"'
        raise DataError(f'{where}: "{shown(cell)}" is not a number; {_REDO}') from None
    return value if math.isfinite(value) else None


def _given(path: Path, line: int, column: str, cell: str) -> float:
    value = _value(path, line, column, cell)
    if value is None:
        where = f'{path}, line {line}, column "{shown(column)}"'
        raise DataError(f"{where}: a number is needed; {_REDO}")
    return value


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        ended = is_file(path.parent / "diverged.json")
        why = "its training diverged" if ended else "the run did not finish or is not a run folder"
        raise DataError(f"{path.parent} has no {path.name}: {why}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {path}: {error}") from error
