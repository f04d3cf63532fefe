"""Coding names of classes, clients and categories as whole numbers."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedshift.arguments import called
from fedshift.errors import InputError, nearest, shown

Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]

# How many texts are looked at to recognise dates and amounts.
MOST_READ = 100
_DATE = re.compile(r"\d{1,4}([-./])\d{1,2}\1\d{1,4}([ T]\d.*)?", re.ASCII)
_AMOUNT = re.compile(r"[^\w\s]?\s?[+-]?\d[\d.,' ]*(\s?[^\w\s]|\s?[a-zA-Z]{1,4})?")
_WHOLE = re.compile(r"^([+-]?\d+)\.0+$", re.ASCII)
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)


class Coded(NamedTuple):
    """A column of names: entry j is names[codes[j]], and missing if its code is -1. codes [n]."""

    codes: Ints
    names: tuple[str, ...]

    def counts(self, rows: Ints | None = None) -> Ints:
        """How often each name occurs, in all rows or in `rows`: [names]."""
        codes = self.codes + 1 if rows is None else self.codes[rows] + 1  # 0: missing
        return np.bincount(codes, minlength=len(self.names) + 1)[1:]

    @property
    def used(self) -> list[str]:
        """The names that occur."""
        return [name for name, count in zip(self.names, self.counts(), strict=True) if count]


def coded(values: Any, what: str = "a column") -> Coded:
    """Values as codes of their names, which are in order (see `ordered`).

    NaN, None and empty text are missing. Spaces around a text are dropped, and whole numbers have
    no decimal point: " a" is "a", and 1.0 is "1". Raises InputError if a value is a list, a dict or
    an array; what: words for the values in its message.
    """
    if isinstance(values, Coded):
        return values
    import pandas as pd  # loading it takes a while, and few commands need it

    column = pd.Series(plain(values))
    try:
        codes, distinct = pd.factorize(column)
    except TypeError:
        row, odd = next((i, v) for i, v in enumerate(column) if type(v).__hash__ is None)
        raise InputError(
            f"{what} holds {called(odd)} in row {row + 1}; give one value per row, or several "
            "columns"
        ) from None
    texts = [text_of(one) for one in distinct]
    names = ordered({text for text in texts if text})
    place = {name: i for i, name in enumerate(names)} | {"": -1}
    number = np.array([*(place[text] for text in texts), -1], dtype=np.int64)
    return Coded(number[codes], names)  # pandas' code of a missing entry is -1: the last one


def whole_names(given: Coded) -> Coded:
    """The same entries with whole numbers written without a point: "1.0" is "1", "01" stays."""
    texts = [_WHOLE.sub(r"\1", name) for name in given.names]
    if texts == [*given.names]:
        return given
    names = ordered({*texts})
    places = {name: place for place, name in enumerate(names)}
    place = np.array([*map(places.__getitem__, texts), -1], dtype=np.int64)
    return Coded(place[given.codes], names)


def named(values: Any, name: Any) -> Mask | None:
    """Which entries are the client `name`; None if it is no name, but a list, a dict or a table."""
    if name is None or (hasattr(name, "__len__") and not isinstance(name, str)):
        return None
    given = coded(values, "client")
    text = text_of(name)
    place = given.names.index(text) if text in given.names else len(given.names)
    return np.asarray(given.codes == place)


def plain(values: Any) -> Any:
    """A tensor as an array; other values unchanged."""
    return values.detach().cpu().numpy() if hasattr(values, "detach") else values


def text_of(value: Any) -> str:
    """The name of a value: its text without spaces around it, and 1.0 as "1"."""
    if isinstance(value, bytes):
        value = value.decode(errors="replace")
    if isinstance(value, float | np.floating) and float(value).is_integer():
        value = int(value)
    return str(value).strip()


def ordered(names: Iterable[str]) -> tuple[str, ...]:
    """The names sorted by number if all are numbers, or else by alphabet."""
    texts = sorted(names)
    numbers = [as_number(text) for text in texts]
    if not any(map(math.isnan, numbers)):
        texts = [text for _, text in sorted(zip(numbers, texts, strict=True))]
    return tuple(texts)


def as_number(text: str) -> float:
    """A text as a number; NaN if it is none, and for "nan", "inf" and "1_000"."""
    return float(text) if _NUMBER.fullmatch(text) else math.nan


def cure_of(texts: Sequence[str]) -> str:
    """A sentence if the texts are dates, or amounts with signs that no number has; else ""."""
    for form, what in (
        (_DATE, "dates; put days or years"),
        (_AMOUNT, "amounts; put plain numbers"),
    ):
        if _fit(form, texts):
            return f' "{shown(texts[0])}" and the like are {what} in their place.'
    return ""


def are_dates(texts: Sequence[str]) -> bool:
    """Whether nearly all of the first texts are dates, such as 2024-05-31 or 31.5.2024."""
    return _fit(_DATE, texts)


def _fit(form: re.Pattern[str], texts: Sequence[str]) -> bool:
    first = list(texts[:MOST_READ])
    return bool(first) and sum(map(bool, map(form.fullmatch, first))) > 0.9 * len(first)


def reordered(given: Coded, names: Sequence[Any], what: str) -> Coded:
    """The same entries with their names in the order of `names`, which may have more names.

    Raises InputError for an entry whose name is not among them, and for names given twice.
    """
    if isinstance(names, str):
        raise InputError(f'classes="{shown(names)}": give a list of names, in their order')
    wanted = tuple(map(text_of, names))
    if twice := [name for name in wanted if wanted.count(name) > 1]:
        raise InputError(f'classes: "{shown(twice[0])}" is given twice; give each name once')
    used = given.counts() > 0
    if odd := [n for n, u in zip(given.names, used, strict=True) if u and n not in wanted]:
        raise InputError(
            f'the {what} "{shown(odd[0])}" is not among classes={listed(wanted)}.'
            f"{nearest(odd[0], wanted)} Add it, or leave its rows out."
        )
    place = np.array([*(wanted.index(n) if n in wanted else -1 for n in given.names), -1])
    return Coded(place[given.codes].astype(np.int64), wanted)


def with_classes(labels: Coded, classes: Sequence[Any]) -> Coded:
    """Labels in the order of `classes`; labels that are whole numbers 0..K-1 get these names.

    Raises InputError as `reordered` does, and for a number of names other than K.
    """
    wanted = () if isinstance(classes, str) else tuple(map(text_of, classes))
    used = labels.used
    numbered = all(name.isdecimal() and name == str(int(name)) for name in used)
    if not wanted or not used or not numbered or {*used} & {*wanted}:
        return reordered(labels, classes, "label")
    K = int(max(used, key=int)) + 1
    if len(wanted) != K:
        raise InputError(
            f"classes={listed(wanted)}: {many(len(wanted), 'name')} for labels that are whole "
            f"numbers up to {K - 1} ({listed(used)}); give {K}, in the order of the numbers from 0 "
            "on, or the labels themselves"
        )
    renamed = reordered(labels, range(K), "label")._replace(names=wanted)
    return reordered(renamed, wanted, "label")  # refuses a name that is given twice


def about_spelling(what: str, names: Iterable[str]) -> list[str]:
    """A sentence on names that differ by case or spaces alone, which may be meant as one.

    >>> from fedshift.tasks.names import about_spelling
    >>> about_spelling("Labels", ["No", "no", "yes"])
    ['Labels that differ by case or spaces alone: No, no. Write each in one way.']
    """
    folded = {name: "".join(name.casefold().split()) for name in names}
    often = Counter(folded.values())
    alike = [name for name in folded if often[folded[name]] > 1]
    how = f"that differ by case or spaces alone: {listed(alike)}. Write each in one way."
    return [f"{what} {how}"] if alike else []


def many(count: int, what: str) -> str:
    """A number with its noun: `1 row`, `1,200 rows`, `2 classes`."""
    end = "" if count == 1 else "es" if what.endswith("s") else "s"
    return f"{count:,} {what}{end}"


def listed(names: Sequence[str], most: int = 6) -> str:
    """The first names, and how many more there are."""
    first = ", ".join(shown(name, 30) for name in names[:most])
    return first if len(names) <= most else f"{first}, ... {len(names) - most} more"
