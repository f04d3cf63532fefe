"""Which round is best, and when training ends early: decided by the clients' validation alone.

The estimated target accuracy, sum_y T(y) recall(y), decides; in regression it is the estimated
loss. No example of the target is used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from fedshift.data import Task
from fedshift.errors import InputError
from fedshift.experiments.config.schema import Training
from fedshift.record.rounds import Metrics


def check_stopping(training: Training, task: Task) -> None:
    """Raise InputError if rounds are to be compared, but no client holds examples out."""
    chosen = training.patience is not None or training.keep == "best"
    if chosen and not any(len(examples) for examples in task.validation):
        key = "keep" if training.patience is None else "patience"
        raise InputError(
            f"training.{key} compares rounds by the clients' validation examples, and none are "
            "held out; raise the share of validation"
        )


def best_round(metrics: Sequence[Metrics]) -> int:
    """The evaluated round of the best estimate, the first of equals; 0 where none has one."""
    measured = [m for m in metrics if not math.isnan(m.merit)]
    best = max(measured, key=lambda m: m.merit, default=None)
    return 0 if best is None else best.round


def ends(training: Training, metrics: Sequence[Metrics]) -> bool:
    """Whether training is over: no better estimate in the last `training.patience` rounds."""
    if training.patience is None or not metrics:
        return False
    return metrics[-1].round - best_round(metrics) >= training.patience


def sentences(training: Training, metrics: Sequence[Metrics], kept: int) -> list[str]:
    """Sentences on an early end of training, and on a kept model that is not the last round's."""
    played = metrics[-1].round
    lines: list[str] = []
    if played < training.rounds:
        lines.append(
            f"Training ended after round {played} of {training.rounds}: the estimate has not "
            f"become better for {training.patience} rounds."
        )
    if kept != played:
        lines.append(f"The model is that of round {kept}, whose estimate is the best.")
    return lines
