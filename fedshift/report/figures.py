"""Figures for papers: PDF and PNG through matplotlib, which is the extra `report`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedshift.errors import InputError
from fedshift.report.page import run_labels
from fedshift.report.run_folder import RunResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, HEIGHT = 4.5, 3.0  # inches: a column of most proceedings


def save_figures(runs: Sequence[RunResult], folder: Path) -> tuple[Path, ...]:
    """accuracy, weights and ess-curve as PDF and PNG in `folder`; returns what was written.

    Raises InputError without matplotlib or where the folder cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError('figures need matplotlib: pip install "fedshift[report]"') from None
    labels = run_labels(runs)
    written = []
    for name, draw in DRAWINGS.items():
        figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
        draw(figure.subplots(), runs, labels)
        for suffix in ("pdf", "png"):
            path = folder / f"{name}.{suffix}"
            try:
                folder.mkdir(parents=True, exist_ok=True)
                figure.savefig(path, dpi=200, metadata=_METADATA[suffix])
            except OSError as e:
                raise InputError(f"{path}: cannot be written: {e.strerror}") from None
            written.append(path)
    return tuple(written)


def _accuracy(axes: Axes, runs: Sequence[RunResult], labels: Sequence[str]) -> None:
    for run, label in zip(runs, labels, strict=True):
        points = [(r.round, r.values.get("target_accuracy")) for r in run.rounds]
        known = [(t, 100 * v) for t, v in points if v is not None]
        axes.plot([t for t, _ in known], [v for _, v in known], label=label)
    axes.set(xlabel="round", ylabel="target accuracy (%)")
    axes.legend(frameon=False)


def _weights(axes: Axes, runs: Sequence[RunResult], labels: Sequence[str]) -> None:
    width = 0.8 / len(runs)
    for k, (run, label) in enumerate(zip(runs, labels, strict=True)):
        at = [i + (k - (len(runs) - 1) / 2) * width for i in range(len(run.summary.weights))]
        axes.bar(at, [100 * w for w in run.summary.weights], width, label=label)
    axes.set(xlabel="client", ylabel="weight (%)")
    axes.legend(frameon=False)


def _ess_curve(axes: Axes, runs: Sequence[RunResult], labels: Sequence[str]) -> None:
    for run, label in zip(runs, labels, strict=True):
        points = sorted((100 * p.ess_fraction, p.distance) for p in run.summary.curve)
        axes.plot([x for x, _ in points], [y for _, y in points], marker=".", label=label)
    axes.set(xlabel="effective sample size (%)", ylabel=r"$\|T - S^\top\alpha\|_2$")
    axes.legend(frameon=False)


Drawing = Callable[["Axes", Sequence[RunResult], Sequence[str]], None]
DRAWINGS: dict[str, Drawing] = {
    "accuracy": _accuracy,
    "weights": _weights,
    "ess-curve": _ess_curve,
}
# No dates: the same runs give the same files.
_METADATA: dict[str, dict[str, Any]] = {"pdf": {"CreationDate": None}, "png": {"Software": None}}
