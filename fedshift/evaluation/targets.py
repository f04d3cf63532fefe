"""Scores of predicted numbers, and of several labels per example; they add like `Score`s."""

from __future__ import annotations

import math
from collections.abc import Sequence
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
    model: Model, params: Params, buffers: Params, sets: Sequence[Examples], bins: int
) -> list[NumberScore]:
    """Score one model on sets whose numbers are the last column of x [n, D]; y [n] is bins.

    One joined pass over the rows of all sets.
    """

    with undrawn(model.net):
        # float64 throughout, so that the result hardly depends on the size of the blocks.
        M = len(sets)
        by_bin = torch.zeros(M * bins, 2, dtype=torch.float64)
        total = torch.zeros(M * bins, dtype=torch.int64)
        sums = torch.zeros(M, 3, dtype=torch.float64)
        for out, x, y, part in answered(model, params, buffers, sets):
            truth = last_columns(x, 1).double()
            off = out[:, 0].double() - truth
            by_bin.index_add_(0, part * bins + y, torch.stack([off**2, off**4], 1))
            total.index_add_(0, part * bins + y, torch.ones_like(y))
            sums.index_add_(0, part, torch.stack([off.abs(), truth, truth**2], 1))
        squares, fourths = by_bin.view(M, bins, 2).unbind(2)
        losses = squares.sum(1).tolist()
        rows = zip(total.view(M, bins), losses, squares, fourths, sums.tolist(), strict=True)
        return [NumberScore(n, loss, a, b, *more) for n, loss, a, b, more in rows]


def score_labels(
    model: Model, params: Params, buffers: Params, sets: Sequence[Examples], classes: int,
    labels: int,
) -> list[LabelScore]:  # fmt: skip
    """Score one model on sets whose L labels are the last columns of x; y [n] is their class.

    One joined pass over the rows of all sets.
    """

    with undrawn(model.net):
        M = len(sets)
        correct, total = torch.zeros(2, M * classes, dtype=torch.int64)
        counts = torch.zeros(M, 4, labels, dtype=torch.int64)
        loss = torch.zeros(M, dtype=torch.float64)
        for out, x, y, part in answered(model, params, buffers, sets):
            due = x[:, x.shape[1] - labels :]
            each = F.binary_cross_entropy_with_logits(out.double(), due.double(), reduction="none")
            loss.index_add_(0, part, each.mean(1))
            present, given = due > 0, out > 0
            right, cell = present == given, part * classes + y
            correct.index_add_(0, cell, right.all(1).long())
            total.index_add_(0, cell, torch.ones_like(y))
            kinds = torch.stack([right, present, given, present & given], 1)
            counts.index_add_(0, part, kinds.long())
        tables = total.view(M, classes), correct.view(M, classes), loss.tolist(), counts
        return [LabelScore(n, c, sum_, *more) for n, c, sum_, more in zip(*tables, strict=True)]
