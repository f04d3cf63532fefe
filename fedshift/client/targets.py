"""Losses for targets in the last columns of x that are not classes: a number, or several labels."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from fedshift.client.objectives import Term, View, batch_mean
from fedshift.data import last_columns


def plain_outputs(out: Tensor) -> Tensor:
    """Outputs [n, L] in the shape of `last_columns`, which they are compared with: [n] if L = 1."""
    return out[:, 0] if out.shape[1] == 1 else out


@dataclass(frozen=True)
class SquaredError(Term):
    """(1/B) sum_b w_b (f_b - y_b)^2, with outputs f [B, 1] and y the last column of x [B, D]."""

    def __call__(self, view: View) -> Tensor:
        wrong = plain_outputs(view.out["logits"]) - last_columns(view.batch.x, 1)
        return batch_mean(wrong**2, view.batch)


@dataclass(frozen=True)
class LabelEntropy(Term):
    """-(1/B) sum_b w_b (1/L) sum_l [y_bl log s_bl + (1 - y_bl) log(1 - s_bl)], s = sigmoid(z).

    Logits z [B, L]; the labels y, 0 or 1, are the last L columns of x [B, D].
    """

    labels: int

    def __call__(self, view: View) -> Tensor:
        due = last_columns(view.batch.x, self.labels)
        losses = F.binary_cross_entropy_with_logits(view.out["logits"], due, reduction="none")
        return batch_mean(losses.mean(1), view.batch)
