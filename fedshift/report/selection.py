"""The report's part on how the effective sample size was chosen."""

from __future__ import annotations

from collections.abc import Sequence

from fedshift.record.folder import RunResult
from fedshift.record.summary import Candidate, Selection
from fedshift.report.layout import note, section, table
from fedshift.report.tables import Cell, Table, finite


def selection(runs: Sequence[RunResult], labels: Sequence[str]) -> str:
    """The section with the candidate that each selection rule would have chosen."""
    parts = [
        table(_candidates(run.summary.selection, label))
        for run, label in zip(runs, labels, strict=True)
        if run.summary.selection is not None
    ]
    if not parts:
        return ""
    words = (
        "The estimate needs no target data. Validation needs labelled data like the target's. "
        "Source is the clients' own pooled validation data, which does not look like the target. "
        "The oracle looks at the test labels that the result is then measured on: it is cheating, "
        "and shown only as the most that any choice could have reached."
    )
    return section("selection", "How the effective sample size was chosen", *parts, note(words))


def _candidates(chosen: Selection, label: str) -> Table:
    head: tuple[str, ...] = (
        "ESS",
        "ESS share",
        "Estimated accuracy",
        "± s.e.",
        "Validation accuracy",
        "Source validation accuracy",
        "Target accuracy (cheating)",
        "Best by",
    )
    best = _best(chosen)
    losses = any(c.losses for c in chosen.candidates)
    rows = tuple(
        (
            f"{c.label} (used)" if c.label == str(chosen.chosen) else c.label,
            c.ess_fraction,
            *_tried(c),
            ", ".join(rule for rule, pick in best.items() if pick == c.label),
        )
        for c in chosen.candidates
    )
    if losses:
        head = tuple(name.replace("accuracy", "squared error") for name in head)
    formats = ("", ".1%", *([".4g" if losses else ".1%"] * 5), "")
    return Table(head, rows, formats, f"{label}: chosen by {chosen.rule}")


def _tried(c: Candidate) -> tuple[Cell, ...]:
    """A candidate's estimate, its error, validation, source and target, as cells of a row."""
    if c.losses:
        names = ("estimated_loss", "estimated_loss_se", "", "source_loss", "target_loss")
        return tuple(finite(c.losses.get(name)) for name in names)
    shares = (c.validation_accuracy, c.source_accuracy, c.target_accuracy)
    return (c.estimated_accuracy, finite(c.estimated_se), *shares)


def _best(selection: Selection) -> dict[str, str]:
    """Rule -> the candidate that it picks."""
    cheating = {"oracle": "oracle (cheating)"}
    return {cheating.get(rule, rule): label for rule, label in (selection.picks or {}).items()}
