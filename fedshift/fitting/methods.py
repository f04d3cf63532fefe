"""Methods as users give them to `fit`: a recipe's name, a function of `Setting`, an `Algorithm`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

from fedshift import recipes
from fedshift.algorithms.method import Method as Algorithm
from fedshift.algorithms.method import check_method
from fedshift.arguments import called
from fedshift.calls import too_many
from fedshift.errors import InputError, nearest
from fedshift.experiments.config.user_code import file_of, place_of, raised
from fedshift.recipes import Recipe, Setting, Traits

NONE: Mapping[str, Any] = MappingProxyType({})
DUE = "it must return an Algorithm, such as FedAvg(setting.model, local=setting.local)"


@dataclass(frozen=True, eq=False)
class Method:
    """A recipe, or a method of the user's own, with its options; `fedshift.method` makes it.

    custom     whether it is the user's own
    algorithm  the user's `Algorithm`, which has its own network; None if a function of `Setting`
               makes the method
    """

    recipe: Recipe
    options: Mapping[str, Any] = field(default_factory=dict)
    custom: bool = False
    algorithm: Algorithm | None = None

    @property
    def label(self) -> str:
        """The name with the options: "fedprox(mu=0.1)"."""
        options = ", ".join(f"{k}={v!r}" for k, v in self.options.items())
        return f"{self.recipe.name}({options})" if options else self.recipe.name

    def __repr__(self) -> str:
        return f"method: {self.label}"


def method(
    given: str | Callable[..., Algorithm] | Algorithm | None = None, *values: Any, **options: Any
) -> Method:
    """A method with its options, for `fit` and `compare`.

    given    a recipe's name; a function of `Setting` that makes an `Algorithm`, with its options as
             keyword-only arguments; or an `Algorithm`, which has no options
    options  the method's options by name

    Raises InputError for an unknown name or option, with the nearest match, and for options that
    are given without a name.

    >>> fs.method("fedprox", mu=0.1).label
    'fedprox(mu=0.1)'
    """
    options = {name: plain_number(value) for name, value in options.items()}
    if isinstance(given, str):
        made = Method(recipes.recipe(given, options), options)
    elif hasattr(given, "client_update"):  # an Algorithm need not inherit from a class of ours
        check_method(given)
        made = Method(_recipe_of(given), options, custom=True, algorithm=given)  # type: ignore[arg-type]
    elif callable(given):
        made = Method(recipes.made_by(given), options, custom=True)
    else:
        raise InputError(
            f"method is {called(given)}; give a name, fs.method(name, ...), a function of Setting "
            "or an Algorithm"
        )
    if values:
        names = [name for name in made.recipe.options if name not in options]
        raise InputError(too_many("fs.method", ["the method"], values, names))
    for name in options:
        if name not in made.recipe.options and not _takes_any(made):
            raise InputError(foreign_option(name, made.recipe))
    return made


def plain_number(given: Any) -> Any:
    """numpy's numbers as Python's, also in a list or tuple: files of runs hold no others."""
    if isinstance(given, list | tuple) and type(given) in (list, tuple):
        return type(given)(map(plain_number, given))
    return given.item() if isinstance(given, np.generic) else given


def made_by_user(make: Callable[..., Algorithm], setting: Setting, **options: Any) -> Algorithm:
    """The `Algorithm` that a user's function makes of a setting.

    Raises InputError, with file and line, if the function raises or gives something else.
    """
    name, place = getattr(make, "__name__", type(make).__name__), place_of(make)
    where = f"method={name} ({place})" if place else f"method={name}"
    try:
        made = make(setting, **options)
    except InputError as e:  # raised by the library, for what the function called it with
        e.args = (f"{e} ({where})",)
        raise
    except (Exception, SystemExit) as e:
        raise InputError(f"{where}: {raised(e, file_of(make))}; {DUE}") from e
    try:
        check_method(made)
    except InputError:
        raise InputError(f"{where} returned {called(made)}; {DUE}") from None
    return made


def as_method(
    given: str | Callable[..., Algorithm] | Algorithm | Method, keys: Mapping[str, Any] = NONE
) -> Method:
    """`method(given)`; a Method stays as it is. keys: may name a recipe's rule for `weights`."""
    if isinstance(given, str) and "weights" in keys:
        return Method(recipes.recipe(given, {"weights": keys["weights"]}))
    return given if isinstance(given, Method) else method(given)


def foreign_option(name: str, recipe: Recipe) -> str:
    """The message for an option that a recipe does not have, with the recipes that have it."""
    others = [one.name for one in recipes.recipes() if name in one.options]
    whose = f" It is one of {', '.join(others[:6])}." if others else ""
    allowed = ", ".join(recipe.options) or "none"
    hint = "" if others else nearest(name, [*recipe.options, "weights"])
    hint += recipes.under.hint(name, recipe.traits)
    return f'{recipe.name} has no option "{name}"; its options: {allowed}.{hint}{whose}'


def _recipe_of(algorithm: Algorithm) -> Recipe:
    name = type(algorithm).__name__
    return Recipe(name, lambda setting: algorithm, "", "", "", {}, Traits())


def _takes_any(made: Method) -> bool:
    """Whether a user's function has **options, so that any name may be one of its options."""
    kinds = (p.kind for p in inspect.signature(made.recipe.make).parameters.values())
    return made.custom and inspect.Parameter.VAR_KEYWORD in kinds
