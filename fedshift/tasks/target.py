"""The target as users give it: a client, label shares, or a test set."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedshift.arguments import called
from fedshift.errors import InputError, nearest, shown
from fedshift.real import is_whole
from fedshift.tasks.names import as_number, listed, plain, text_of

SHARED = ("shares", "counts", "pooled", "clients")
ALLOWED = (
    "a client's name, label shares or counts (a dict by name, or one number per class), "
    '"pooled", "clients", or a labelled test set (x, y)'
)


@dataclass(frozen=True)
class Target:
    """Where a model will be used.

    kind    "client", "shares", "counts", "pooled", "clients" or "test set"
    name    of the client
    shares  [K], sum to 1 in the order of the classes; () if they are not given
    total   the sum of the counts, for kind "counts"
    """

    kind: str
    name: str = ""
    shares: tuple[float, ...] = ()
    total: int = 0

    @property
    def cuts(self) -> bool:
        """Whether test rows are cut from the clients' own rows."""
        return self.kind in SHARED

    @property
    def text(self) -> str:
        """The target in words."""
        return {
            "client": f"the client {shown(self.name)}, held out",
            "shares": "the given label shares",
            "counts": f"the given counts of {self.total:,} labels",
            "pooled": "the clients' labels together",
            "clients": "each client's own kind of data",
            "test set": "the given test set",
        }[self.kind]


def is_test_set(given: Any) -> bool:
    """Whether a target is a set of labelled examples: a pair (x, y), a table or its file."""
    if isinstance(given, str | os.PathLike):
        return os.path.isfile(given)
    if isinstance(given, tuple) and len(given) == 2:
        return not any(isinstance(one, int | float) for one in given)
    pair = hasattr(given, "x") and hasattr(given, "y") and not hasattr(given, "keys")
    return pair or (hasattr(given, "iloc") and getattr(given, "ndim", 1) == 2)


def target_of(given: Any, clients: Sequence[str], classes: Sequence[str]) -> Target:
    """The target that a user gives, other than a test set.

    Raises InputError for a name that is no client's, and for shares that are no distribution.
    """
    one = not hasattr(given, "__len__") and (is_whole(given) or text_of(given) in clients)
    if isinstance(given, str) or one:
        return _named(text_of(given), clients)
    if hasattr(given, "to_dict") and {text_of(name) for name in given.index} & {*classes}:
        given = given.to_dict()  # a pandas Series by class
    if isinstance(given, Mapping):
        return _shares(_by_class(given, classes))
    values = plain(given)
    values = values.tolist() if hasattr(values, "tolist") else values
    if isinstance(values, list | tuple) and all(isinstance(v, int | float) for v in values):
        if len(values) != len(classes):
            raise InputError(
                f"target has {len(values)} entries for {len(classes)} classes "
                f"({listed(classes)}); give one for each, in this order"
            )
        return _shares([float(v) for v in values])
    raise InputError(f"target is {called(given)}; give {ALLOWED}")


def _named(name: str, clients: Sequence[str]) -> Target:
    if name in ("pooled", "clients"):
        if name in clients:
            raise InputError(f'target="{name}" is also the name of a client; rename that client')
        return Target(name)
    if name in clients:
        if len(clients) < 2:
            raise InputError(
                f'the target "{shown(name)}" is the only client; none is left to train'
            )
        return Target("client", name)
    near = nearest(name, [*clients, "pooled", "clients"])
    raise InputError(
        f'target="{shown(name)}" is no client; there are {listed(clients)}.{near} Or give {ALLOWED}'
    )


def _by_class(given: Mapping[Any, Any], classes: Sequence[str]) -> list[float]:
    shares = {text_of(name): value for name, value in given.items()}
    for name in shares:
        if name not in classes:
            raise InputError(
                f'target: the label "{shown(name)}" is not among the classes {listed(classes)}.'
                f"{nearest(name, classes)}"
            )
    if lacking := [name for name in classes if name not in shares]:
        raise InputError(f'target has no entry for "{shown(lacking[0])}"; give it 0, or its share')
    return [as_number(str(shares[name])) for name in classes]


def _shares(values: list[float]) -> Target:
    total = math.fsum(values)
    if not all(math.isfinite(v) and v >= 0 for v in values) or total <= 0:
        raise InputError(f"target={values}: give shares or counts of 0 or more, not all of them 0")
    shares = tuple(v / total for v in values)
    if abs(total - 1) <= 1e-6:
        return Target("shares", shares=shares)
    if all(v.is_integer() for v in values):
        return Target("counts", shares=shares, total=round(total))
    raise InputError(
        f"target sums to {total:.6g}; give shares that sum to 1, or whole numbers as counts"
    )
