"""One model for all clients, whose examples count by their labels."""

from __future__ import annotations

from dataclasses import replace

from fedshift.algorithms.label_weights import LabelWeights, Ratio
from fedshift.recipes.one_model import fedavg
from fedshift.recipes.setting import Setting
from fedshift.recipes.traits import Traits, method
from fedshift.server.combine import Mean
from fedshift.server.label_weights import JointLabels


@method(Traits("IW-ERM"))
def iwerm(setting: Setting, *, clip: float = 10.0, ratio: Ratio = "pooled") -> LabelWeights:
    """FedAvg whose examples count T_y / p_y times, so that labels weigh as in the target.

    Reference: importance weighting; ratio "node" (T_y / S_iy) as in Wu et al. 2025, "Addressing
    label shift in distributed learning via entropy regularization" (VRLS), arXiv 2502.02544.
    Note: clients learn T; clip bounds T_y / p_y.
    """
    return LabelWeights(fedavg(setting), setting.target, clip, ratio)


@method(Traits("FedPALS joint", fixes_weights=True))
def fedpals_joint(setting: Setting, *, clip: float = 10.0) -> LabelWeights:
    """Weigh clients and their examples together: the target's labels, at the largest ESS.

    Reference: this library: the least variance of all weights of clients and of their examples.
    Note: meets targets that weights of clients alone cannot; clients learn T; clip bounds an
    example's weight.
    """
    plain = replace(fedavg(setting), combine=Mean(JointLabels(setting.target)))
    return LabelWeights(plain, setting.target, clip)
