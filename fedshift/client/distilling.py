"""Distillation from the model received, over a part of the labels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fedshift.arguments import Positive
from fedshift.client.objectives import Checked, View, batch_mean
from fedshift.client.shares import OfLabels, shares_in


def distilled(view: View, among: Tensor, tau: float) -> Tensor:
    """KL(q^g || q) of each example [B]: q the softmax of z / tau over the labels in `among`.

    q^g is the same for the model received, in evaluation mode, with its buffers and without
    gradient. among is [B, K] or [K], bool; with one label or none in it, the value and its gradient
    are 0.
    """
    with torch.no_grad():
        anchor, buffers = view.context["anchor"], view.context["anchor_buffers"]
        given = view.model(anchor, buffers, view.batch.x)["logits"]
    teacher, student = (_log_shares(z, among, tau) for z in (given, view.out["logits"]))
    return (teacher.exp() * (teacher - student)).sum(1)


def _log_shares(logits: Tensor, among: Tensor, tau: float) -> Tensor:
    # Mask with the lowest number, not minus infinity: masked labels have share 0, and the sum over
    # labels would have 0 times infinity, which is NaN.
    low = torch.finfo(logits.dtype).min
    return F.log_softmax((logits / tau).masked_fill(~among, low), 1)


@dataclass(frozen=True)
class NotTrueDistillation(Checked):
    """(beta/B) sum_b w_b KL(q^g_b || q_b), q_b the softmax of z_b / tau over all labels but y_b.

    q^g is q of the model received. The true label is left to the cross-entropy; the term keeps the
    proportions of the other labels as the server's model has them. With respect to the logits, the
    gradient is beta/(B tau) (q - q^g) for labels other than y_b, and 0 for y_b. With two labels it
    is 0.

    Lee et al. 2022, "Preservation of the global knowledge by not-true distillation in federated
    learning" (FedNTD), arXiv 2106.03097. Raises InputError unless beta > 0 and
    tau > 0: leave the term out for beta = 0.
    """

    beta: Positive = 1.0
    tau: Positive = 1.0

    def reads_classes(self) -> bool:
        return True

    def __call__(self, view: View) -> Tensor:
        logits, y = view.out["logits"], view.batch.y
        among = torch.arange(logits.shape[1], device=y.device) != y[:, None]
        return self.beta * batch_mean(distilled(view, among, self.tau), view.batch)


@dataclass(frozen=True)
class VacantDistillation(OfLabels):
    """(strength/B) sum_b w_b KL(q^g_b || q_b), q_b the softmax of z_b over the labels with S_c = 0.

    S [K] are the client's label shares, q^g is q of the model received. The term keeps what that
    model says about labels of which the client has no example. It is 0 if the client lacks at most
    one label.

    Guo et al. 2025, "Exploring vacant classes in label-skewed federated learning" (FedVLS), arXiv
    2401.02329, as the authors' code computes it. classes is K. Raises InputError unless
    strength > 0: leave the term out for 0.
    """

    strength: Positive = 0.1

    def reads_classes(self) -> bool:
        return True

    def __call__(self, view: View) -> Tensor:
        vacant = shares_in(view) == 0
        return self.strength * batch_mean(distilled(view, vacant, 1.0), view.batch)
