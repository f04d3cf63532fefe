"""What the parts of a report share: runs by their clients and target, names, headings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedshift.record.folder import RunResult
from fedshift.record.summary import Serving
from fedshift.report.shapes import escape
from fedshift.report.tables import MISSING, Cell, Table

# More rows than this are unreadable at the width of a page; the tables have them all.
MOST_DRAWN = 100
# Cells of one heat map, which a page has twice, with a text for each.
MOST_CELLS = 6_400


@dataclass(frozen=True)
class Split:
    """Runs on the same clients and target, with their labels and their places among all runs."""

    runs: tuple[RunResult, ...]
    labels: tuple[str, ...]
    places: tuple[int, ...]

    @property
    def name(self) -> str:
        return ", ".join(self.labels)

    def drawn(self, columns: int = 1) -> tuple[int, ...]:
        """The clients that fit a figure: those with the largest weights, in their own order."""
        most = min(MOST_DRAWN, max(10, MOST_CELLS // columns))
        first = self.runs[0].summary
        weights = [first.fedavg_weights, *(r.summary.weights for r in self.runs)]
        largest = [max(column) for column in zip(*weights, strict=True)]
        ranked = sorted(range(len(largest)), key=lambda i: -largest[i])
        return tuple(sorted(ranked[:most]))


def splits(runs: Sequence[RunResult], labels: Sequence[str]) -> tuple[Split, ...]:
    """The runs by label counts, target and client names, in the order of their first run."""
    groups: dict[object, list[int]] = {}
    for i, run in enumerate(runs):
        # By content, not by configuration: two files may well describe the same clients.
        key = (run.summary.label_counts, run.summary.target, looked_names(run))
        groups.setdefault(key, []).append(i)
    return tuple(
        Split(tuple(runs[i] for i in g), tuple(labels[i] for i in g), tuple(g))
        for g in groups.values()
    )


def client_names(run: RunResult) -> tuple[str, ...]:
    """The clients' names; "client 3" if the file has only "3"."""
    names = tuple(c.name for c in run.clients)
    return tuple(f"client {n}" for n in names) if all(n.isdigit() for n in names) else names


def looks(run: RunResult) -> tuple[str, ...]:
    """The transform of each client's inputs, in words; empty if unknown."""
    serving, differences = run.summary.serving, run.summary.differences
    return (serving and serving.looks) or (differences and differences.looks) or ()


def looked_names(run: RunResult) -> tuple[str, ...]:
    """`client_names` followed by `looks`, for drawings."""
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
    """A row per client under the names of `columns`."""
    rows = tuple((n, *row) for n, row in zip(client_names(run), values, strict=True))
    return Table(("Client", *columns), rows, ("", *[spec] * len(columns)), caption)


def mass_columns(runs: Sequence[RunResult], name: str) -> list[tuple[str, Sequence[Cell], str]]:
    """Columns with each distinct target of the runs, numbered where there are several."""
    masses = list(dict.fromkeys(run.summary.target for run in runs))
    names = [name] if len(masses) == 1 else [f"{name} #{i + 1}" for i in range(len(masses))]
    return [(column, mass, ".1%") for column, mass in zip(names, masses, strict=True)]


def percent(value: float | None) -> str:
    """With one decimal; a dash for None."""
    return MISSING if value is None else f"{value:.1%}"


def run_heading(runs: Sequence[RunResult], label: str) -> str:
    """A heading with the run's label; "" for a single run."""
    return f"<h3>{escape(label)}</h3>" if len(runs) > 1 else ""


def heading(split: Split, runs: Sequence[RunResult]) -> str:
    """A heading with the split's runs; "" if all runs are in it."""
    return f"<h3>{escape(split.name)}</h3>" if len(split.runs) < len(runs) else ""


def left_out(split: Split, columns: int = 1) -> str:
    """How many clients a figure of so many columns does not show, in a sentence."""
    shown = len(split.drawn(columns))
    count = len(split.runs[0].clients) - shown
    largest = f"The {shown} clients with the largest weights; "
    return f"{largest}{count} more are in the table." if count else ""


def classes_drawn(run: RunResult) -> tuple[tuple[int, ...], str]:
    """(the classes that fit a figure, in order; a sentence on the others)."""
    s = run.summary
    sizes = [sum(column) for column in zip(*s.label_counts, strict=True)]
    ranked = sorted(range(len(s.classes)), key=lambda k: (-s.target[k], -sizes[k]))
    shown, more = tuple(sorted(ranked[:MOST_DRAWN])), len(ranked) - MOST_DRAWN
    text = f"The {MOST_DRAWN} classes that are most of the target; {more} more are in the table."
    return shown, text if more > 0 else ""
