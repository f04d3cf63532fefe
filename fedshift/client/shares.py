"""Terms that depend on the client's label counts n_c, or on its label shares S_c."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedshift.arguments import Positive
from fedshift.client.objectives import Checked, View, adjusted_entropy
from fedshift.data import ClientData, label_counts
from fedshift.tree import Params, Parts

# Added to shares before their logarithm, as the FedVLS authors' code does.
LEAST = 1e-9
# Stands for an infinite margin: exp(-MISSING) is 0 in every floating type, and float16 can
# represent MISSING itself.
MISSING = 1e4


@dataclass(frozen=True)
class OfLabels(Checked):
    """A term that needs the client's label counts; classes is K."""

    classes: int

    def remember(self, params: Params, buffers: Params, data: ClientData) -> Parts:
        # One name for all of these terms, so that the client keeps its counts once.
        return {"labels": {"counts": label_counts(data, self.classes)}}


def counts_in(view: View) -> Tensor:
    """n [K], in float64: float16 has no counts above 65504, and no shares below 6e-8."""
    return view.context["labels"]["counts"].double()


def shares_in(view: View) -> Tensor:
    """S [K], in float64."""
    counts = counts_in(view)
    return counts / counts.sum().clamp(min=1.0)  # clamp: 0, not NaN, for a client without examples


@dataclass(frozen=True)
class CountAdjusted(OfLabels):
    """-(1/B) sum_b w_b log softmax(z_b + log max(n, least))[y_b], n [K] the client's label counts.

    The model learns the logits that fit equally frequent labels; the client's counts are added in
    training only (Ren et al. 2020, balanced softmax, arXiv 2007.10740). A label that the client
    lacks counts as `least` examples: 1 as in FedETF's code; with a tiny number the label hardly
    takes part. With respect to the logits, the gradient is
    w_b/B (softmax(z + log max(n, least)) - 1_y). Replaces `CrossEntropy`, to which it is exactly
    equal if all counts are equal.

    classes is K. Raises InputError unless least > 0.
    """

    least: Positive = 1.0

    def __call__(self, view: View) -> Tensor:
        counts = counts_in(view).clamp(min=self.least)
        # A common factor of the counts does not change the softmax. Dividing by the mean makes
        # equal counts add exactly 0.
        logits = view.out["logits"]
        logits = logits + (counts / counts.mean()).log().to(logits.dtype)
        return adjusted_entropy(logits, view.batch)


@dataclass(frozen=True)
class CountMargins(OfLabels):
    """-(1/B) sum_b w_b log softmax(z_b - m)[y_b], m_c = tau n_c^{-1/4}, n [K] the label counts.

    The rarer a label, the more its logit must exceed the others'. A label that the client lacks has
    an infinite margin: it is left out of the softmax. With respect to the logits, the gradient is
    w_b/B (softmax(z - m) - 1_y). Replaces `CrossEntropy` in training only; with equal counts it is
    exactly equal to it.

    Zhang et al. 2022, "Federated learning with label distribution skew via logits calibration"
    (FedLC), arXiv 2209.00189. classes is K. Raises InputError unless tau > 0.
    """

    tau: Positive = 1.0

    def __call__(self, view: View) -> Tensor:
        counts = counts_in(view)
        margins = self.tau * counts.clamp(min=1.0).pow(-0.25)
        # A constant added to all margins does not change the softmax. Subtracting the smallest
        # makes equal counts subtract exactly 0. MISSING instead of infinity, because a client
        # without examples would get NaN.
        margins = torch.where(counts > 0, margins - margins.min(), MISSING)
        logits = view.out["logits"]
        return adjusted_entropy(logits - margins.to(logits.dtype), view.batch)


@dataclass(frozen=True)
class ShareScaled(OfLabels):
    """-(1/B) sum_b w_b log softmax(K S_c z_c)[y_b], S [K] the client's label shares.

    Scaling the logits of a classifier without bias is the same as scaling its rows: on an ETF the
    client trains its features against directions v_c of length K S_c. The logit of a label that it
    lacks becomes 0, not minus infinity. Replaces `CrossEntropy` in training only, to which it is
    equal if all shares are equal.

    Fan et al. 2023, "Federated learning with bilateral curation for partially class-disjoint data"
    (FedGELA), arXiv 2405.18972. classes is K.
    """

    def __call__(self, view: View) -> Tensor:
        logits = view.out["logits"]
        scaled = logits * (self.classes * shares_in(view)).to(logits.dtype)
        return adjusted_entropy(scaled, view.batch)


@dataclass(frozen=True)
class LogitSuppression(OfLabels):
    """strength sum_c S_c log( (1/B) sum_b w_b e^{u_bc} ), u_bc = z_bc - log(K S_c); 0 if y_b = c.

    It pushes down the logit for c of examples with other labels; more strongly for labels that are
    frequent at the client, because its model predicts those too often. Labels that the client lacks
    are left out. With respect to the logits, the gradient is
    strength S_c w_b e^{u_bc} / sum_b' w_b' e^{u_b'c} if y_b != c, and 0 if y_b = c.

    Guo et al. 2025, "Exploring vacant classes in label-skewed federated learning" (FedVLS), arXiv
    2401.02329, as the authors' code computes it. classes is K. Raises InputError unless
    strength > 0: leave the term out for 0.
    """

    strength: Positive = 0.005

    def reads_classes(self) -> bool:
        return True

    def __call__(self, view: View) -> Tensor:
        logits, y, shares = view.out["logits"], view.batch.y, shares_in(view)
        u = logits - torch.log(self.classes * (shares + LEAST)).to(logits.dtype)
        others = torch.arange(self.classes, device=y.device) != y[:, None]
        # Padding has weight 0, and log 0 = -inf would make NaN of a batch that is all padding.
        w = view.batch.w.to(u.dtype).clamp(min=torch.finfo(u.dtype).tiny)
        sums = torch.logsumexp(u * others + w.log()[:, None], 0)
        return (
            self.strength * (shares.to(u.dtype) * (sums - view.batch.size.to(u.dtype).log())).sum()
        )
