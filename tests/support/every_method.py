"""Every recipe, and compositions of them: the rows of the contract."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch

from fedshift import recipes
from fedshift.algorithms.ditto import Ditto
from fedshift.algorithms.fedavg import FedAvg
from fedshift.algorithms.feddisk import FedDisk
from fedshift.algorithms.finetune import FineTune
from fedshift.algorithms.label_weights import LabelWeights
from fedshift.algorithms.labelsets import LabelSets, Mode
from fedshift.algorithms.method import Method
from fedshift.algorithms.scaffold import Scaffold
from fedshift.algorithms.tuning import CentralTuning
from fedshift.client.objectives import Contrastive, CrossEntropy, RestrictedSoftmax
from fedshift.client.oracles import Sam
from fedshift.data import Examples
from fedshift.model import Model
from fedshift.recipes import Setting
from fedshift.server.combine import Mean
from fedshift.server.weights import Pals
from support.federations import CLASSES, FEATURES, TARGET

ROUNDS = 3
Make = Callable[[Setting], Method]
Wrap = Callable[[Any, Setting], Method]
PALS = Mean(Pals(TARGET, ess=0.6))


def of_weights(name: str, setting: Setting) -> Method:
    """A recipe under FedPALS' weights, as files name them."""
    options = {"weights": "fedpals", "ess": 0.6}
    return recipes.recipe(name, options).make(setting, **options)


def of_steps(setting: Setting, steps: int = 4) -> Setting:
    """The setting with steps in place of epochs and a known end, which some recipes need."""
    return replace(setting, rounds=ROUNDS, local=replace(setting.local, epochs=None, steps=steps))


# One round of densities, of a range that the clients' inputs lie in.
BEFORE: dict[str, Any] = {"density_rounds": 1, "hidden": (6,), "low": -8.0, "high": 8.0}


def of_inputs(setting: Setting) -> Setting:
    """The setting with the shape of an input, for methods that fit a density."""
    return replace(setting, shape=(FEATURES,))


def of_fixed_head(setting: Setting) -> Setting:
    """The setting with a network of the same form whose classifier is not trained."""
    net: Any = copy.deepcopy(setting.model.net)
    net.head.weight.requires_grad_(False)
    return replace(setting, model=Model(net))


def with_inputs(setting: Setting) -> Setting:
    """The setting with forty unlabeled inputs on the server."""
    source = torch.Generator().manual_seed(5)
    return replace(setting, server_inputs=torch.randn(40, FEATURES, generator=source))


def with_examples(setting: Setting) -> Setting:
    """The same, and thirty labelled ones."""
    x = torch.randn(30, FEATURES, generator=torch.Generator().manual_seed(6))
    examples = Examples(x, torch.arange(30) % CLASSES)
    return replace(with_inputs(setting), server_examples=examples)


def methods_of(module: ModuleType) -> list[str]:
    """The methods that a file of recipes/ has, without those that it imports."""
    ours = vars(module)
    return [n for n in recipes.__all__ if n in ours and ours[n].__module__ == module.__name__]


MAKE: dict[str, Make] = {
    "fedavg": recipes.fedavg,
    "fedprox": lambda s: recipes.fedprox(s, mu=0.1),
    "fedpals": lambda s: recipes.fedpals(s, ess=0.6),
    "fedpals sharp": lambda s: recipes.fedpals(s, lam=0.0),
    "fedpals to the mix so far": lambda s: recipes.fedpals(s, ess=0.6, so_far=True),
    "fedprox + fedpals": lambda s: recipes.fedpals(s, lam=5.0, mu=0.1),
    "oracle": recipes.oracle,
    "afl": lambda s: recipes.afl(s, gamma=0.1),
    "afl with idle clients": lambda s: recipes.afl(s, gamma=3.0),
    "fedrs": recipes.fedrs,
    "fedrs by frequency": lambda s: recipes.fedrs(s, alpha=0.1, mode="frequency"),
    "fedsam": recipes.fedsam,
    "moon": recipes.moon,
    "fedntd": recipes.fedntd,
    "feddecorr": recipes.feddecorr,
    "feddecorr by code": lambda s: recipes.feddecorr(s, beta=0.02, scale="code"),
    "fedvls": recipes.fedvls,
    "fedvls strong": lambda s: recipes.fedvls(s, distill=1.0, suppress=0.2),
    "balanced_softmax": recipes.balanced_softmax,
    "fedlc": lambda s: recipes.fedlc(s, tau=0.5),
    "feddisco": recipes.feddisco,
    "feddisco of few": lambda s: recipes.feddisco(s, a=0.9, b=0.0, distance="l2"),
    "feddisco_target": lambda s: recipes.feddisco_target(s, a=0.9),
    "ccvr": lambda s: recipes.ccvr(of_steps(s), virtual=20, ridge=0.1),
    "ccvr_target": lambda s: recipes.ccvr_target(of_steps(s), virtual=20, ridge=0.1),
    "fedetf": lambda s: recipes.fedetf(of_fixed_head(s)),
    "fedgela": lambda s: recipes.fedgela(of_fixed_head(s)),
    "iwerm": recipes.iwerm,
    "iwerm by node": lambda s: recipes.iwerm(s, clip=3.0, ratio="node"),
    "fedpals_joint": recipes.fedpals_joint,
    "label weights on fedpals": lambda s: LabelWeights(recipes.fedpals(s, ess=0.6), s.target),
    "label weights on scaffold": lambda s: LabelWeights(recipes.scaffold(s), s.target),
    "fedavgm": recipes.fedavgm,
    "fedadam": recipes.fedadam,
    "fedyogi": recipes.fedyogi,
    "fedpals + fedsam": lambda s: FedAvg(
        s.model, local=replace(s.local, oracles=(Sam(0.05),)), combine=PALS
    ),
    "fedpals + moon": lambda s: FedAvg(
        s.model, objective=CrossEntropy() + Contrastive(1.0), local=s.local, combine=PALS
    ),
    "fedpals + fedrs": lambda s: FedAvg(
        s.model, objective=RestrictedSoftmax(CLASSES, 0.5), local=s.local, combine=PALS
    ),
    "scaffold": recipes.scaffold,
    "scaffold I": lambda s: recipes.scaffold(s, option="I"),
    "fednova under fedpals": lambda s: of_weights("fednova", s),
    "rfa under fedpals": lambda s: of_weights("rfa", s),
    "ditto under fedpals": lambda s: of_weights("ditto", s),
    "scaffold + fedpals": lambda s: FedAvg(
        s.model, local=s.local, combine=Mean(Pals(s.target, lam=0.0)), extras=(Scaffold(),)
    ),
    "feddyn": recipes.feddyn,
    "fednova": recipes.fednova,
    "local_only": recipes.local_only,
    "fedavgft": lambda s: recipes.fedavgft(of_steps(s), tune_rounds=1),
    "fedavgft tuning": lambda s: FineTune(recipes.fedavg(s), 0, s.local),
    "fedproxft": lambda s: recipes.fedproxft(of_steps(s), mu=0.1, tune_rounds=1),
    "fedsamft": lambda s: recipes.fedsamft(of_steps(s), tune_rounds=1),
    "ditto": recipes.ditto,
    "ditto_drm_repo": lambda s: recipes.ditto_drm_repo(of_steps(s)),
    "fedper": recipes.fedper,
    "fedrep": lambda s: recipes.fedrep(s, head_epochs=2),
    "fedrep_drm_repo": lambda s: recipes.fedrep_drm_repo(of_steps(s)),
    "fedbabu": lambda s: recipes.fedbabu(of_steps(s), tune_rounds=1),
    "fedbabu_drm_repo": lambda s: recipes.fedbabu_drm_repo(of_steps(s), tune_rounds=2),
    "feddrm": recipes.feddrm,
    "feddrm_shared_head": recipes.feddrm_shared_head,
    "fedpac": recipes.fedpac,
    "fedpac without mixing": lambda s: recipes.fedpac(s, collaborate=False),
    "fedpac_drm_repo": lambda s: recipes.fedpac_drm_repo(of_steps(s)),
    "fedala": lambda s: recipes.fedala(s, mix_lr=30.0),
    "fedala of all layers": lambda s: recipes.fedala(s, layers="all"),
    "fedala_drm_repo": lambda s: recipes.fedala_drm_repo(of_steps(s)),
    "fedas": recipes.fedas,
    "fedas_drm_repo": lambda s: recipes.fedas_drm_repo(of_steps(s, 5)),
    "confree": recipes.confree,
    "confree of whole models": lambda s: recipes.confree(s, scope="model"),
    "confree_drm_repo": lambda s: recipes.confree_drm_repo(of_steps(s)),
    "feddisk": lambda s: recipes.feddisk(of_inputs(s), **BEFORE),
    "feddisk, direct, by moon": lambda s: recipes.feddisk(
        of_inputs(s), **(BEFORE | {"hidden": (6, 4)}), estimator="direct", mu=0.5
    ),
    "made": lambda s: recipes.made(of_inputs(s), **BEFORE),
    "fedavg_uniform": recipes.fedavg_uniform,
    "moon_uniform": recipes.moon_uniform,
    "labelset_fedavg": recipes.labelset_fedavg,
    "labelset_fedavg public": lambda s: recipes.labelset_fedavg(s, mode="public"),
    "labelset_fedavg holders": lambda s: recipes.labelset_fedavg(s, mode="holders"),
    "labelset_fedavg + mse": lambda s: recipes.labelset_fedavg(
        with_inputs(s), tune="mse", tune_steps=3
    ),
    "labelset_fedavg + pairwise": lambda s: recipes.labelset_fedavg(
        with_inputs(s), mode="public", tune="pairwise", tune_steps=3, tune_part="all"
    ),
    "labelset_fedavg + kl": lambda s: recipes.labelset_fedavg(
        with_examples(s),
        tune="kl",
        tune_steps=3,
        tune_part="all",
        tune_rounds=2,
        tune_moments="kept",
        tune_weights="confidence",
        tune_temperature="fitted",
    ),
    "labelset_fedprox": lambda s: recipes.labelset_fedprox(s, mu=0.1),
    "labelset_scaffold": recipes.labelset_scaffold,
    "labelset_scaffold I": lambda s: recipes.labelset_scaffold(s, option="I"),
    "labelset_ditto": recipes.labelset_ditto,
    "fedmedian": recipes.fedmedian,
    "fedtrimmed": recipes.fedtrimmed,
    "krum": lambda s: recipes.krum(s, byzantine=0),
    "multikrum": lambda s: recipes.multikrum(s, byzantine=0, keep=2),
    "rfa": recipes.rfa,
}


def disk(inner: Method, setting: Setting) -> FedDisk:
    """FedDisk around a method: one round of densities, one in which examples are weighed."""
    return replace(recipes.feddisk(of_inputs(setting), **BEFORE), inner=inner)


def tuned(inner: Any, setting: Setting, mode: Mode = "holders", steps: int = 2) -> CentralTuning:
    """Label sets around a method, centrally tuned."""
    inputs = with_inputs(setting).server_inputs
    assert inputs is not None
    return CentralTuning(LabelSets(inner, mode), inputs, steps=steps)


# Every wrapper, and wrappers in wrappers, around a method that trains one model for all.
WRAP: dict[str, Wrap] = {
    "Ditto": lambda m, s: Ditto(m, 1.0, s.local),
    "LabelSets private": lambda m, s: LabelSets(m, "private"),
    "LabelSets public": lambda m, s: LabelSets(m, "public"),
    "LabelSets holders": lambda m, s: LabelSets(m, "holders"),
    "CentralTuning": tuned,
    "CentralTuning private": lambda m, s: tuned(m, s, "private"),
    "CentralTuning without steps": lambda m, s: tuned(m, s, "public", 0),
    "FedDisk": disk,
    "FineTune": lambda m, s: FineTune(m, 2, s.local),
    "FineTune at once": lambda m, s: FineTune(m, 0, s.local),
    "LabelSets(Ditto)": lambda m, s: LabelSets(Ditto(m, 1.0, s.local)),
    "Ditto(LabelSets)": lambda m, s: Ditto(LabelSets(m, "holders"), 1.0, s.local),
    "FedDisk(CentralTuning)": lambda m, s: disk(tuned(m, s), s),
    "CentralTuning(FedDisk)": lambda m, s: replace(
        tuned(m, s), inner=disk(LabelSets(m, "holders"), s)
    ),
    "CentralTuning(FineTune)": lambda m, s: replace(
        tuned(m, s), inner=FineTune(LabelSets(m, "holders"), 2, s.local)
    ),
    "FedDisk(Ditto)": lambda m, s: disk(Ditto(m, 1.0, s.local), s),
    "Ditto(FedDisk)": lambda m, s: Ditto(disk(m, s), 1.0, s.local),
    "FineTune(Ditto)": lambda m, s: FineTune(Ditto(m, 1.0, s.local), 2, s.local),
    "FineTune(FedDisk)": lambda m, s: FineTune(disk(m, s), 3, s.local),
    "FineTune(FedDisk) in its first rounds": lambda m, s: FineTune(disk(m, s), 1, s.local),
    "FineTune(CentralTuning)": lambda m, s: FineTune(tuned(m, s), 2, s.local),
}  # fmt: skip
