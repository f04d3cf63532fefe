"""Every named method: one function from a setting to an algorithm.

This package is the registry: a method is a function that `method` marks, with what is special of
it; other packages register theirs by entry points, and no listing shows those. Its name
is the function's name, its options are the keyword arguments, and its docstring's
first line, "Reference" and "Note" are what `fedshift methods` prints.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import FunctionType, MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, get_origin, get_type_hints

from fedshift.algorithms.method import Method
from fedshift.arguments import check_kind, settled
from fedshift.errors import InputError, unknown
from fedshift.plugins import METHODS, loaded, registered
from fedshift.recipes import (
    collaborating,
    density,
    labelsets,
    one_model,
    personal,
    robust,
    routed,
    skewed,
    under,
    weighed,
)
from fedshift.recipes.setting import Setting as Setting
from fedshift.recipes.traits import Traits as Traits

if TYPE_CHECKING:  # when it runs, a module gives its methods alone
    from fedshift.recipes.collaborating import *  # noqa: F403
    from fedshift.recipes.density import *  # noqa: F403
    from fedshift.recipes.labelsets import *  # noqa: F403
    from fedshift.recipes.one_model import *  # noqa: F403
    from fedshift.recipes.personal import *  # noqa: F403
    from fedshift.recipes.robust import *  # noqa: F403
    from fedshift.recipes.routed import *  # noqa: F403
    from fedshift.recipes.skewed import *  # noqa: F403
    from fedshift.recipes.weighed import *  # noqa: F403

_MODULES: tuple[Any, ...] = (
    collaborating, density, labelsets, one_model, personal, robust, routed, skewed,
    weighed,
)  # fmt: skip
# By name; modules import one another's methods, which are the same ones.
_MADE: dict[str, Callable[..., Method]] = {
    make.__name__: make
    for module in _MODULES
    for make in vars(module).values()
    if inspect.isfunction(make) and "traits" in vars(make)
}
__all__ = sorted(_MADE)
_TRAITS: dict[str, Traits] = {name: vars(make)["traits"] for name, make in _MADE.items()}


def _checked(make: Callable[..., Method]) -> Callable[..., Method]:
    """The recipe, with its setting and options checked before it uses them."""
    hints = get_type_hints(make, include_extras=True)

    @functools.wraps(make)
    def checked(setting: Setting, **options: Any) -> Method:
        cure = "give Setting(model, target), target being the label shares"
        check_kind(f"the setting of {make.__name__}", setting, Setting, cure)
        for name in options.keys() & hints.keys():
            kind, *notes = _parts(hints[name])
            options[name] = settled(f"{make.__name__} {name}", options[name], kind, strict=True)
            for check in filter(callable, notes):
                check(name, options[name])
        return make(setting, **options)

    # pickle looks the function up by module and name, and here the name means `checked`.
    checked.__module__ = __name__
    return checked


def _parts(hint: Any) -> tuple[Any, ...]:
    """An option's type, and what its annotation says beside: a meaning, checks of its range."""
    return (hint.__origin__, *hint.__metadata__) if get_origin(hint) is Annotated else (hint,)


# In this module alone: recipes that build on one another call the plain functions.
for _name, _make in _MADE.items():
    globals()[_name] = _checked(_make)


@functools.cache
def _registered(name: str) -> Callable[..., Method] | None:
    """The method of this name that another package registers (`fedshift.plugins`), or None."""
    point = registered(METHODS).get(name)
    return None if point is None else _checked(loaded(point, FunctionType, "method"))


def __getattr__(name: str) -> Callable[..., Method]:
    make = None if name.startswith("_") else _registered(name)
    if make is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return make


def is_method(name: str) -> bool:
    """Whether a method has this name: one of the library, or of a package that registers it."""
    return name in __all__ or _registered(name) is not None


@dataclass(frozen=True)
class Recipe:
    """A recipe as a value: its name, summary, reference, note, options and traits."""

    name: str
    make: Callable[..., Method]
    summary: str
    reference: str
    note: str
    options: dict[str, inspect.Parameter]
    traits: Traits

    @property
    def title(self) -> str:
        """The method's name in tables."""
        return self.traits.title or self.name

    @property
    def page(self) -> str:
        """Its page in the documentation."""
        return f"docs/methods/{self.traits.page or self.name.removesuffix('_drm_repo')}.md"

    @property
    def meanings(self) -> dict[str, str]:
        """Option -> what it is, for names of options that are something else in other methods."""
        return {
            name: note
            for name, option in self.options.items()
            for note in _parts(option.annotation)[1:]
            if isinstance(note, str)
        }


def recipe(name: str, options: Mapping[str, Any] = MappingProxyType({})) -> Recipe:
    """Look a method up by name; under other weights, if the options have the key `weights`.

    It then has the rule's options as well. Raises InputError, with the nearest match, for unknown
    names of methods and weights, and for a method that fixes its own weights.

    >>> from fedshift.recipes import recipe
    >>> list(recipe("moon", {"weights": "fedpals"}).options)
    ['mu', 'tau', 'weights', 'lam', 'ess', 'cap', 'fidelity']
    """
    if not is_method(name):
        raise unknown("method", name, __all__)
    plain = _of_the_library(name, globals().get(name) or __getattr__(name))
    # Of its own, since a caller may change it.
    plain = replace(plain, options=dict(plain.options))
    weights = options.get("weights")
    if weights is None:
        return plain
    if plain.traits.fixes_weights:
        raise under.fixed(name, weights)
    added = under.options_of(str(weights), plain.options)
    # A method's own `lam` leaves no name for that of lambda = 0, which "auto" tries.
    automatic = {"ess", "lam"} <= added.keys()
    return replace(
        plain,
        make=under.making(plain.make, plain.options),
        options=plain.options | added,
        traits=replace(plain.traits, auto_ess=automatic or plain.traits.auto_ess),
    )


def fitting(name: str, options: Mapping[str, Any]) -> Recipe:
    """`recipe`, without the weights for a method that fixes its own: other methods may take them.

    Where options have lists of values, with those of the weights that have the most options.
    """
    weights = options.get("weights")
    if isinstance(weights, list | tuple):
        weights = "fedpals" if "fedpals" in weights else next(iter(weights), None)
    fixed = traits_of(name).fixes_weights
    return recipe(name) if fixed else recipe(name, {"weights": weights})


def made_by(make: Callable[..., Method]) -> Recipe:
    """The recipe that a function (setting, *, options) -> Method of one's own is.

    Its options are its keyword-only arguments. Raises InputError for what cannot be called so.

    >>> from fedshift.recipes import fedprox, made_by
    >>> def mine(setting, *, mu=0.1):
    ...     return fedprox(setting, mu=mu)
    >>> made_by(mine).name, list(made_by(mine).options)
    ('mine', ['mu'])
    """
    name = getattr(make, "__name__", type(make).__name__)
    try:
        inspect.signature(make).bind(None)
    except (TypeError, ValueError):
        raise InputError(
            f"method={name}: a method of your own is a function of one Setting, whose options are "
            "keyword-only: def mine(setting, *, mu=0.1)"
        ) from None
    return _described(name, make, Traits())


def _described(name: str, make: Callable[..., Method], traits: Traits) -> Recipe:
    text = inspect.getdoc(make) or ""
    try:
        signature = inspect.signature(make, eval_str=True)
        # `eval_str` leaves the texts of a signature that was put together, as in labelsets.py.
        hints = get_type_hints(make, include_extras=True) if hasattr(make, "__signature__") else {}
    except NameError:  # annotations of names that are imported for types alone
        signature, hints = inspect.signature(make), {}
    keyword = inspect.Parameter.KEYWORD_ONLY
    return Recipe(
        name,
        make,
        text.partition("\n")[0],  # nothing under `python -OO`
        _field(text, "Reference"),
        _field(text, "Note"),
        {
            name: option.replace(annotation=hints.get(name, option.annotation))
            for name, option in signature.parameters.items()
            if option.kind is keyword
        },
        traits,
    )


@functools.cache  # a table of results asks for the same few methods ten thousand times
def _of_the_library(name: str, make: Callable[..., Method]) -> Recipe:
    return _described(name, make, traits_of(name))


def traits_of(name: str) -> Traits:
    """What is special about a method of this name; nothing about one that is no recipe."""
    made = None if name in _TRAITS else _registered(name)
    return _TRAITS.get(name, Traits() if made is None else vars(made).get("traits", Traits()))


def recipes() -> tuple[Recipe, ...]:
    """All methods, by name."""
    return tuple(recipe(name) for name in sorted(__all__))


def _field(text: str, label: str) -> str:
    # Up to the next label, since a field may run over several lines.
    field = re.search(rf"^{label}: (.*?)(?=^\w+: |\Z)", text, re.S | re.M)
    return " ".join(field.group(1).split()) if field else ""
