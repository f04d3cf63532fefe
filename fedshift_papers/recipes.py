"""Methods as the code or the report of one paper runs them; named for its tables alone.

`fedshift.plugins` registers them: `recipe("ditto_drm_repo")` finds them, no listing shows them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedshift.algorithms.ditto import Ditto
from fedshift.algorithms.fedala import FedAla
from fedshift.algorithms.fedas import FedAs
from fedshift.algorithms.fedavg import FedAvg
from fedshift.algorithms.method import Method
from fedshift.client.local import Local
from fedshift.client.objectives import CrossEntropy, Proximal
from fedshift.recipes import one_model, personal
from fedshift.recipes.personal import LastRounds
from fedshift.recipes.setting import Setting, SettingError
from fedshift.recipes.traits import (
    ContrastiveMu,
    PersonalLam,
    ProximalMu,
    Temperature,
    Traits,
    method,
)
from fedshift.server.combine import Mean, Weighed
from fedshift.server.confree import coordinates
from fedshift.server.weights import BySize, Uniform, Weights
from fedshift.tree import Params, weighted_sum


@dataclass(frozen=True)
class PairwiseProjection(Weighed):
    """sum_i a_i v_i,   v_i = u_i - sum_{j != i} min(0, <u_i, u_j>) u_j / (||u_j||^2 + 1e-8).

    This is what the FedDRM authors' code, algorithms/confree.py, runs as ConFREE: inner products of
    the original changes, over all parameters at once, and weights a by size. Its 1e-8 matters for
    changes of length 1e-3 or less.
    """

    weights: Weights = BySize()

    def __call__(self, weights: Tensor, stacked: Params, seed: int) -> Params:
        # Sort names, so that the result does not depend on the order of the parameters.
        rows = coordinates(stacked[name] for name in sorted(stacked))
        gram = rows @ rows.T
        square = np.diag(gram)
        against = np.minimum(gram, 0.0) / (square + 1e-8)
        np.fill_diagonal(against, 0.0)
        a = weights.double().numpy()
        return weighted_sum(torch.from_numpy(a - a @ against), stacked)


@method()
def ditto_drm_repo(setting: Setting, *, lam: PersonalLam = 1.0) -> Ditto:
    """Ditto with the setting's steps shared out between the two models.

    Reference: Wang et al. 2026 (FedDRM), arXiv 2509.23049, authors' code, algorithms/ditto.py.
    Note: of 10 steps, 5 are the global model's and 5 the personal one's.
    """
    first, second = divided(setting, "ditto_drm_repo", 2)
    return Ditto(one_model.fedavg(replace(setting, local=first)), lam, second)


@method()
def fedrep_drm_repo(setting: Setting) -> FedAvg:
    """FedRep with the setting's steps shared out between head and body.

    Reference: Wang et al. 2026 (FedDRM), arXiv 2509.23049, authors' code, algorithms/fedrep.py.
    Note: of 10 steps, 5 are the head's and then 5 the body's; no final fit of the heads.
    """
    return halved(setting, "fedrep_drm_repo")


@method()
def fedbabu_drm_repo(setting: Setting, *, tune_rounds: LastRounds = 200) -> Method:
    """FedBABU with the last quarter of 800 rounds for the heads alone.

    Reference: Wang et al. 2026 (FedDRM), arXiv 2509.23049, authors' code, algorithms/fedbabu.py.
    Note: all of the setting's steps (10) for the body, later all for the head.
    """
    counted(setting, "fedbabu_drm_repo")  # refuses epochs
    return personal.fedbabu(setting, tune_rounds=tune_rounds, tune_part="head")


@method()
def fedpac_drm_repo(setting: Setting, *, mu: ProximalMu = 0.01) -> FedAvg:
    """FedRep with a pull of the body towards the body received: not FedPAC.

    Reference: Wang et al. 2026 (FedDRM), arXiv 2509.23049, authors' code, algorithms/fedpac.py.
    Note: what the rows "FedPAC" of their tables report: no prototypes, no mixing of heads; half of
    the steps for each phase; mu = 0 is fedrep_drm_repo bit for bit.
    """
    plain = halved(setting, "fedpac_drm_repo")
    pulled = CrossEntropy() + Proximal(mu, free=setting.head) if mu else CrossEntropy()
    return replace(plain, objective=pulled)


@method()
def fedala_drm_repo(setting: Setting) -> FedAvg:
    """FedAvg with half of the steps, served before it is averaged: not FedALA.

    Reference: Wang et al. 2026 (FedDRM), arXiv 2509.23049, authors' code, algorithms/fedala.py.
    Note: what the rows "FedALA" of their tables report. The other half of the steps is meant for
    the mixing weights, but these get no gradient there and stay at 1.
    """
    # The first half would train mixing weights that get no gradient; no steps are spent on it.
    _, train = divided(setting, "fedala_drm_repo", 2)
    return replace(one_model.fedavg(replace(setting, local=train)), extras=(FedAla(None),))


@method()
def fedas_drm_repo(setting: Setting) -> FedAvg:
    """FedPer with a fifth of the steps spent on matching the last local model's features.

    Reference: Wang et al. 2026 (FedDRM), arXiv 2509.23049, authors' code, algorithms/fedas.py.
    Note: of 10 steps, 2 match features example by example (the "trunk" of a network that returns
    one) and 8 train body and head, from a client's first round on; weights by size, no Fisher
    traces.
    """
    align, train = divided(setting, "fedas_drm_repo", 5)
    extra = FedAs(align, "examples", fisher=False, first=True)
    return replace(personal.fedper(replace(setting, local=train)), extras=(extra,))


@method(Traits(fixes_weights=True))
def confree_drm_repo(setting: Setting) -> FedAvg:
    """FedRep with pairwise projections of the clients' changes, weighted by size.

    Reference: Wang et al. 2026 (FedDRM), arXiv 2509.23049, authors' code, algorithms/confree.py.
    Note: projections only, of the whole change at once; half of the steps for each phase.
    """
    return replace(halved(setting, "confree_drm_repo"), combine=PairwiseProjection())


@method(Traits(page="fedavg", fixes_weights=True))
def fedavg_uniform(setting: Setting) -> FedAvg:
    """FedAvg that averages clients' models uniformly, whatever their sizes.

    Reference: FedAvg as the MADE/MOON report on EMNIST-Digits states it.
    Note: with clients of one size it is fedavg.
    """
    return replace(one_model.fedavg(setting), combine=Mean(Uniform()))


@method(Traits(page="moon", fixes_weights=True))
def moon_uniform(setting: Setting, *, mu: ContrastiveMu = 1.0, tau: Temperature = 0.5) -> FedAvg:
    """MOON that averages clients' models uniformly, whatever their sizes.

    Reference: the MADE/MOON report on EMNIST-Digits, after Li, He and Song 2021, arXiv 2103.16257.
    Note: the weights are chosen: as in the report's FedAvg; MOON's authors weigh by size.
    """
    return replace(one_model.moon(setting, mu=mu, tau=tau), combine=Mean(Uniform()))


def halved(setting: Setting, name: str) -> FedAvg:
    """FedPer with half of the steps for the head, then half for the body; `name` is the recipe's.

    Raises InputError where the steps cannot be divided.
    """
    # The head first: the body is then trained under a head that fits it.
    first, second = divided(setting, name, 2)
    return replace(personal.fedper(setting), local=personal.in_turn(setting, first, second))


def counted(setting: Setting, name: str) -> int:
    """The local steps, for recipes that count them. Raises SettingError where they are epochs."""
    if setting.local.steps is None:
        problem = f"{name} counts steps, as the code that it follows (10 per round)"
        raise SettingError(problem, "steps", "; give Local(steps=10)")
    return setting.local.steps


def divided(setting: Setting, name: str, parts: int) -> tuple[Local, Local]:
    """The local steps in two phases: floor(steps / parts) of them, and the others.

    For recipes that share out a fixed number of steps; `name` is the recipe's. Raises SettingError
    where the setting has epochs, or too few steps to leave one for each phase.
    """
    steps = counted(setting, name)
    if steps < parts:
        problem = f"{name} gives 1 in {parts} of the steps to its first phase; {steps} is too few"
        raise SettingError(problem, "few", f", give {parts} or more")
    # Of 5 steps in two phases the first has 2, the second 3.
    first = steps // parts
    return replace(setting.local, steps=first), replace(setting.local, steps=steps - first)
