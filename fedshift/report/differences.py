"""The report's parts on feature shift: differences between clients, and example weights."""

from __future__ import annotations

from collections.abc import Sequence

from fedshift.record.folder import RunResult
from fedshift.record.summary import Differences
from fedshift.report.charts import Axis, BarChart, Bars, HeatMap, Shades
from fedshift.report.layout import figure, fold, note, section, table
from fedshift.report.splits import client_names, heading, left_out, looked_names, splits
from fedshift.report.tables import Cell, Table, from_columns

AUC_SHADES = Shades("AUC, %:", "none", zero=True, even=True)
MEASURES = (
    ("domain_auc", "AUC of a classifier of which client an input is from"),
    ("js", "labels: Jensen-Shannon divergence, bits"),
    ("hellinger", "labels: Hellinger distance"),
    ("variation", "labels: total variation"),
)


def differences(runs: Sequence[RunResult], labels: Sequence[str]) -> str:
    """The section on how far clients are apart: AUC for pairs of clients, distances of labels."""
    parts: list[str] = []
    for split in splits(runs, labels):
        first = split.runs[0]
        if (d := first.summary.differences) is not None:
            # All runs of a split have the same clients' data, so the first one will do.
            drawing = _auc_map(first, d) if len(d.clients) > 1 else _too_few(first)
            parts += [heading(split, runs), drawing, table(_means(d))]
    if not parts:
        return ""
    text = (
        "AUC: how often a linear classifier, trained to tell two clients' inputs apart, ranks one "
        "of each rightly; 50 % is chance, 100 % means that no input of the one looks like the "
        "other's. Training inputs as the method sees them, a few clients and at most 200 examples "
        "of each; a classifier with curved borders could tell more. The distances of labels are 0 "
        "for clients with the same shares of labels and 1 for clients without a common one."
    )
    return section("differences", "How far clients are apart", *parts, note(text))


def _auc_map(run: RunResult, d: Differences) -> str:
    names, short = looked_names(run), client_names(run)
    notes = tuple(
        tuple(
            f"{names[i]} against {names[j]}: {'–' if value is None else f'{value:.1%}'}"
            for j, value in zip(d.clients, line, strict=True)
        )
        for i, line in zip(d.clients, d.domain_auc, strict=True)
    )
    title = "How well two clients' inputs can be told apart"
    rows, columns = (tuple(of[i] for i in d.clients) for of in (names, short))
    drawing = HeatMap(title, rows, columns, d.domain_auc, notes, AUC_SHADES)
    return figure(drawing, f"Training inputs of {len(d.clients)} of {len(names)} clients.")


def _too_few(run: RunResult) -> str:
    return note(
        "Too few examples: no two clients have enough training inputs (5 or more) for a classifier "
        f"that tells them apart; the run has {len(run.clients)} client"
        f"{'s' * (len(run.clients) != 1)}."
    )


def _means(d: Differences) -> Table:
    rows = tuple((meaning, d.mean.get(key), d.mean_all.get(key)) for key, meaning in MEASURES)
    among_shown = f"Mean over pairs of {len(d.clients)} clients"
    return Table(("Measure", among_shown, "Mean over all pairs"), rows, ("", ".3f", ".3f"))


def importance(runs: Sequence[RunResult], labels: Sequence[str]) -> str:
    """The section on example weights: the effective sample size that they leave each client."""
    parts: list[str] = []
    for split in splits(runs, labels):
        weighted = [
            (label, run.summary.importance)
            for label, run in zip(split.labels, split.runs, strict=True)
            if run.summary.importance is not None
        ]
        if not weighted:
            continue
        names, drawn = client_names(split.runs[0]), split.drawn()
        bars = tuple(Bars(b, tuple(i.share[k] for k in drawn)) for b, i in weighted)
        title = "Effective share of each client's examples"
        axis = Axis("effective sample size, share of n", percent=True)
        drawing = BarChart(title, tuple(names[k] for k in drawn), bars, axis)
        columns: list[tuple[str, Sequence[Cell]]] = [(b, i.ess) for b, i in weighted]
        numbers = from_columns("Client", names, columns, ".1f", [_sizes(split.runs[0])])
        parts += [heading(split, runs), figure(drawing, left_out(split)), fold(numbers)]
    if not parts:
        return ""
    text = (
        "Examples are weighed by how much likelier they are in all clients' data than in the "
        "client's own. The effective sample size is (Σ a)² / Σ a²: that many equally weighted "
        "examples have the same variance. A share near 100 % means weights near 1, which change "
        "little; a small one means that few examples carry the client."
    )
    return section("importance", "Weights of examples", *parts, note(text))


def _sizes(run: RunResult) -> tuple[str, Sequence[Cell], str]:
    return "n", tuple(c.n for c in run.clients), ".0f"
