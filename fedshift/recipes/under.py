"""A method under weights of another: SCAFFOLD, MOON or FedSAM with FedPALS' weights."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

from fedshift.algorithms.method import Method
from fedshift.errors import InputError, check_name, shown
from fedshift.recipes.setting import Setting
from fedshift.recipes.traits import SizeLam, Traits
from fedshift.server.combine import Mean
from fedshift.server.pals_input import Fidelity
from fedshift.server.robust import Geometric
from fedshift.server.weights import BySize, Pals, Uniform, Weights

Named = Literal["size", "uniform", "fedpals"]


def by_size(setting: Setting) -> BySize:
    """n_i / n over the round's clients."""
    return BySize()


def uniform(setting: Setting) -> Uniform:
    """1 / C for each of the round's C clients."""
    return Uniform()


def fedpals(
    setting: Setting,
    *,
    lam: SizeLam = None,
    ess: float | None = None,
    cap: float | None = None,
    fidelity: Fidelity = "squared",
) -> Pals:
    """FedPALS' rule for the setting's target, under the setting's cap."""
    # Pals checks that exactly one of lam and ess is given, before any data is seen.
    weights = Pals(setting.target, lam=lam, ess=ess, cap=cap, fidelity=fidelity)
    # The best weights under the setting's cap, not the best of all, cut off at it afterwards.
    if setting.cap is not None and (cap is None or setting.cap < cap):
        weights = replace(weights, cap=setting.cap, strict=False)
    return weights


RULES: dict[str, Callable[..., Weights]] = {
    "size": by_size, "uniform": uniform, "fedpals": fedpals,
}  # fmt: skip


def under(algorithm: Method, weights: Weights) -> Method:
    """The method with its clients weighed by another rule; a wrapper's inner method is meant.

    Raises InputError for a method without a mean of its clients.

    >>> import torch
    >>> from fedshift.recipes import Setting, fedprox
    >>> from fedshift.recipes.under import under
    >>> from fedshift.server.weights import Pals
    >>> fedprox = fedprox(Setting(fs.Model(torch.nn.Linear(4, 2)), target=(0.5, 0.5)))
    >>> under(fedprox, Pals((0.5, 0.5), ess=0.5)).combine.weights.ess
    0.5
    """
    combine, inner = (getattr(algorithm, name, None) for name in ("combine", "inner"))
    if isinstance(combine, Mean | Geometric):
        return replace(algorithm, combine=replace(combine, weights=weights))  # type: ignore[type-var]
    if inner is None:
        raise InputError(f"{type(algorithm).__name__} has no mean of its clients to be weighed")
    return replace(algorithm, inner=under(inner, weights))  # type: ignore[type-var]


def options_of(rule: str, taken: Mapping[str, inspect.Parameter]) -> dict[str, inspect.Parameter]:
    """The key `weights` and the rule's options, without names that the method has itself.

    Raises InputError for weights that are none.
    """
    check_name("weights", rule, RULES)
    key = inspect.Parameter("weights", inspect.Parameter.KEYWORD_ONLY, annotation=Named)
    given = inspect.signature(RULES[rule], eval_str=True).parameters
    options = {k: p for k, p in given.items() if p.kind is inspect.Parameter.KEYWORD_ONLY}
    return {"weights": key, **{k: p for k, p in options.items() if k not in taken}}


def making(
    make: Callable[..., Method], its: Mapping[str, inspect.Parameter]
) -> Callable[..., Method]:
    """The recipe `make` with the option `weights` and those of the rule that it names."""

    def made(setting: Setting, *, weights: str, **options: Any) -> Method:
        of_rule = {k: v for k, v in options.items() if k in options_of(weights, its)}
        algorithm = make(setting, **{k: v for k, v in options.items() if k not in of_rule})
        if weights == "fedpals" and not of_rule.keys() & {"lam", "ess"}:
            # `Pals` would say it, too, but not that these weights are why it is asked for.
            lam = "" if "lam" in its else " (or lam, as in lam = 10)"
            raise InputError(f'weights = "fedpals" needs ess, as in ess = 0.5{lam}; got neither')
        return under(algorithm, RULES[weights](setting, **of_rule))

    return made


def hint(key: str, traits: Traits) -> str:
    """A sentence where a method would have an option under FedPALS' weights; else none."""
    options = inspect.signature(fedpals).parameters.keys() - {"setting"}
    fits = key in options and not traits.fixes_weights
    return f' weights = "fedpals" has {key}.' if fits else ""


def fixed(name: str, weights: object) -> InputError:
    """The refusal of other weights by a method that fixes its own."""
    example = 'for FedPALS\' with FedProx\'s pull, name "fedprox" and weights "fedpals"'
    return InputError(
        f'{name} fixes its own weights; leave out weights = "{shown(str(weights))}", or name '
        f"another method ({example})"
    )
