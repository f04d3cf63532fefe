"""Methods whose result is one model for all clients."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from fedshift.algorithms.afl import Afl
from fedshift.algorithms.fedavg import FedAvg
from fedshift.algorithms.feddyn import FedDyn
from fedshift.algorithms.fednova import FedNova
from fedshift.algorithms.scaffold import Option, Scaffold
from fedshift.algorithms.so_far import SoFar
from fedshift.client.objectives import (
    Contrastive,
    CrossEntropy,
    Proximal,
    RestrictedSoftmax,
    Restriction,
    Term,
)
from fedshift.client.oracles import Sam
from fedshift.errors import InputError
from fedshift.recipes import under
from fedshift.recipes.setting import Setting
from fedshift.recipes.traits import (
    ContrastiveMu,
    ProximalMu,
    ServerTau,
    SizeLam,
    Temperature,
    Traits,
    method,
)
from fedshift.server.combine import Mean
from fedshift.server.optimizers import Adam, ServerOptimizer, Sgd, Yogi
from fedshift.server.pals_input import Fidelity
from fedshift.server.weights import Uniform


def _objective(mu: float) -> Term:
    """Cross-entropy, with the proximal term unless mu is 0."""
    # Left out, not multiplied by 0: the objective is then FedAvg's, bit for bit.
    return CrossEntropy() + Proximal(mu) if mu else CrossEntropy()


@method(Traits("FedAvg"))
def fedavg(setting: Setting) -> FedAvg:
    """Average the clients' models by their sample sizes.

    Reference: McMahan et al. 2017, "Communication-efficient learning of deep networks from
    decentralized data", Algorithm 1.
    """
    return FedAvg(setting.model, local=setting.local, server=setting.server)


@method(Traits("FedProx"))
def fedprox(setting: Setting, *, mu: ProximalMu = 0.01) -> FedAvg:
    """FedAvg with a pull of strength mu towards the model received.

    Reference: Li et al. 2020, "Federated optimization in heterogeneous networks", Algorithm 2.
    Note: squared norm as in the paper; mu = 0 is FedAvg bit for bit.
    """
    return replace(fedavg(setting), objective=_objective(mu))


@method(Traits("FedPALS", auto_ess=True, fixes_weights=True, example={"ess": 0.5}))
def fedpals(
    setting: Setting,
    *,
    lam: SizeLam = None,
    ess: float | None = None,
    cap: float | None = None,
    fidelity: Fidelity = "squared",
    mu: ProximalMu = 0.0,
    so_far: bool = False,
) -> FedAvg | SoFar:
    """Weigh clients so that their labels mix to the target's, at a chosen effective sample size.

    Reference: Listo Zec, Breitholtz and Johansson 2024, "Overcoming label shift with target-aware
    federated learning" (FedPALS), arXiv 2411.03799, Equations 8 and 9.
    Note: exactly one of lam and ess; mu > 0 adds FedProx's term (FedProx + FedPALS); cap bounds
    any client's weight; so_far (ours) solves each cohort for T minus what earlier rounds mixed.
    """
    weights = under.fedpals(setting, lam=lam, ess=ess, cap=cap, fidelity=fidelity)
    plain = fedprox(setting, mu=mu)
    return SoFar(plain, weights) if so_far else replace(plain, combine=Mean(weights))


@method(Traits("Oracle", page="fedavg", follows_target=True))
def oracle(setting: Setting) -> FedAvg:
    """FedAvg on clients that all have the target's label marginal, which no method can arrange.

    Reference: Listo Zec, Breitholtz and Johansson 2024, arXiv 2411.03799, Appendix B.5.
    Note: the experiment draws the clients afresh with the target's marginal, as many, and as
    large as the pool allows without an example twice in a client.
    """
    # The clients differ, not the method: `follows_target` has experiments draw them anew.
    return fedavg(setting)


@method(Traits(fixes_weights=True))
def afl(
    setting: Setting,
    *,
    gamma: float = 0.1,
    domains: tuple[int, ...] | None = None,
    whole: bool = False,
) -> FedAvg:
    """Weigh clients so that the largest of their losses becomes small.

    Reference: Mohri, Sivek and Suresh 2019, "Agnostic federated learning", arXiv 1902.00146.
    Note: gamma is in 1/loss, and 0 is FedAvg bit for bit; domains gives each client's domain, and
    with whole a domain keeps its weight where some of its clients are absent.
    """
    if whole and domains is None:
        raise InputError(
            "whole is for domains of several clients, and without domains each client is one; "
            "give domains, or leave whole out"
        )
    return replace(fedavg(setting), extras=(Afl(gamma, domains, whole),))


@method(Traits(even=True))
def fedrs(
    setting: Setting,
    *,
    alpha: Annotated[float, "the scale of the logits of absent labels"] = 0.5,
    mode: Annotated[Restriction, "how the logits of absent labels are scaled"] = "indicator",
) -> FedAvg:
    """FedAvg with the logits of labels that a client lacks scaled by alpha in training.

    Reference: Li and Zhan 2021, "FedRS: federated learning with restricted softmax for label
    distribution non-IID data", KDD.
    Note: mode "frequency" scales by relative label frequency, as the authors' code does at its
    first step; alpha = 1 is FedAvg bit for bit.
    """
    if alpha == 1:
        return fedavg(setting)  # nothing is restricted
    # In place of the cross-entropy, not beside it: it is one, of scaled logits.
    restricted = RestrictedSoftmax(len(setting.target), alpha, mode)
    return replace(fedavg(setting), objective=restricted)


@method()
def fedsam(setting: Setting, *, rho: float = 0.05) -> FedAvg:
    """FedAvg with local steps along the gradient at the worst neighbour within rho.

    Reference: Qu et al. 2022, "Generalized federated learning via sharpness aware minimization",
    arXiv 2206.02618, Algorithm 1.
    Note: two gradients per step; rho = 0 is FedAvg bit for bit; weights by sample size, where the
    paper has a uniform mean.
    """
    local = setting.local
    # Innermost: other wrappers of the setting must act on the gradient that is applied.
    oracles = (Sam(rho), *local.oracles) if rho else local.oracles
    return replace(fedavg(setting), local=replace(local, oracles=oracles))


@method()
def moon(setting: Setting, *, mu: ContrastiveMu = 1.0, tau: Temperature = 0.5) -> FedAvg:
    """FedAvg with features pulled to the global model's and away from the client's last model's.

    Reference: Li, He and Song 2021, "Model-contrastive federated learning", arXiv 2103.16257.
    Note: needs a model that returns "features"; mu = 0 is FedAvg bit for bit.
    """
    plain = fedavg(setting)
    return replace(plain, objective=CrossEntropy() + Contrastive(mu, tau)) if mu else plain


@method(Traits(page="fedopt"))
def fedavgm(setting: Setting, *, momentum: float = 0.9) -> FedAvg:
    """FedAvg with momentum on the server.

    Reference: Hsu, Qi and Brown 2019, "Measuring the effects of non-identical data distribution
    for federated visual classification", arXiv 1909.06335.
    Note: theta <- theta + lr m, m <- momentum m + delta; momentum = 0 is FedAvg bit for bit.
    """
    # Only the rate of a plain step can be kept beside this momentum.
    if not isinstance(setting.server, Sgd) or setting.server.momentum:
        raise InputError(f"fedavgm sets the server's momentum: leave it out of {setting.server}")
    return replace(fedavg(setting), server=replace(setting.server, momentum=momentum))


def _with_server_step(setting: Setting, name: str, server: ServerOptimizer) -> FedAvg:
    # Two server steps cannot both be taken, and to ignore the given one would be silent.
    if setting.server != Sgd():
        raise InputError(f"{name} brings its own server step: leave out {setting.server}")
    return replace(fedavg(setting), server=server)


@method(Traits(page="fedopt"))
def fedadam(
    setting: Setting,
    *,
    lr: float = 0.01,
    beta1: float = 0.9,
    beta2: float = 0.99,
    tau: ServerTau = 1e-3,
) -> FedAvg:
    """FedAvg with Adam on the server.

    Reference: Reddi et al. 2021, "Adaptive federated optimization", arXiv 2003.00295, Algorithm 2.
    Note: weights by sample size; v starts at tau squared, without bias correction.
    """
    return _with_server_step(setting, "fedadam", Adam(lr, beta1, beta2, tau))


@method(Traits(page="fedopt"))
def fedyogi(
    setting: Setting,
    *,
    lr: float = 0.01,
    beta1: float = 0.9,
    beta2: float = 0.99,
    tau: ServerTau = 1e-3,
) -> FedAvg:
    """FedAvg with Yogi on the server.

    Reference: Reddi et al. 2021, "Adaptive federated optimization", arXiv 2003.00295, Algorithm 2.
    Note: weights by sample size; v starts at tau squared, without bias correction.
    """
    return _with_server_step(setting, "fedyogi", Yogi(lr, beta1, beta2, tau))


@method()
def scaffold(setting: Setting, *, option: Option = "II") -> FedAvg:
    """Correct local steps by control variates that estimate the other clients' gradients.

    Reference: Karimireddy et al. 2020, "SCAFFOLD: stochastic controlled averaging for federated
    learning", arXiv 1910.06378, Algorithm 1.
    Note: option II takes the control from the local steps and refuses momentum, option I from one
    more pass over the data; uniform weights as in the paper.
    """
    return replace(fedavg(setting), combine=Mean(Uniform()), extras=(Scaffold(option),))


@method(Traits(fixes_weights=True))
def feddyn(
    setting: Setting, *, alpha: Annotated[float, "the strength of the regularisation"] = 0.1
) -> FedAvg:
    """Regularise local training so that the clients' optima agree with the global one.

    Reference: Acar et al. 2021, "Federated learning based on dynamic regularization" (FedDyn),
    arXiv 2111.04263, Algorithm 1.
    Note: uniform weights as in the paper; alpha > 0, and alpha -> 0 is not FedAvg.
    """
    return replace(fedavg(setting), combine=Mean(Uniform()), extras=(FedDyn(alpha),))


@method()
def fednova(setting: Setting) -> FedAvg:
    """FedAvg with every client's change divided by the number of steps behind it.

    Reference: Wang et al. 2020, "Tackling the objective inconsistency problem in heterogeneous
    federated optimization" (FedNova), arXiv 2007.07481, Section 5.
    Note: the same as FedAvg when all clients take equally many steps; handles local momentum.
    """
    return replace(fedavg(setting), extras=(FedNova(),))
