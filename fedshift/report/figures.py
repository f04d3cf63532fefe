"""The charts of run folders as figures for papers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedshift.record.folder import RunResult
from fedshift.report.by_round import accuracy_chart, loss_chart
from fedshift.report.charts import Chart
from fedshift.report.pools import firsts, pools
from fedshift.report.printed import save
from fedshift.report.routing import risk_of_runs
from fedshift.report.sections import curve_chart, recall_chart, weights_chart
from fedshift.report.serving import own_map, served_chart
from fedshift.report.splits import serving_runs, splits


def save_figures(runs: Sequence[RunResult], folder: Path) -> tuple[Path, ...]:
    """Write the page's charts as PDF and PNG to `folder`; returns the files.

    Runs with one target have accuracy, loss, recall, weights and ess-curve. Runs whose clients
    serve models of their own have system-accuracy and own-accuracy, and with a router
    risk-coverage.

    Raises InputError without matplotlib, and if the folder cannot be written.
    """
    lines = pools(runs)
    # Two groups, since their accuracies do not mean the same.
    served = [line for line in lines if line.first.summary.serving]
    single = [line for line in lines if line not in served]
    charts: dict[str, Sequence[Chart]] = {}
    if single:
        of, labels = firsts(single)
        charts["accuracy"] = [accuracy_chart(single)]
        charts["loss"] = [loss_chart(single)]
        if all(run.summary.kind != "regression" for run in of):
            charts["recall"] = [recall_chart("Accuracy per class", single)]
        charts["weights"] = [weights_chart(split) for split in splits(of, labels)]
        charts["ess-curve"] = [curve_chart(of, labels)]
    if served:
        of, labels = firsts(served)
        details = serving_runs(of, labels)
        charts["system-accuracy"] = [served_chart(served, "system_accuracy", "system accuracy")]
        charts["own-accuracy"] = [own_map(run, label, s) for run, label, s in details]
        routed = [(label, s.router) for _, label, s in details if s.router is not None]
        charts |= {"risk-coverage": [risk_of_runs(routed)]} if routed else {}
    return save(charts, folder)
