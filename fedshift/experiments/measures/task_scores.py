"""What is measured on held-out examples, for each kind of task."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from fedshift.data import Examples, Task, last_columns
from fedshift.estimate import AccuracyEstimate, estimate_target_accuracy, estimate_target_loss
from fedshift.evaluation.scores import Score, Scored, score
from fedshift.evaluation.targets import LabelScore, NumberScore, score_labels, score_numbers
from fedshift.model import Model
from fedshift.record.rounds import ESTIMATES
from fedshift.tree import Params

# Numbers beside those that every run has, by the kind of the task.
# On fewer test examples than this, an accuracy is open by more than ten points to each side.
FEW = 50
EXTRA = {
    "classification": (),
    "regression": ("rmse", "mae", "r2", *ESTIMATES),
    "multilabel": ("label_accuracy",),
}


def scored(
    task: Task, model: Model, pair: tuple[Params, Params], examples: Examples, *,
    confusion: bool = False,
) -> Scored:  # fmt: skip
    """One model on examples of the task; pair: its parameters and buffers.

    confusion: also count which class is taken for which, where classes are predicted.
    """
    if examples.scorer is not None:
        elsewhere: Scored = examples.scorer(pair)
        return elsewhere
    classes = len(task.classes)
    if task.kind == "regression":
        return score_numbers(model, *pair, examples, classes)
    if task.kind == "multilabel":
        return score_labels(model, *pair, examples, classes, len(task.outputs))
    return score(model, *pair, examples, classes, confusion=confusion)


def estimated(task: Task, pooled: Scored) -> tuple[AccuracyEstimate, dict[str, float]]:
    """(the estimated accuracy at the target, other estimates by name).

    pooled: of all clients' validation examples. Numbers to predict have no accuracy: NaN, beside
    the mass of T that is not measured, and the estimated loss.
    """
    target = task.target.numpy()
    if isinstance(pooled, Score | LabelScore):
        return estimate_target_accuracy(pooled.correct, pooled.total, target), {}
    assert isinstance(pooled, NumberScore)
    loss = estimate_target_loss(pooled.squares, pooled.fourths, pooled.total, target)
    nothing = np.full(len(target), math.nan)
    return AccuracyEstimate(math.nan, math.nan, nothing, loss.unmeasured_mass), {
        "estimated_loss": loss.loss,
        "estimated_loss_se": loss.standard_error,
        "estimated_rmse": math.sqrt(loss.loss),
        "source_loss": pooled.loss,
    }


def truth(task: Task, examples: Examples) -> Tensor:
    """What is to be predicted of examples: labels [n], numbers [n] or labels [n, L] of 0 and 1."""
    return last_columns(examples.x, len(task.outputs)) if task.outputs else examples.y


def few_tests(test: Scored, classes: Sequence[str], target: Sequence[float]) -> list[str]:
    """A sentence on an accuracy of few examples: its interval, and the label that is scarcest.

    Test rows that are drawn to follow a target's labels are as few as its scarcest label makes
    them. Wilson's 95 % interval.
    """
    if not isinstance(test, Score) or not 0 < test.n < FEW:
        return []
    from scipy.stats import binomtest  # takes a third of a second, and few runs need it

    low, high = binomtest(int(test.correct.sum()), test.n).proportion_ci(method="wilson")
    per_share = [
        t / p if p > 0 else math.inf for t, p in zip(test.total.tolist(), target, strict=True)
    ]
    scarcest = int(np.argmin(per_share))
    return [
        f"Target accuracy is measured on {test.n} test examples alone: by them it lies between "
        f'{low:.0%} and {high:.0%} (95 % interval). "{classes[scarcest]}" has '
        f"{int(test.total[scarcest])} of them, and its share of the target bounds the others."
    ]
