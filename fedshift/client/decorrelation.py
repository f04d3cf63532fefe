"""Features that do not repeat one another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedshift.arguments import Positive
from fedshift.client.objectives import Checked, View
from fedshift.client.prototypes import features_of
from fedshift.errors import check_name
from fedshift.tree import Params

Scale = Literal["paper", "code"]
# Added to the variance, as in the authors' code: a feature that is constant over the batch gets
# correlation 0 instead of 0 / 0.
EPS = 1e-8


@dataclass(frozen=True)
class Decorrelation(Checked):
    """beta/d^2 ||R||_F^2, R [d, d] the correlations of the "features" [B, d] over the batch.

        "paper"   as above; R's diagonal is 1, or 0 for a feature that is constant over the batch
        "code"    beta (B - 1)^2/B 1/(d (d - 1)) sum_(i != j) R_ij^2, as in the authors' code

    Means and variances are weighted by the examples' importances. For a batch of one example the
    value is 0. Apart from the diagonal, which has no gradient, "code" is nearly B times "paper".

    Shi et al. 2023, "Towards understanding and mitigating dimensional collapse in heterogeneous
    federated learning" (FedDecorr), arXiv 2210.00226. Raises InputError unless
    beta > 0 (leave the term out for beta = 0), and for a model without "features".
    """

    beta: Positive = 0.1
    scale: Scale = "paper"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_name("scale of Decorrelation", self.scale, ("paper", "code"))

    def reads_features(self) -> bool:
        return True

    def __call__(self, view: View) -> Tensor:
        unit = _standardise(view.out, view.batch.w)
        examples, d = unit.shape
        # ||A^T A|| = ||A A^T||, so compute the smaller of the two products.
        product = unit @ unit.T if examples < d else unit.T @ unit
        squares = product.square().sum()
        if self.scale == "paper":
            return self.beta / d**2 * squares
        diagonal = unit.square().sum(0).square().sum()
        size = view.batch.size.to(unit.dtype)
        # max: a single feature has no pairs, and 0 / 0 would be NaN.
        return self.beta * (size - 1) ** 2 / size * (squares - diagonal) / max(1, d * (d - 1))


def _standardise(out: Params, w: Tensor) -> Tensor:
    """A [B, d] with A^T A the correlations of the features, examples weighted by w [B]."""
    z = features_of(out)
    share = w.to(z.dtype)
    # clamp: a batch that is all padding has sum 0, and must give 0 instead of NaN.
    share = share / share.sum().clamp(min=torch.finfo(z.dtype).tiny)
    centred = z - share @ z
    deviation = (share @ centred.square() + EPS).sqrt()
    return share.sqrt()[:, None] * centred / deviation
