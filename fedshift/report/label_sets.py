"""The report's part on label sets: who holds each label, absent labels, and central tuning."""

from __future__ import annotations

from collections.abc import Sequence

from fedshift.record.folder import RunResult
from fedshift.record.summary import LabelSets
from fedshift.report.layout import fold, note, section, table
from fedshift.report.tables import Cell, Table

PAYS = (
    "Will tuning pay? On the server's labelled examples: accuracy of the round's aggregate, and "
    "how many points more the exact minimiser of each loss has, input by input, with no network "
    "between, and its standard error. A gain within two of these may be none. Below 0 the loss "
    "itself leads away from the truth, and more steps make it worse. Forecasts were tried for "
    "round 1 alone."
)
DOUBT = (
    ' With mode = "private" the optima of MSE and of the pairwise loss did not tell in our runs '
    "whether tuning gains; that of KL did."
)


def label_sets(runs: Sequence[RunResult], labels: Sequence[str]) -> str:
    """The section on label sets, for the runs that have them; "" without such runs."""
    with_sets = [
        (run, label, run.summary.label_sets)
        for run, label in zip(runs, labels, strict=True)
        if run.summary.label_sets is not None
    ]
    if not with_sets:
        return ""
    parts = [table(_runs(with_sets))]
    parts += [table(_holders(run, label, sets)) for run, label, sets in with_sets]
    parts += [
        fold(_tuning(label, sets))
        for _, label, sets in with_sets
        if any(row.loss_before is not None for row in sets.rounds)
    ]
    measured = [(label, sets) for _, label, sets in with_sets if any(r.optima for r in sets.rounds)]
    parts += [table(_prospects(label, sets)) for label, sets in measured]
    if measured:
        private = any(sets.mode == "private" for _, sets in measured)
        parts.append(note(PAYS + DOUBT * private))
    return section(
        "label-sets", "Label sets", *parts, note(_explanation([sets for _, _, sets in with_sets]))
    )


def _prospects(label: str, sets: LabelSets) -> Table:
    """By round, the aggregate's accuracy, and the points that the optimum of each loss has more."""
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (r.round, r.optima.aggregate, *(r.optima.gain_text(loss) for loss in r.optima.gains))
        for r in sets.rounds
        if r.optima
    )
    head = ("Round", "Aggregate", "MSE's optimum minus it", "pairwise", "KL")
    on = "" if sets.labelled is None else f" ({sets.labelled:,} labelled examples)"
    return Table(head, rows, ("d", ".1%", "+.1f", "+.1f", "+.1f"), f"{label}: will tuning pay?{on}")


def _explanation(sets_of_runs: Sequence[LabelSets]) -> str:
    """An explanation of absent labels that is true of all these runs."""
    # Runs of several methods may be on one page, in which absent labels are treated differently.
    ways = {sets.rows_move for sets in sets_of_runs}
    stays = (
        "its row of the head is averaged over no client and stays as it was"
        + (" (but for mode public and tuning over all labels)" if ways != {False} else "")
        + "."
    )
    moves = (
        "its row of the head moves all the same: in mode public by every client's softmax over all "
        "labels, in central tuning over all labels by the server's steps."
    )
    return (
        "A label that no client of a round's cohort holds is absent: "
        f"{moves if ways == {True} else stays} Mass on absent labels is the mean probability that "
        "the server's model gives to them on the server's own inputs; in mode private central "
        "tuning over all labels can move it there, because no client's model speaks against it."
    )


def _runs(runs: Sequence[tuple[RunResult, str, LabelSets]]) -> Table:
    """How each run treats labels, and the size of its messages."""
    head = (
        "Run", "Mode", "Central tuning", "Bytes down per client and round", "up",
        "Bytes of the whole model",
    )  # fmt: skip
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (label, sets.mode, _tuning_of(sets), end.bytes_down, end.bytes_up, end.bytes_model)
        for run, label, sets in runs
        for end in (run.summary.final,)
    )
    return Table(head, rows, ("", "", "", ",.0f", ",.0f", ",.0f"))


def _tuning_of(sets: LabelSets) -> str | None:
    over = {"all": "all labels", "union": "labels that the cohort holds"}
    return sets.tune if sets.tune_over is None else f"{sets.tune}, over {over[sets.tune_over]}"


def _holders(run: RunResult, label: str, sets: LabelSets) -> Table:
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        zip(run.summary.classes, sets.holders, sets.absent_rounds, strict=True)
    )
    return Table(("Label", "Clients that hold it", "Rounds absent"), rows, ("", "d", "d"), label)


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
