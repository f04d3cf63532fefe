"""The tables of a study's cells: one like the paper's, one by cell, and one by seed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedshift.report.tables import MISSING, Table
from fedshift.sweeps.store import Store
from fedshift.sweeps.texts import difference, interval, spread
from fedshift_papers.protocols.study import Metric, Printed, Study
from fedshift_papers.reproduce.results import Cell, Value

WIDEST = 6
NUMBERS = (
    "dataset", "split", "method", "seeds", "mean", "sd", "low95", "high95", "difference",
    "difference_low95", "difference_high95", "paired_seeds", "paper_mean", "paper_sd",
    "paper_seeds", "rounds", "paper_rounds", "note",
)  # fmt: skip
SEEDS = (
    "dataset", "split", "method", "seed", "value", "round", "chosen", "validation_accuracy",
    "ess_fraction", "hull_distance", "over_rounds", "run", "config_sha256", "other_runs",
)  # fmt: skip


def paper_table(study: Study, cells: Sequence[Cell]) -> Table | None:
    """Methods by data sets; each cell has our number, then the paper's. None if it is too wide."""
    columns = study.columns
    if not 0 < len(columns) <= WIDEST:
        return None
    at = {(c.column.key, c.row.label): c for c in cells}
    rows = tuple(
        (row.label, *(_short(at[c.key, row.label], study.metric_of(row)) for c in columns))
        for row in study.rows
    )
    header = ("Method", *(f"{c.title} {c.split}" for c in columns))
    return Table(header, rows, ("",) * len(header), f"{study.title} ({study.metric.name})")


def cell_table(study: Study, cells: Sequence[Cell]) -> Table:
    """A line for each cell: our number, the paper's, interval, difference, what differs."""
    header = (
        "Data",
        "Split",
        "Method",
        "Here",
        "Paper",
        "95 % interval" if study.interval == "t" else "95 % bootstrap interval",
        f"Minus {study.baseline}, paired" if study.baseline else "Minus the baseline",
        "Differs from the paper",
    )
    rows = tuple(
        (
            c.column.title,
            c.column.split,
            c.row.label,
            here(c, study.metric_of(c.row)),
            printed_text(c.printed, study.metric),
            interval(c.moments, study.metric_of(c.row).digits),
            difference(c.difference, study.metric_of(c.row).digits),
            c.note,
        )
        for c in cells
    )
    return Table(header, rows, ("",) * len(header), f"{study.name}: {study.metric.name}")


def numbers_table(cells: Sequence[Cell]) -> Table:
    """One line per cell with full-precision numbers, for CSV."""
    rows = []
    for c in cells:
        m, d, p = c.moments, c.difference, c.printed
        rows.append(
            (
                c.column.dataset,
                c.column.split,
                c.row.label,
                len(c.values),
                *((m.mean, m.sd, m.low, m.high) if m else (None,) * 4),
                *((d.mean, d.low, d.high, d.n) if d else (None, None, None, 0)),
                *((p.mean, p.sd) if p else (None, None)),
                c.column.seeds,
                c.rounds,
                c.column.rounds,
                c.note,
            )
        )
    return Table(NUMBERS, tuple(rows), ("",) * 3 + ("g",) * 14 + ("",))


def facts_of(value: Value) -> dict[str, Any]:
    """A seed as one JSON value, with the runs that it comes from."""
    return {
        "seed": value.seed,
        "value": value.value,
        "round": value.round,
        "chosen": value.chosen,
        "validation_accuracy": value.validation,
        "ess_fraction": value.ess_fraction,
        "hull_distance": value.distance,
        "run": value.run.name,
        "config_sha256": value.config_sha256,
        "data_sha256": value.lock.get("data_sha256"),
        "split_sha256": value.lock.get("split_sha256"),
        "other_runs": [run.name for run in value.others],
    }


def seeds_table(cells: Sequence[Cell]) -> Table:
    """One line per seed, with the run it comes from, for CSV."""
    rows = []
    for c in cells:
        where = {"dataset": c.column.dataset, "split": c.column.split, "method": c.row.label}
        for v in c.values:
            others = " ".join(run.name for run in v.others)
            facts = where | facts_of(v) | {"over_rounds": v.over_rounds, "other_runs": others}
            rows.append(tuple(facts[name] for name in SEEDS))
    formats = ("", "", "", "d", "g", "d", "", "g", "g", "g", "g", "", "", "")
    return Table(SEEDS, tuple(rows), formats)


def runs_by_seed(
    cells: Sequence[Cell], store: Store, linked: str, recorded: str
) -> tuple[str, ...]:
    """A column with each cell's seeds, linked to their runs' folders, or with their records' ids.

    linked, recorded: formats for (seed, address) and (seed, id). Names of runs need no escaping.
    """

    def one(value: Value) -> str:
        if store.record(value.run) is None:
            return linked.format(value.seed, f"../runs/{value.run.name}")
        return recorded.format(value.seed, value.run.id)

    return ("Runs by seed", *(" ".join(map(one, cell.values)) for cell in cells))


def here(cell: Cell, metric: Metric) -> str:
    """Our number: mean and deviation over seeds; for a single seed, the deviation over rounds."""
    text = spread(cell.moments, metric.digits)
    rounds = cell.values[0].over_rounds if len(cell.values) == 1 else None
    return text if rounds is None else f"{text} ± {rounds:.{metric.digits}f} over rounds"


def printed_text(cell: Printed | None, metric: Metric) -> str:
    """The paper's cell with the digits of our table; a mean printed with more keeps them."""
    if cell is None:
        return MISSING
    mean = max(f"{cell.mean:.{metric.digits}f}", f"{cell.mean:g}", key=len)
    return mean if cell.sd is None else f"{mean} ± {cell.sd:.{metric.digits}f}"


def _short(cell: Cell, metric: Metric) -> str:
    note = "not run" if cell.problem else cell.note
    behind = [note] if note else []
    if cell.printed is not None:
        behind.append(f"paper {printed_text(cell.printed, metric)}")
    text = here(cell, metric)
    return f"{text} ({'; '.join(behind)})" if behind else text
