"""The report's parts on regression, with errors in place of accuracies."""

from __future__ import annotations

from collections.abc import Sequence

from fedshift.record.folder import RunResult
from fedshift.record.headline import headline, measured_on, target_words, validated_by
from fedshift.report.folding import of_clients, pool_tables
from fedshift.report.layout import fold, note, section
from fedshift.report.pools import Pool, runs_of
from fedshift.report.splits import client_names, heading, splits
from fedshift.report.tables import Cell, Table, finite, from_columns

MEASURES = ("rmse", "estimated_rmse", "mae", "r2")


def results(lines: Sequence[Pool]) -> str:
    """The section with the table of methods."""
    header = (
        "Run", "Target RMSE", "MAE", "R²", "Estimated RMSE", "ESS", "ESS share", "Hull distance",
        "L1 distance", "Round",
    )  # fmt: skip
    rows: list[tuple[Cell, ...]] = []
    for run, label in runs_of(lines):
        s, main = run.summary, headline(run.summary)
        # The estimate of a single run is shown with its standard error. With several seeds the
        # table shows deviations over seeds instead.
        alone = all(len(line.runs) == 1 for line in lines)
        rmse, near, *errors = (finite(s.final.others.get(k)) for k in MEASURES)
        estimate = main.estimate if alone else near
        weights = (s.ess, s.ess_fraction, s.hull_distance, s.l1_distance)
        rows.append((label, rmse, *errors, estimate, *weights, s.final.round))
    formats = ("", ".4g", ".4g", ".3f", ".4g", ".0f", ".1%", ".4f", ".4f", "d")
    targets = [target_words(run.fit, run.config) for run, _ in runs_of(lines)]
    text = (
        "Errors are in the units of what is predicted, and are measured on "
        f"{measured_on(targets)}: root mean squared error, mean absolute error, and the "
        "share of the variance that is explained (R²). The estimate needs none: it is "
        "the clients' mean squared error in each bin of the numbers, weighted by the target's "
        "shares of the bins, under a root, ± one standard error. ESS, the effective sample size, "
        "is the number of examples that equally weighted data would need for the same variance. "
    ) + validated_by(run.deployed for run, _ in runs_of(lines))
    numbers = pool_tables(Table(header, tuple(rows), formats), lines)
    return section("results", "Results", *numbers, note(text))


def clients(runs: Sequence[RunResult], labels: Sequence[str]) -> str:
    """The section with every client's error."""
    parts = []
    for split in splits(runs, labels):
        columns = [
            (f"{label}, {name.upper()}", tuple(map(finite, values)))
            for label, run in zip(split.labels, split.runs, strict=True)
            for name, values in run.summary.final.client_metrics.items()
        ]
        numbers = from_columns("Client", client_names(split.runs[0]), columns, ".4g")
        parts += [heading(split, runs), fold(of_clients(numbers, split))]
    text = "On each client's own test data where it has some, else on its validation data."
    return section("clients", "The clients", note(text), *parts)
