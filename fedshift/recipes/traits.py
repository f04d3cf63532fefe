"""What experiments and listings must know of a method before it is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, TypeVar

from fedshift.arguments import NotNegative, check_whole
from fedshift.errors import InputError
from fedshift.sketch import sketched


@sketched
@dataclass(frozen=True)
class Traits:
    """What is special about a method; its recipe says it, by `method`.

    title           its name in tables, where that is not the recipe's
    page            its page in docs/methods, where that is not the recipe's name
    router          needs a network with a router: "client_logits", a column per client
    fixed_head      needs a network whose classifier is fixed; those of the library get an ETF
    follows_target  its clients are drawn anew, so that all follow the target: a bound, no method
    even            its training takes the clients' label shares out of the model by itself
    at_target       it moves the model to the target's label shares by itself
    densities       it fits densities of the inputs first
    fixes_weights   its weights are what it is, or it has none: other weights are refused
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
    fixes_weights: bool = False
    auto_ess: bool = False
    example: Mapping[str, Any] = field(default_factory=dict)


Make = TypeVar("Make", bound=Callable[..., Any])


def method(traits: Traits = Traits()) -> Callable[[Make], Make]:
    """Mark a function (setting, *, options) -> Algorithm as a method, with what is special of it.

    Nothing is registered: `fedshift.recipes` looks for marks in its modules.

    >>> from fedshift.recipes.traits import Traits, method
    >>> @method(Traits("Mine", router=True))
    ... def mine(setting): ...
    >>> mine.traits.title
    'Mine'
    """

    def mark(make: Make) -> Make:
        vars(make)["traits"] = traits
        return make

    return mark


def check_share(name: str, given: float) -> None:
    """Raise InputError unless it is in [0, 1]."""
    if not 0.0 <= given <= 1.0:
        raise InputError(f"{name} must be in [0, 1], got {given}")


# A whole number of 0 or more, and of 1 or more.
Count = Annotated[int, partial(check_whole, least=0)]
Some = Annotated[int, partial(check_whole, least=1)]
# Options of one name that mean different things in different methods say what they mean: an
# experiment file's value is never carried over to another meaning.
ProximalMu = Annotated[NotNegative, "the pull towards the model received"]
ContrastiveMu = Annotated[NotNegative, "the strength of the contrastive term"]
Temperature = Annotated[float, "the temperature of the contrastive term"]
ServerTau = Annotated[float, "the smallest divisor of the server's step"]
PersonalLam = Annotated[NotNegative, "the pull of the personal model to the model received"]
SizeLam = Annotated[float | None, "how much sample size counts against the match of the labels"]
ClassLam = Annotated[float, "the weight of the class loss", check_share]
NotTrueBeta = Annotated[NotNegative, "the strength of the distillation"]
NotTrueTau = Annotated[float, "the temperature of the distillation"]
DecorrelationBeta = Annotated[NotNegative, "the strength of the decorrelation"]
MarginTau = Annotated[float, "the size of the margins"]
