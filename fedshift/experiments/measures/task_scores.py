"""Scores on held-out examples, for each kind of task."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from fedshift.data import Examples, Task, last_columns
from fedshift.estimate import AccuracyEstimate, estimate_target_accuracy, estimate_target_loss
from fedshift.evaluation.scores import Score, Scored, score, score_each
from fedshift.evaluation.serving import by_model
from fedshift.evaluation.targets import LabelScore, NumberScore, score_labels, score_numbers
from fedshift.model import Model
from fedshift.record.rounds import ESTIMATES
from fedshift.tree import Params

# On fewer test examples, an accuracy's interval reaches more than ten points to each side.
FEW = 50
# Numbers beside those that every run has, by the kind of the task.
EXTRA = {
    "classification": (),
    "regression": ("rmse", "mae", "r2", *ESTIMATES),
    "multilabel": ("label_accuracy",),
}


def scored(
    task: Task, model: Model, pair: tuple[Params, Params], examples: Examples, *,
    confusion: bool = False,
) -> Scored:  # fmt: skip
    """The score of one model on examples of the task; pair: its parameters and buffers.

    confusion: in classification, also count which class is taken for which.
    """
    if confusion and task.kind == "classification" and examples.scorer is None:
        return score(model, *pair, examples, len(task.classes), confusion=True)
    return scored_each(task, model, [pair], [examples])[0]


def scored_each(
    task: Task, model: Model, pairs: Sequence[tuple[Params, Params]], sets: Sequence[Examples]
) -> tuple[Scored, ...]:
    """The score of the i-th pair on the i-th set; all sets of one model in one joined pass."""
    scores, classes = dict[int, Scored](), len(task.classes)
    for ids in by_model(pairs):
        # The examples may be at a client's site, which then computes the score.
        scores |= {i: scorer(pairs[i]) for i in ids if (scorer := sets[i].scorer) is not None}
        here = [i for i in ids if i not in scores]
        model_of = (model, *pairs[ids[0]], [sets[i] for i in here])
        each: Sequence[Scored]
        if task.kind == "regression":
            each = score_numbers(*model_of, classes)
        elif task.kind == "multilabel":
            each = score_labels(*model_of, classes, len(task.outputs))
        else:
            each = score_each(*model_of, classes)
        scores |= zip(here, each, strict=True)
    return tuple(scores[i] for i in range(len(sets)))


def estimated(task: Task, pooled: Scored) -> tuple[AccuracyEstimate, dict[str, float]]:
    """(the estimated accuracy at the target, other estimates by name).

    pooled: the score on all clients' validation examples. Regression has no accuracy: it is NaN
    then, with the mass of T that is not measured, and the other estimates have the loss.
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
    """The true answers for examples: labels [n], numbers [n], or labels [n, L] of 0 and 1."""
    return last_columns(examples.x, len(task.outputs)) if task.outputs else examples.y


def few_tests(test: Scored, classes: Sequence[str], target: Sequence[float]) -> list[str]:
    """A sentence on an accuracy of few examples: Wilson's 95 % interval, and the scarcest label.

    Test rows that follow a target's label shares are limited by the label that has fewest rows for
    its share.
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
