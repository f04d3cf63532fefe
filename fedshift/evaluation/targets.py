"""Scores of predicted numbers, and of several labels per example; they add like `Score`s."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fedshift.data import Examples, last_columns
from fedshift.evaluation.scores import Scored, answered
from fedshift.model import Model
from fedshift.randomness import undrawn
from fedshift.sketch import sketched
from fedshift.tree import Params


@sketched
@dataclass(frozen=True, eq=False)
class NumberScore(Scored):
    """How far predicted numbers are off, by the bin k of the true number. No accuracy: NaN.

    total             [K] int64: examples by bin; loss_sum: the sum of e^2
    squares, fourths  [K] float64: sums of e^2 and of e^4, e = prediction - truth
    absolute          sum |e|; first, second: sums of the truth y and of y^2
    """

    total: Tensor
    loss_sum: float
    squares: Tensor
    fourths: Tensor
    absolute: float
    first: float
    second: float

    @property
    def accuracy(self) -> float:
        return math.nan

    @property
    def macro_f1(self) -> float:
        return math.nan

    @property
    def recall(self) -> list[float | None]:
        return [None] * len(self.total)

    @property
    def others(self) -> dict[str, float]:
        """Root mean squared error and mean absolute error, in units of y, and R^2.

        R^2 = 1 - sum e^2 / sum (y - mean y)^2; NaN where all y are equal.
        """
        if not self.n:
            return dict.fromkeys(("rmse", "mae", "r2"), math.nan)
        spread = self.second - self.first**2 / self.n
        # Rounding of the sums: even for equal numbers the difference is not exactly 0.
        varies = spread > 1e-12 * self.second
        r2 = 1.0 - self.loss_sum / spread if varies else math.nan
        return {"rmse": math.sqrt(self.loss), "mae": self.absolute / self.n, "r2": r2}


@sketched
@dataclass(frozen=True, eq=False)
class LabelScore(Scored):
    """Which sets of labels were predicted exactly, by the set's class, and each of the L labels.

    A label is predicted where its logit is above 0. total, correct [K]: examples of a set, and
    those of which all labels are right. right, present, given [L]: where the label is right, is
    there, is predicted; hits: where it is there and predicted.
    """

    total: Tensor
    correct: Tensor
    loss_sum: float
    right: Tensor
    present: Tensor
    given: Tensor
    hits: Tensor

    @property
    def accuracy(self) -> float:
        return int(self.correct.sum()) / self.n if self.n else math.nan

    @property
    def recall(self) -> list[float | None]:
        pairs = zip(self.correct.tolist(), self.total.tolist(), strict=True)
        return [c / n if n else None for c, n in pairs]

    @property
    def macro_f1(self) -> float:
        """The mean of F1_l = 2 hits_l / (present_l + given_l) over the labels l that occur."""
        some = self.present > 0
        return float((2.0 * self.hits[some].double() / (self.present + self.given)[some]).mean())

    @property
    def others(self) -> dict[str, float]:
        """The share of right labels, the mean over all labels."""
        share = self.right.double() / self.n if self.n else torch.full((1,), math.nan)
        return {"label_accuracy": float(share.mean())}


def score_numbers(
    model: Model, params: Params, buffers: Params, examples: Examples, bins: int
) -> NumberScore:
    """Score one model on examples whose numbers are the last column of x [n, D]; y [n] is bins."""

    def compute() -> NumberScore:
        # float64 throughout, so that the result hardly depends on the size of the blocks.
        by_bin = torch.zeros(2, bins, dtype=torch.float64)
        sums = torch.zeros(3, dtype=torch.float64)
        for out, x, y in answered(model, params, buffers, examples):
            truth = last_columns(x, 1).double()
            off = out[:, 0].double() - truth
            by_bin.index_add_(1, y, torch.stack([off**2, off**4]))
            sums += torch.stack([off.abs().sum(), truth.sum(), (truth**2).sum()])
        total = torch.bincount(examples.y, minlength=bins)
        return NumberScore(total, float(by_bin[0].sum()), *by_bin, *sums.tolist())

    with undrawn(model.net):
        return compute()


def score_labels(
    model: Model, params: Params, buffers: Params, examples: Examples, sets: int, labels: int
) -> LabelScore:
    """Score one model on examples whose L labels are the last columns of x; y [n] is their sets."""

    def compute() -> LabelScore:
        correct, loss = torch.zeros(sets, dtype=torch.int64), 0.0
        counts = torch.zeros(4, labels, dtype=torch.int64)
        for out, x, y in answered(model, params, buffers, examples):
            due = x[:, x.shape[1] - labels :]
            loss += float(F.binary_cross_entropy_with_logits(out.double(), due.double()) * len(y))
            present, given = due > 0, out > 0
            right = present == given
            correct += torch.bincount(y[right.all(1)], minlength=sets)
            counts += torch.stack([v.sum(0) for v in (right, present, given, present & given)])
        total = torch.bincount(examples.y, minlength=sets)
        return LabelScore(total, correct, loss, *counts)

    with undrawn(model.net):
        return compute()
