"""The report's part on label sets: who holds what, what was absent, where central tuning went."""

from __future__ import annotations

from collections.abc import Sequence

from fedshift.report.label_set_fields import LabelSets
from fedshift.report.layout import fold, note, section, table
from fedshift.report.run_folder import RunResult
from fedshift.report.tables import Cell, Table


def label_sets(runs: Sequence[RunResult], labels: Sequence[str]) -> str:
    """Holders and absences per label, and central tuning per round, for runs that have them."""
    found = [
        (run, label, run.summary.label_sets)
        for run, label in zip(runs, labels, strict=True)
        if run.summary.label_sets is not None
    ]
    if not found:
        return ""
    parts = [table(_holders(run, label, sets)) for run, label, sets in found]
    parts += [fold(_tuning(label, sets)) for _, label, sets in found if _tuned(sets)]
    words = (
        "A label that nobody of a round's cohort holds is absent: its row of the head is averaged "
        "over nobody and stays as it was. Mass on absent labels is the mean probability that the "
        "server's model gives to them on the server's own inputs; central tuning can move it "
        "there, because no client's model speaks against it."
    )
    return section("label-sets", "Label sets", *parts, note(words))


def _holders(run: RunResult, label: str, sets: LabelSets) -> Table:
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        zip(run.summary.classes, sets.holders, sets.absent_rounds, strict=True)
    )
    return Table(("Label", "Clients that hold it", "Rounds absent"), rows, ("", "d", "d"), label)


def _tuned(sets: LabelSets) -> bool:
    return any(row.loss_before is not None for row in sets.rounds)


def _tuning(label: str, sets: LabelSets) -> Table:
    head = (
        "Round", "Absent labels", "Tuning loss before", "after", "Mass on absent labels before",
        "after",
    )  # fmt: skip
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (r.round, r.absent, r.loss_before, r.loss_after, r.outside_before, r.outside_after)
        for r in sets.rounds
    )
    return Table(head, rows, ("d", "d", ".4g", ".4g", ".1%", ".1%"), f"{label}: central tuning")
