"""Checks of arguments from Python callers: their kinds and ranges.

A check either passes silently or raises InputError with the argument, its value and a cure.
"""

from __future__ import annotations

import math
import os
import sys
import types
from collections import abc
from dataclasses import fields
from decimal import Decimal
from functools import cache
from numbers import Real
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from fedshift.errors import InputError, check_name, shown
from fedshift.real import disordered, is_whole

# An example for each kind. They are text, because this file must not import the rest of the
# library, which imports it.
EXAMPLES = {
    "Method": "FedAvg(model)",
    "Combine": "Mean(BySize())",
    "Gate": "Gate()",
    "Local": "Local(lr=0.1)",
    "Mean": "Mean(BySize())",
    "Model": "Model(net)",
    "Path": "Path(...) of it",
    "Seeds": "Seeds.of(0)",
    "ServerOptimizer": "Sgd() of fedshift.server.optimizers",
    "Share": 'Share(("head.",))',
    "Shelf": "Shelf()",
    "Tensor": "torch.as_tensor(...) of it",
    "Term": "CrossEntropy() of fedshift.client.objectives",
    "Weights": (
        "BySize(), or a rule of yours: a function from table to weights [C] with the attribute "
        'needs = ("n",) or ("n", "labels")'
    ),
}
FILES_ONLY = (
    '; "auto" is a word of experiment files: in Python train once with each number, and keep the '
    "run of the best estimate_target_accuracy(correct, total, target) (docs/selection.md)"
)
WORDS = {"int": "a whole number", "float": "a number", "bool": "True or False", "str": "text"}


def called(given: object) -> str:
    """A value in a few words: `the text "2"`, `20.0`, `the class Adam`, `a Linear`."""
    if isinstance(given, type):
        return f"the class {given.__name__}"
    if isinstance(given, str):
        return f'the text "{shown(given)}"'
    if given is None or isinstance(given, int | float):
        return repr(given)
    if isinstance(given, types.FunctionType):
        return f"the function {given.__name__}"
    return with_article(type(given).__name__)


def with_article(name: str) -> str:
    """`a Linear`, `an Adam`."""
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def is_number(given: object) -> bool:
    """Whether it is a real number, also numpy's; True, False and tensors are not."""
    # bool is a subclass of int, but `lr=True` is a mistake, not a 1. Decimal is no Real.
    return isinstance(given, Real | Decimal) and not isinstance(given, bool)


def check_whole(name: str, given: object, least: int | None = None) -> None:
    """Raise InputError unless it is a whole number, of `least` or more."""
    if not is_whole(given):
        raise InputError(f"{name} must be a whole number, got {called(given)}{_number(given, int)}")
    if least is not None and int(given) < least:  # type: ignore[call-overload]
        raise InputError(f"{name} must be {least} or more, got {called(given)}")


def check_number(name: str, given: object) -> None:
    """Raise InputError unless it is a number."""
    if not is_number(given):
        raise InputError(f"{name} must be a number, got {called(given)}{_number(given, float)}")


def check_positive(name: str, given: float) -> None:
    """Raise InputError unless it is above 0 and finite; NaN is neither."""
    if not 0.0 < given <= sys.float_info.max:  # whole numbers have no limit of their own
        raise InputError(f"{name} must be a positive number, got {called(given)}")


def check_not_negative(name: str, given: float) -> None:
    """Raise InputError unless it is 0 or more and finite; NaN is neither."""
    if not 0.0 <= given <= sys.float_info.max:
        raise InputError(f"{name} must be 0 or more, got {called(given)}")


def check_counted(name: str, given: int | None) -> None:
    """Raise InputError unless it is 1 or more, or None."""
    if given is not None and given < 1:
        raise InputError(f"{name} must be at least 1, got {given}")


# Annotations of a dataclass's fields, whose ranges `check_fields` checks.
Counted = Annotated[int, check_counted]
Positive = Annotated[float, check_positive]
NotNegative = Annotated[float, check_not_negative]


def check_path(name: str, given: object) -> None:
    """Raise InputError unless it names a file or folder: text that is not empty, or a Path."""
    if not isinstance(given, str | os.PathLike) or given == "":
        what = "an empty text" if given == "" else called(given)
        raise InputError(f"{name} must be a path, as text or a Path, got {what}")


def check_kind(name: str, given: object, kind: type, cure: str) -> None:
    """Raise InputError unless it is an object of the class `kind`; `cure` says what to give."""
    if not isinstance(given, kind):
        raise InputError(
            f"{name} must be {with_article(kind.__name__)}, got {called(given)}; {cure}"
        )


def check_listed(name: str, given: Any, kind: type, cure: str) -> None:
    """Raise InputError unless it is a list, or can be indexed like one, of objects of a class.

    Of an object that makes its entries on demand only the first entry is checked.
    """
    # A generator would be empty at its second use, in the middle of a run.
    if isinstance(given, abc.Iterator):
        raise InputError(f"{name} is {called(given)}, gone after one look; give list(...) of it")
    if isinstance(given, kind):
        raise InputError(f"{name} is {called(given)}, and a list is due; give [it]")
    # Checked by its methods and not by its class: `Pooled` is no list, and makes its clients on
    # demand.
    is_list = hasattr(given, "__len__") and hasattr(given, "__getitem__")
    if not is_list or isinstance(given, str | abc.Mapping | type) or hasattr(given, "tolist"):
        raise InputError(f"{name} is {called(given)}, and a list is due; {cure}")
    if not len(given):
        raise InputError(f"no {name}; give at least one: {cure}")
    for i, each in enumerate(given if isinstance(given, list | tuple) else [given[0]]):
        check_kind(f"{name}[{i}]", each, kind, cure)


def check_fields(made: Any) -> None:
    """Raise InputError for a field of a dataclass whose value does not fit its annotation.

    Numbers, texts, tuples, classes and protocols are checked, alone or as alternatives; names in a
    `Literal` are left to the class itself, which can suggest the nearest one. Lists, arrays and
    tensors become tuples where the annotation says so: settings then compare equal, whichever of
    them the caller used. Functions in an `Annotated` field, as in `Positive`, check the value.
    """
    for name, hint, checks in _hints(made.__class__):
        given, what = getattr(made, name), f"{type(made).__name__} {name}"
        value = settled(what, given, hint)
        if value is not given:  # the dataclass is frozen
            object.__setattr__(made, name, value)
        for check in checks:
            check(what, value)


def check_choices(made: Any, name: str = "{}") -> None:
    """Raise InputError, with the nearest name, for a `Literal` field whose value is none of its.

    name  how messages call a field, as in "tune_{}"
    """
    for field, hint, _ in _hints(made.__class__):
        if get_origin(hint) is Literal:
            check_name(name.format(field), getattr(made, field), get_args(hint))


def settled(name: str, given: Any, hint: Any, strict: bool = False) -> Any:
    """The value, converted to the form of its annotation. Raises InputError as `check_fields`.

    strict: also raise for a value that is not text where a `Literal` name is expected.
    """
    if _fits(given, hint) and (not strict or is_named(given, hint)):
        return given
    if wrong := disordered(given):
        raise InputError(f"{name}: {wrong}")
    # Arrays and tensors become lists: dataclasses that hold them cannot be compared or hashed.
    plain = given.tolist() if hasattr(given, "tolist") else given
    is_list = isinstance(plain, list) and (not strict or is_named(tuple(plain), hint))
    if is_list and _fits(tuple(plain), hint):
        return tuple(plain)
    raise InputError(
        f"{name} must be {_in_words(hint)}, got {_misfit(given, hint)}{_cure(given, hint)}"
    )


def is_named(given: object, hint: Any) -> bool:
    """Whether it is text, or fits a part of the annotation that is no `Literal`."""
    literal = any(get_origin(one) is Literal for one in _alternatives(hint))
    others = [one for one in _alternatives(hint) if get_origin(one) is not Literal]
    return not literal or isinstance(given, str) or any(_fits(given, one) for one in others)


def _misfit(given: Any, hint: Any) -> str:
    """A description of the misfit; for a tuple, with its first entry that does not fit."""
    each = [get_args(one)[0] for one in _alternatives(hint) if get_origin(one) is tuple]
    if each and isinstance(given, tuple | list):
        misfits = [called(v) for v in given if not _fits(v, each[0])]
        return f"{called(given)} with {misfits[0]}" if misfits else called(given)
    return called(given)


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


# Cached, because resolving annotations takes much longer than the checks themselves.
@cache
def _hints(kind: Any) -> tuple[tuple[str, Any, tuple[Any, ...]], ...]:
    """(name, annotation, checks of its range) of each field."""
    plain, whole = get_type_hints(kind), get_type_hints(kind, include_extras=True)
    return tuple(
        (f.name, plain[f.name], getattr(whole[f.name], "__metadata__", ()))
        for f in fields(kind)
        if f.init
    )


def _fits(given: object, hint: Any) -> bool:
    if hint is None or hint is type(None):
        return given is None
    if hint is int:
        return is_whole(given)
    if hint is float:
        return is_number(given)
    if hint is bool:
        return isinstance(given, bool) or str(getattr(given, "dtype", "")) == "bool"  # numpy's
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(given, one) for one in get_args(hint))
    if origin is tuple:
        if not isinstance(given, tuple):
            return False
        each = get_args(hint)
        if each[-1] is Ellipsis:
            return all(_fits(one, each[0]) for one in given)
        return len(given) == len(each) and all(map(_fits, given, each))
    if origin is abc.Callable:
        # A class is callable, but most likely an object of it was meant.
        return callable(given) and not isinstance(given, type)
    if origin is not None or not isinstance(hint, type):
        return True  # other annotations cannot be checked here; mypy checks them
    if getattr(hint, "_is_protocol", False):
        # isinstance() would ask for @runtime_checkable, which users' protocols rarely have.
        return not isinstance(given, type) and all(hasattr(given, name) for name in members(hint))
    return isinstance(given, hint)


def members(protocol: type) -> tuple[str, ...]:
    """The names of a protocol's public members, and `__call__`."""
    return tuple(n for n in vars(protocol) if not n.startswith("_") or n == "__call__")


def _in_words(hint: Any) -> str:
    """An annotation in words: `a whole number or None`."""
    if hint is None or hint is type(None):
        return "None"
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(_in_words(one) for one in get_args(hint))
    if origin is tuple:
        each = get_args(hint)
        if each[-1] is not Ellipsis:
            return f"a tuple of {len(each)}"
        return f"a tuple, each {_in_words(each[0])}"
    if origin is Literal:
        return " or ".join(f'"{one}"' for one in get_args(hint))
    if origin is abc.Callable:
        return "a function"
    name = getattr(hint, "__name__", str(hint))
    return WORDS.get(name) or with_article(name)


def _cure(given: object, hint: Any) -> str:
    """A hint on what to give instead; "" if the message needs none."""
    kinds = _alternatives(hint)
    if isinstance(given, type) and any(_fits_class(given, kind) for kind in kinds):
        return f"; give an object of it, {given.__name__}(...)"
    for kind in kinds:
        if kind in (int, float):
            if cure := _number(given, kind):
                return cure
        elif get_origin(kind) is tuple:
            if isinstance(given, str) and get_args(kind)[0] is str:
                return f'; give ("{shown(given)}",)'
        elif name := getattr(kind, "__name__", ""):
            # A weight rule was given instead of a combination rule, such as the mean by this rule.
            if name in ("Combine", "Mean") and hasattr(given, "needs"):
                return f"; give Mean({type(given).__name__}(...)) of fedshift.server.combine"
            if name in EXAMPLES:
                return f"; give {EXAMPLES[name]}"
    return ""


def _fits_class(given: type, kind: Any) -> bool:
    """Whether objects of a class would fit."""
    if not isinstance(kind, type):
        return False
    if getattr(kind, "_is_protocol", False):
        return all(hasattr(given, name) for name in members(kind))
    return issubclass(given, kind)


def _number(given: object, kind: type[int] | type[float]) -> str:
    """A hint with the right number if it is clear: `; give 20` for 20.0 and for "20"."""
    if isinstance(given, str) and given == "auto":
        return FILES_ONLY
    try:
        number = float(given) if isinstance(given, str) or is_number(given) else math.nan  # type: ignore[arg-type]
    except ValueError:
        return ""
    if kind is int and number.is_integer():
        return f"; give {round(number)}"
    if kind is float and math.isfinite(number):
        return f"; give {number:g}"
    # Tensors and arrays of a single number, which has to be taken out.
    return f"; give {kind.__name__}(...) of it" if hasattr(given, "item") else ""
