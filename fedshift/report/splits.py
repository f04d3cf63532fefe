"""Runs grouped by clients and target, so that a shared figure is drawn once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedshift.record.folder import RunResult
from fedshift.report.shapes import escape

# More rows than this are unreadable at the width of a page; the tables have them all.
MOST_DRAWN = 100


@dataclass(frozen=True)
class Split:
    """Runs on the same clients and target, with their labels and their places among all runs."""

    runs: tuple[RunResult, ...]
    labels: tuple[str, ...]
    places: tuple[int, ...]

    @property
    def name(self) -> str:
        return ", ".join(self.labels)

    def drawn(self) -> tuple[int, ...]:
        """The clients that fit a figure: those with the largest weights, in their own order."""
        first = self.runs[0].summary
        weights = [first.fedavg_weights, *(r.summary.weights for r in self.runs)]
        largest = [max(column) for column in zip(*weights, strict=True)]
        ranked = sorted(range(len(largest)), key=lambda i: -largest[i])
        return tuple(sorted(ranked[:MOST_DRAWN]))


def splits(runs: Sequence[RunResult], labels: Sequence[str]) -> tuple[Split, ...]:
    """The runs by label counts, target and client names, in the order of their first run."""
    groups: dict[object, list[int]] = {}
    for i, run in enumerate(runs):
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


def heading(split: Split, runs: Sequence[RunResult]) -> str:
    """A heading with the split's runs; "" if all runs are in it."""
    return f"<h3>{escape(split.name)}</h3>" if len(split.runs) < len(runs) else ""


def left_out(split: Split) -> str:
    """How many clients a figure does not show, in a sentence."""
    count = len(split.runs[0].clients) - len(split.drawn())
    largest = f"The {MOST_DRAWN} clients with the largest weights; "
    return f"{largest}{count} more are in the table." if count else ""
