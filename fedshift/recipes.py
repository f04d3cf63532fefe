"""Every named method: one function from a setting to an algorithm.

This module is the registry: a method's name is its function's name, its options are the keyword
arguments, and its docstring's first line, "Reference" and "Note" are what `fedshift methods`
prints. Nothing registers itself on import.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass

from fedshift.algorithms.base import Algorithm
from fedshift.algorithms.fedavg import FedAvg
from fedshift.client.local import Local
from fedshift.client.objectives import CrossEntropy, Proximal, Term
from fedshift.errors import InputError, unknown
from fedshift.model import Model
from fedshift.server.combine import Mean
from fedshift.server.optimizers import ServerOptimizer, Sgd
from fedshift.server.pals import Fidelity
from fedshift.server.weights import Pals

__all__ = ["fedavg", "fedpals", "fedprox", "oracle"]


@dataclass(frozen=True)
class Setting:
    """What every recipe builds on: the network, the target T [K], local SGD, server optimiser."""

    model: Model
    target: tuple[float, ...]
    local: Local = Local()
    server: ServerOptimizer = Sgd()


def _objective(mu: float) -> Term:
    """Cross-entropy, with the proximal term only where it does something."""
    if mu < 0:
        raise InputError(f"mu must be 0 or more, got {mu}")
    return CrossEntropy() + Proximal(mu) if mu else CrossEntropy()


def fedavg(setting: Setting) -> FedAvg:
    """Average the clients' models by their sample sizes.

    Reference: McMahan et al. 2017, "Communication-efficient learning of deep networks from
    decentralized data", Algorithm 1.
    """
    return FedAvg(setting.model, local=setting.local, server=setting.server)


def fedprox(setting: Setting, *, mu: float = 0.01) -> FedAvg:
    """FedAvg with a pull of strength mu towards the model received.

    Reference: Li et al. 2020, "Federated optimization in heterogeneous networks", Algorithm 2.
    Note: squared norm as in the paper; mu = 0 is FedAvg bit for bit.
    """
    return FedAvg(
        setting.model, objective=_objective(mu), local=setting.local, server=setting.server
    )


def fedpals(
    setting: Setting,
    *,
    lam: float | None = None,
    ess: float | None = None,
    cap: float | None = None,
    fidelity: Fidelity = "squared",
    mu: float = 0.0,
) -> FedAvg:
    """Weigh clients so that their labels mix to the target's, at a chosen effective sample size.

    Reference: Listo Zec, Breitholtz and Johansson 2024, "Overcoming label shift with target-aware
    federated learning" (FedPALS), arXiv 2411.03799, Equations 8 and 9.
    Note: exactly one of lam and ess; mu > 0 adds FedProx's term (FedProx + FedPALS); cap bounds
    any client's weight.
    """
    weights = Pals(setting.target, lam=lam, ess=ess, cap=cap, fidelity=fidelity)
    return FedAvg(
        setting.model,
        objective=_objective(mu),
        local=setting.local,
        combine=Mean(weights),
        server=setting.server,
    )


def oracle(setting: Setting) -> FedAvg:
    """FedAvg on clients that all have the target's label marginal: what no method can know.

    Reference: Listo Zec, Breitholtz and Johansson 2024, arXiv 2411.03799, Appendix B.5.
    Note: the experiment draws the clients afresh with the target's marginal, as many and as large.
    """
    return fedavg(setting)


@dataclass(frozen=True)
class Recipe:
    """A recipe as a value: its name, summary, reference, note and options."""

    name: str
    make: Callable[..., Algorithm]
    summary: str
    reference: str
    note: str
    options: dict[str, inspect.Parameter]


def recipe(name: str) -> Recipe:
    """Look a method up by name. Raises InputError, with the nearest match, for an unknown one."""
    if name not in __all__:
        raise unknown("method", name, __all__)
    make = globals()[name]
    text = inspect.getdoc(make) or ""
    signature = inspect.signature(make, eval_str=True)
    keyword = inspect.Parameter.KEYWORD_ONLY
    return Recipe(
        name,
        make,
        text.splitlines()[0],
        _field(text, "Reference"),
        _field(text, "Note"),
        {k: p for k, p in signature.parameters.items() if p.kind is keyword},
    )


def recipes() -> tuple[Recipe, ...]:
    """All methods, by name."""
    return tuple(recipe(name) for name in sorted(__all__))


def _field(text: str, label: str) -> str:
    found = re.search(rf"^{label}: (.*?)(?=^\w+: |\Z)", text, re.S | re.M)
    return " ".join(found.group(1).split()) if found else ""
