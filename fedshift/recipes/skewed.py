"""One model for all clients, by local training that is made for clients of few labels."""

from __future__ import annotations

from dataclasses import replace

from fedshift.algorithms.ccvr import Ccvr
from fedshift.algorithms.fedavg import FedAvg
from fedshift.arguments import NotNegative
from fedshift.client.decorrelation import Decorrelation, Scale
from fedshift.client.distilling import NotTrueDistillation, VacantDistillation
from fedshift.client.objectives import CrossEntropy, Term
from fedshift.client.shares import CountAdjusted, CountMargins, LogitSuppression, ShareScaled
from fedshift.errors import InputError
from fedshift.recipes.one_model import fedavg
from fedshift.recipes.setting import Setting
from fedshift.recipes.traits import (
    DecorrelationBeta,
    MarginTau,
    NotTrueBeta,
    NotTrueTau,
    Traits,
    method,
)
from fedshift.server.combine import Mean
from fedshift.server.discrepancy import Disco, Distance


@method(Traits("FedDisco", fixes_weights=True))
def feddisco(
    setting: Setting, *, a: float = 0.5, b: float = 0.1, distance: Distance = "kl"
) -> FedAvg:
    """FedAvg by weights that are smaller the further a client's labels are from even shares.

    Reference: Ye et al. 2023, "FedDisco: federated learning with discrepancy-aware collaboration",
    arXiv 2305.19229.
    Note: max(0, n_i/N - a d_i + b) before they are made to sum to 1, d divided by its sum; a = b =
    0 is FedAvg bit for bit.
    """
    classes = len(setting.target)
    rule = Disco((1.0 / classes,) * classes, a, b, distance)
    return replace(fedavg(setting), combine=Mean(rule))


@method(Traits(page="feddisco", fixes_weights=True))
def feddisco_target(
    setting: Setting, *, a: float = 0.5, b: float = 0.1, distance: Distance = "l2"
) -> FedAvg:
    """FedDisco with distances to the target's label shares in place of even ones.

    Reference: Ye et al. 2023, "FedDisco: federated learning with discrepancy-aware collaboration",
    arXiv 2305.19229, whose code does so where the test set is not balanced.
    Note: a = b = 0 is FedAvg bit for bit; "kl" needs a target of all labels.
    """
    return replace(fedavg(setting), combine=Mean(Disco(setting.target, a, b, distance)))


@method(Traits("CCVR", even=True))
def ccvr(setting: Setting, *, virtual: int = 500, ridge: float = 1e-3) -> Ccvr:
    """FedAvg, then a last round in which the server fits the classifier to virtual features.

    Reference: Luo et al. 2021, "No fear of heterogeneity: classifier calibration for federated
    learning with non-IID data" (CCVR), arXiv 2106.05001.
    Note: the features are drawn from a Gaussian for each label, of clients' means and mean
    products; labels count alike. Needs a model that returns "features", and 2 rounds or more.
    """
    classes = len(setting.target)
    return _calibrated(setting, (1.0 / classes,) * classes, virtual, ridge)


@method(Traits(page="ccvr", at_target=True))
def ccvr_target(setting: Setting, *, virtual: int = 500, ridge: float = 1e-3) -> Ccvr:
    """CCVR whose labels count as they are shared at the target.

    Reference: ours, after Luo et al. 2021 (CCVR), arXiv 2106.05001.
    Note: the server's model is one of the target's label shares; otherwise as ccvr.
    """
    return _calibrated(setting, setting.target, virtual, ridge)


def _calibrated(setting: Setting, shares: tuple[float, ...], virtual: int, ridge: float) -> Ccvr:
    if setting.rounds is None or setting.rounds < 2:
        raise InputError(
            "CCVR trains in all rounds but the last, which needs 2 rounds or more, and the setting "
            f"has rounds={setting.rounds}; give Setting(..., rounds=...)"
        )
    return Ccvr(fedavg(setting), setting.rounds - 1, shares, virtual, ridge, setting.head)


@method(Traits(even=True))
def balanced_softmax(setting: Setting) -> FedAvg:
    """FedAvg whose clients add the logarithms of their label shares to the logits in training.

    Reference: Ren et al. 2020, "Balanced meta-softmax for long-tailed visual recognition", arXiv
    2007.10740.
    Note: a label that a client lacks is left out of its softmax; clients of even shares train as
    in FedAvg, bit for bit.
    """
    return replace(fedavg(setting), objective=CountAdjusted(len(setting.target), least=1e-30))


@method(Traits("FedLC"))
def fedlc(setting: Setting, *, tau: MarginTau = 1.0) -> FedAvg:
    """FedAvg whose clients give a label a margin that is larger the rarer they have it.

    Reference: Zhang et al. 2022, "Federated learning with label distribution skew via logits
    calibration" (FedLC), arXiv 2209.00189.
    Note: the margin of label c is tau n_c^(-1/4), n_c the client's examples of it; a label that it
    lacks is left out of its softmax.
    """
    return replace(fedavg(setting), objective=CountMargins(len(setting.target), tau))


@method(Traits("FedNTD"))
def fedntd(setting: Setting, *, beta: NotTrueBeta = 1.0, tau: NotTrueTau = 1.0) -> FedAvg:
    """FedAvg whose clients keep how the server's model shares out the labels other than the true.

    Reference: Lee et al. 2022, "Preservation of the global knowledge by not-true distillation in
    federated learning" (FedNTD), arXiv 2106.03097.
    Note: one more forward pass per step; beta = 0 is FedAvg bit for bit.
    """
    plain = fedavg(setting)
    if not beta:
        return plain
    return replace(plain, objective=CrossEntropy() + NotTrueDistillation(beta, tau))


@method(Traits("FedDecorr"))
def feddecorr(setting: Setting, *, beta: DecorrelationBeta = 0.1, scale: Scale = "paper") -> FedAvg:
    """FedAvg with a penalty on correlations between features, which keeps them from collapsing.

    Reference: Shi et al. 2023, "Towards understanding and mitigating dimensional collapse in
    heterogeneous federated learning" (FedDecorr), arXiv 2210.00226.
    Note: needs a model that returns "features"; scale "code" is the authors' code's, nearly a
    batch's size times larger; beta = 0 is FedAvg bit for bit.
    """
    plain = fedavg(setting)
    if not beta:
        return plain
    return replace(plain, objective=CrossEntropy() + Decorrelation(beta, scale))


@method(Traits("FedVLS", even=True))
def fedvls(
    setting: Setting, *, distill: NotNegative = 0.1, suppress: NotNegative = 0.005
) -> FedAvg:
    """FedAvg whose clients keep the server's view of labels that they lack, and quieten the others.

    Reference: Guo et al. 2025, "Exploring vacant classes in label-skewed federated learning"
    (FedVLS), AAAI, arXiv 2401.02329.
    Note: as the authors' code: logits plus the logarithms of the client's label shares, a
    distillation over absent labels, and a penalty on logits of labels that are not an example's;
    one more forward pass per step. A strength of 0 leaves its term out.
    """
    classes = len(setting.target)
    # Next to nothing: absent labels take no part in it, and are distilled instead.
    objective: Term = CountAdjusted(classes, least=1e-6)
    if distill:
        objective += VacantDistillation(classes, distill)
    if suppress:
        objective += LogitSuppression(classes, suppress)
    return replace(fedavg(setting), objective=objective)


@method(Traits("FedETF", fixed_head=True, even=True))
def fedetf(setting: Setting) -> FedAvg:
    """FedAvg under a fixed simplex as classifier, logits adjusted to the client's label counts.

    Reference: Li et al. 2023, "No fear of classifier biases: neural collapse inspired federated
    learning with synthetic and fixed classifier" (FedETF), ICCV, arXiv 2303.10058.
    Note: needs a network with a fixed classifier, as `fedshift.models.etf` has, whose temperature
    is trained; one model for all, without the paper's fine-tuning at clients.
    """
    _check_fixed_head(setting, "FedETF")
    return replace(fedavg(setting), objective=CountAdjusted(len(setting.target)))


@method(Traits("FedGELA", page="fedetf", fixed_head=True))
def fedgela(setting: Setting) -> FedAvg:
    """FedAvg under a fixed simplex as classifier, whose rows clients scale by their label shares.

    Reference: Fan et al. 2023, "Federated learning with bilateral curation for partially
    class-disjoint data" (FedGELA), NeurIPS, arXiv 2405.18972.
    Note: needs a network with a fixed classifier, as `fedshift.models.etf` has; the temperature is
    the network's and stays. The server's model has rows of one length.
    """
    _check_fixed_head(setting, "FedGELA")
    names = (name for name, _ in setting.model.net.named_parameters())
    scales = (name for name in names if name.startswith(setting.head) and name.endswith("scale"))
    local = replace(setting.local, frozen=(*setting.local.frozen, *scales))
    return replace(fedavg(setting), objective=ShareScaled(len(setting.target)), local=local)


def _check_fixed_head(setting: Setting, name: str) -> None:
    fixed = [k for k in setting.model.fixed if k.startswith(setting.head)]
    if not fixed:
        raise InputError(
            f"{name} needs a network whose classifier is fixed, and all parameters of "
            f"{list(setting.head)} are trained here; let EtfHead of fedshift.models.etf be the "
            "last layer, named by Setting(head=...)"
        )
