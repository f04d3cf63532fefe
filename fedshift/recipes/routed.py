"""Methods that also learn which client a query belongs to."""

from __future__ import annotations

from dataclasses import replace

from fedshift.algorithms.fedavg import FedAvg
from fedshift.client.objectives import CrossEntropy, Term
from fedshift.client.origin import ClientEntropy
from fedshift.client.sharing import Share
from fedshift.recipes.one_model import fedavg
from fedshift.recipes.personal import head_of, layers_of
from fedshift.recipes.setting import Setting, SettingError
from fedshift.recipes.traits import ClassLam, Traits, method


def _objective(lam: float) -> Term:
    """lam class entropy + (1 - lam) client entropy; a term of weight 0 is left out."""
    # A term of weight 0 would still ask the server for the cohort and the model for a router.
    if lam == 1.0:
        return CrossEntropy()
    return lam * CrossEntropy() + (1.0 - lam) * ClientEntropy() if lam else ClientEntropy()


@method(Traits(page="feddrm", router=True))
def feddrm(setting: Setting, *, lam: ClassLam = 0.8) -> FedAvg:
    """Learn a head per client and, over shared features, which client's data a query resembles.

    Reference: Wang, Zhang, Zhang, Liu and Zhang 2026, "Beyond aggregation: guiding clients in
    heterogeneous federated learning" (FedDRM), ICLR, arXiv 2509.23049, Algorithm 1.
    Note: lam weighs the class loss (paper 0.8, authors' code 0.9); lam = 1 is FedPer bit for bit on
    all but the router; needs a model that returns "client_logits"; see `fedshift.router`.
    """
    if not setting.head:
        raise SettingError(
            "feddrm needs a classifier that stays on each client, and Setting.head = [] names none",
            "head",
            "; name it by head=(...), or use feddrm_shared_head, which shares it: "
            f"{layers_of(setting.model)}",
        )
    return replace(feddrm_shared_head(setting, lam=lam), share=Share(head_of(setting)))


@method(Traits(page="feddrm", router=True))
def feddrm_shared_head(setting: Setting, *, lam: ClassLam = 0.8) -> FedAvg:
    """FedDRM with one classifier for all clients, for inputs that shift while labels do not.

    Reference: Wang et al. 2026, arXiv 2509.23049, Section 2.2 (covariate shift).
    Note: every client then serves the same classifier, so routing cannot change an answer.
    """
    return replace(fedavg(setting), objective=_objective(lam))
