"""What the report's parts share: groups of runs on the same clients, names, and headings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedshift.record.folder import RunResult
from fedshift.record.summary import Serving
from fedshift.report.shapes import escape
from fedshift.report.tables import MISSING, Cell, Table

# More rows than this cannot be read at the width of a page. The tables have them all.
MOST_DRAWN = 100
# Cells of a heat map. A page has each map twice, with a text for every cell.
MOST_CELLS = 6_400


@dataclass(frozen=True)
class Split:
    """Runs on the same clients and target; places: their indices among all runs."""

    runs: tuple[RunResult, ...]
    labels: tuple[str, ...]
    places: tuple[int, ...]

    @property
    def name(self) -> str:
        return ", ".join(self.labels)

    def drawn(self, columns: int = 1) -> tuple[int, ...]:
        """The clients that a chart has room for: those with the largest weights, by number."""
        most = min(MOST_DRAWN, max(10, MOST_CELLS // columns))
        first = self.runs[0].summary
        weights = [first.fedavg_weights, *(r.summary.weights for r in self.runs)]
        largest = [max(column) for column in zip(*weights, strict=True)]
        ranked = sorted(range(len(largest)), key=lambda i: -largest[i])
        return tuple(sorted(ranked[:most]))


def splits(runs: Sequence[RunResult], labels: Sequence[str]) -> tuple[Split, ...]:
    """The runs, grouped by label counts, target and client names; in order of their first runs."""
    groups: dict[object, list[int]] = {}
    for i, run in enumerate(runs):
        # By content and not by configuration: two different files may describe the same clients.
        key = (run.summary.label_counts, run.summary.target, looked_names(run))
        groups.setdefault(key, []).append(i)
    return tuple(
        Split(tuple(runs[i] for i in g), tuple(labels[i] for i in g), tuple(g))
        for g in groups.values()
    )


def client_names(run: RunResult) -> tuple[str, ...]:
    """The clients' names; "client 3" if all names are numbers."""
    names = tuple(c.name for c in run.clients)
    return tuple(f"client {n}" for n in names) if all(n.isdigit() for n in names) else names


def looks(run: RunResult) -> tuple[str, ...]:
    """The transform of each client's inputs, in words; empty if unknown."""
    serving, differences = run.summary.serving, run.summary.differences
    return (serving and serving.looks) or (differences and differences.looks) or ()


def looked_names(run: RunResult) -> tuple[str, ...]:
    """`client_names`, each followed by its look if there are `looks`; for charts."""
    names, transforms = client_names(run), looks(run)
    return (
        tuple(f"{n}: {s}" for n, s in zip(names, transforms, strict=True)) if transforms else names
    )


def serving_runs(
    runs: Sequence[RunResult], labels: Sequence[str]
) -> list[tuple[RunResult, str, Serving]]:
    """The runs whose clients serve models of their own, with labels."""
    pairs = zip(runs, labels, strict=True)
    return [(r, b, r.summary.serving) for r, b in pairs if r.summary.serving is not None]


def by_client(
    run: RunResult,
    columns: Sequence[str],
    values: Sequence[Sequence[float | None]],
    spec: str = ".1%",
    caption: str = "",
) -> Table:
    """A table with a row for each client."""
    rows = tuple((n, *row) for n, row in zip(client_names(run), values, strict=True))
    return Table(("Client", *columns), rows, ("", *[spec] * len(columns)), caption)


def mass_columns(runs: Sequence[RunResult], name: str) -> list[tuple[str, Sequence[Cell], str]]:
    """Columns with each distinct target of the runs, numbered if there are several."""
    masses = list(dict.fromkeys(run.summary.target for run in runs))
    names = [name] if len(masses) == 1 else [f"{name} #{i + 1}" for i in range(len(masses))]
    return [(column, mass, ".1%") for column, mass in zip(names, masses, strict=True)]


def percent(value: float | None) -> str:
    """A fraction as percent with one decimal; a dash for None."""
    return MISSING if value is None else f"{value:.1%}"


def run_heading(runs: Sequence[RunResult], label: str) -> str:
    """A heading with the run's label; "" for a single run."""
    return f"<h3>{escape(label)}</h3>" if len(runs) > 1 else ""


def heading(split: Split, runs: Sequence[RunResult]) -> str:
    """A heading with the split's runs; "" if all runs are in it."""
    return f"<h3>{escape(split.name)}</h3>" if len(split.runs) < len(runs) else ""


def left_out(split: Split, columns: int = 1) -> str:
    """A sentence on the clients that a chart of so many columns has no room for; "" if it has."""
    shown = len(split.drawn(columns))
    count = len(split.runs[0].clients) - shown
    largest = f"The {shown} clients with the largest weights; "
    return f"{largest}{count} more are in the table." if count else ""


def classes_drawn(run: RunResult) -> tuple[tuple[int, ...], str]:
    """(the classes that a chart has room for, in order; a sentence on the others)."""
    s = run.summary
    sizes = [sum(column) for column in zip(*s.label_counts, strict=True)]
    ranked = sorted(range(len(s.classes)), key=lambda k: (-s.target[k], -sizes[k]))
    shown, more = tuple(sorted(ranked[:MOST_DRAWN])), len(ranked) - MOST_DRAWN
    text = f"The {MOST_DRAWN} classes that are most of the target; {more} more are in the table."
    return shown, text if more > 0 else ""
