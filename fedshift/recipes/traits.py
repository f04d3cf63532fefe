"""What experiments and listings must know of a method before it is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from fedshift.sketch import sketched


@sketched
@dataclass(frozen=True)
class Traits:
    """What is special about a method; a recipe's module lists those of its recipes in TRAITS.

    title           its name in tables, where that is not the recipe's
    page            its page in docs/methods, where that is not the recipe's name
    router          needs a network with a router: "client_logits", a column per client
    fixed_head      needs a network whose classifier is fixed; those of the library get an ETF
    follows_target  its clients are drawn anew, so that all follow the target: a bound, no method
    even            its training takes the clients' label shares out of the model by itself
    at_target       it moves the model to the target's label shares by itself
    densities       it fits densities of the inputs first
    auto_ess        `ess` may be "auto" in experiment files: one model per ESS fraction, the best is
                    kept. Its lam, ess, cap and fidelity are those of `fedshift.server.weights.Pals`
    example         options for examples of the method, where its defaults alone make none
    """

    title: str = ""
    page: str = ""
    router: bool = False
    fixed_head: bool = False
    follows_target: bool = False
    even: bool = False
    at_target: bool = False
    densities: bool = False
    auto_ess: bool = False
    example: Mapping[str, Any] = field(default_factory=dict)


# Options of one name that mean different things in different methods say what they mean: an
# experiment file's value is never carried over to another meaning.
ProximalMu = Annotated[float, "the pull towards the model received"]
ContrastiveMu = Annotated[float, "the strength of the contrastive term"]
Temperature = Annotated[float, "the temperature of the contrastive term"]
ServerTau = Annotated[float, "the smallest divisor of the server's step"]
PersonalLam = Annotated[float, "the pull of the personal model to the model received"]
SizeLam = Annotated[float | None, "how much sample size counts against the match of the labels"]
ClassLam = Annotated[float, "the weight of the class loss"]
NotTrueBeta = Annotated[float, "the strength of the distillation"]
NotTrueTau = Annotated[float, "the temperature of the distillation"]
DecorrelationBeta = Annotated[float, "the strength of the decorrelation"]
MarginTau = Annotated[float, "the size of the margins"]
