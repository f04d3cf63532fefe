"""Evaluation: counts that add, so that clients' parts and batches can be pooled exactly."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fedshift.data import Examples
from fedshift.errors import InputError
from fedshift.model import Model
from fedshift.tree import Params


@dataclass(frozen=True, eq=False)
class Score:
    """What a model got right: correct [K], total [K] (int64) and the summed cross-entropy.

    accuracy = sum_y correct_y / sum_y total_y; recall_y = correct_y / total_y. Scores add.
    """

    correct: Tensor
    total: Tensor
    loss_sum: float

    def __add__(self, other: Score) -> Score:
        return Score(
            self.correct + other.correct, self.total + other.total, self.loss_sum + other.loss_sum
        )

    @property
    def n(self) -> int:
        """Examples scored."""
        return int(self.total.sum())

    @property
    def accuracy(self) -> float:
        """Fraction right; NaN without examples."""
        return int(self.correct.sum()) / self.n if self.n else float("nan")

    @property
    def loss(self) -> float:
        """Mean cross-entropy in nats; NaN without examples."""
        return self.loss_sum / self.n if self.n else float("nan")

    @property
    def recall(self) -> list[float | None]:
        """Fraction right per label; None for a label without examples."""
        pairs = zip(self.correct.tolist(), self.total.tolist(), strict=True)
        return [c / n if n else None for c, n in pairs]


def score(
    model: Model,
    params: Params,
    buffers: Params,
    examples: Examples,
    classes: int,
    *,
    batch: int = 1000,
) -> Score:
    """Score one model on examples x [n, ...], y [n], in blocks of `batch`."""
    if len(examples) and not 0 <= int(examples.y.min()) <= int(examples.y.max()) < classes:
        raise InputError(f"labels must lie in 0..{classes - 1}")
    correct = torch.zeros(classes, dtype=torch.int64)
    loss = 0.0
    with torch.no_grad():
        for start in range(0, len(examples), batch):
            x, y = examples.x[start : start + batch], examples.y[start : start + batch]
            logits = model(params, buffers, x)["logits"]
            correct += torch.bincount(y[logits.argmax(1) == y], minlength=classes)
            loss += float(F.cross_entropy(logits.double(), y, reduction="sum"))
    return Score(correct, torch.bincount(examples.y, minlength=classes), loss)
