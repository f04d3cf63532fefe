"""Figures for papers: PDF and PNG through matplotlib, which is the extra `report`."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedshift.errors import InputError, visible
from fedshift.files import write
from fedshift.record.folder import RunResult
from fedshift.record.rounds import Round
from fedshift.report.page import run_labels
from fedshift.report.routing import shown_curve
from fedshift.report.splits import looked_names, serving_runs

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH, HEIGHT = 4.5, 3.0  # inches: a column of most proceedings


def save_figures(runs: Sequence[RunResult], folder: Path) -> tuple[Path, ...]:
    """Figures as PDF and PNG in `folder`; returns what was written.

    accuracy, weights and ess-curve of runs with one target; system-accuracy, own-accuracy and, of
    those with a router, risk-coverage of runs whose clients serve models of their own.

    Raises InputError without matplotlib or where the folder cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError('figures need matplotlib: pip install "fedshift[report]"') from None
    except (OSError, RuntimeError) as e:
        # matplotlib makes folders below the user's home, or among the temporary files.
        raise InputError(
            f"figures need matplotlib, which cannot begin: {e}; name a folder that it may write to "
            "in $MPLCONFIGDIR"
        ) from None
    labels = run_labels(runs)
    written = []
    for name, draw, places in _plan(runs):
        figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
        draw(figure, [runs[i] for i in places], [labels[i] for i in places])
        for suffix in ("pdf", "png"):
            buffer = io.BytesIO()
            figure.savefig(buffer, format=suffix, dpi=200, metadata=_METADATA[suffix])
            written.append(folder / f"{name}.{suffix}")
            write(written[-1], buffer.getvalue())
    return tuple(written)


def _plan(runs: Sequence[RunResult]) -> list[tuple[str, Drawing, list[int]]]:
    """(file name, drawing, places of the runs that it shows)."""
    served = [i for i, r in enumerate(runs) if r.summary.serving]
    routed = [i for i in served if (s := runs[i].summary.serving) and s.router]
    # A run is in one group or the other: its accuracies mean different things.
    single = [i for i in range(len(runs)) if i not in served]
    figures = [
        *((name, draw, single) for name, draw in DRAWINGS.items()),
        ("system-accuracy", _system, served),
        ("own-accuracy", _client_accuracy, served),
        ("risk-coverage", _risk, routed),
    ]
    return [plan for plan in figures if plan[2]]


def _accuracy(figure: Figure, runs: Sequence[RunResult], labels: Sequence[str]) -> None:
    errors = all(run.summary.kind == "regression" for run in runs)
    column = "rmse" if errors else "target_accuracy"
    _by_round(figure, [run.rounds for run in runs], labels, column, 1 if errors else 100)


def _system(figure: Figure, runs: Sequence[RunResult], labels: Sequence[str]) -> None:
    _by_round(figure, [run.served for run in runs], labels, "system_accuracy")


def _by_round(
    figure: Figure, rounds: Sequence[Sequence[Round]], labels: Sequence[str], column: str,
    scale: int = 100,
) -> None:  # fmt: skip
    """A line per run: one column of its rounds, which are fractions unless scale is 1."""
    axes = figure.subplots()
    for rows, label in zip(rounds, labels, strict=True):
        points = [(r.round, r.values.get(column)) for r in rows]
        measured = [(t, scale * v) for t, v in points if v is not None]
        axes.plot([t for t, _ in measured], [v for _, v in measured], label=label)
    axes.set(xlabel="round", ylabel=column.replace("_", " ") + " (%)" * (scale == 100))
    axes.legend(frameon=False)


def _weights(figure: Figure, runs: Sequence[RunResult], labels: Sequence[str]) -> None:
    axes = figure.subplots()
    width = 0.8 / len(runs)
    for k, (run, label) in enumerate(zip(runs, labels, strict=True)):
        positions = [i + (k - (len(runs) - 1) / 2) * width for i in range(len(run.summary.weights))]
        axes.bar(positions, [100 * w for w in run.summary.weights], width, label=label)
    axes.set(xlabel="client", ylabel="weight (%)")
    axes.legend(frameon=False)


def _ess_curve(figure: Figure, runs: Sequence[RunResult], labels: Sequence[str]) -> None:
    axes = figure.subplots()
    for run, label in zip(runs, labels, strict=True):
        # Sorted along the x axis: a curve is written from the largest ESS down.
        points = sorted((100 * p.ess_fraction, p.distance) for p in run.summary.curve)
        axes.plot([x for x, _ in points], [y for _, y in points], marker=".", label=label)
    axes.set(xlabel="effective sample size (%)", ylabel=r"$\|T - S^\top\alpha\|_2$")
    axes.legend(frameon=False)


def _client_accuracy(figure: Figure, runs: Sequence[RunResult], labels: Sequence[str]) -> None:
    """A heat map per run, clients by classes."""
    # The height follows the clients, so that their names do not overlap.
    largest = max(len(r.clients) for r in runs)
    figure.set_size_inches(WIDTH + 1.5, len(runs) * (1.2 + 0.2 * largest))
    grid = figure.subplots(len(runs), 1, squeeze=False)
    for axes, (run, label, serving) in zip(grid[:, 0], serving_runs(runs, labels), strict=True):
        cells = [
            [float("nan") if v is None else 100 * v for v in r] for r in serving.class_accuracy
        ]
        image = axes.imshow(cells, cmap="Blues", vmin=0, vmax=100, aspect="auto")
        # parse_math=False below: a "$" in a name must not start a formula.
        classes, names = (list(map(visible, n)) for n in (run.summary.classes, looked_names(run)))
        axes.set_xticks(range(len(classes)), classes, rotation=90, fontsize=6, parse_math=False)
        axes.set_yticks(range(len(names)), names, fontsize=6, parse_math=False)
        axes.set_title(label, fontsize=8)
        axes.set_facecolor("0.85")
        bar = figure.colorbar(image, ax=axes)
        bar.set_label("own model's accuracy (%)\ngrey: no tests", fontsize=6)
        bar.ax.tick_params(labelsize=6)


def _risk(figure: Figure, runs: Sequence[RunResult], labels: Sequence[str]) -> None:
    axes = figure.subplots()
    for _, label, serving in serving_runs(runs, labels):
        if serving.router is not None:
            x, y = shown_curve(serving.router.coverage, serving.router.risk)
            axes.plot([100 * v for v in x], [100 * v for v in y], label=label)
    axes.set(xlabel="coverage (%)", ylabel="risk (%)", xlim=(0, 100))
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)


Drawing = Callable[["Figure", Sequence[RunResult], Sequence[str]], None]
DRAWINGS: dict[str, Drawing] = {
    "accuracy": _accuracy,
    "weights": _weights,
    "ess-curve": _ess_curve,
}
# No dates in the files: the same runs give the same bytes.
_METADATA: dict[str, dict[str, Any]] = {"pdf": {"CreationDate": None}, "png": {"Software": None}}
