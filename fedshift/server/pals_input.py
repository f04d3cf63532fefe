"""Checks of what FedPALS weights are computed from: counts, a target and a setting."""

from __future__ import annotations

import math
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike

from fedshift.arguments import check_number
from fedshift.errors import InputError, check_name
from fedshift.real import described, number, numbers
from fedshift.server.dual import Floats

Fidelity = Literal["squared", "norm"]

# How far the sum of weights may be from 1.
SUM_TOLERANCE = 1e-12
# Limits for the examples of a client that has any, and for lambdas above 0. Beyond them squares and
# quotients leave the range of floats, and one client's weight is lost in another's rounding.
LEAST_SIZE, LARGEST_SIZE = 1e-12, 1e18
LEAST_LAM, LARGEST_LAM = 1e-100, 1e100
# Limits for costs, beside distances of order 1.
LEAST_COST, LARGEST_COST = 1e-100, 1e12


def checked_counts(label_counts: ArrayLike) -> Floats:
    """Label counts [M, K]. Raises InputError unless they are finite, 0 or more, and not all 0."""
    try:
        counts = numbers(label_counts)
    except ValueError as error:
        raise InputError(
            "label_counts must be a table of numbers [clients, classes] with rows of one length; "
            f"got {type(label_counts).__name__}: {error}"
        ) from error
    if counts.ndim != 2 or 0 in counts.shape:
        raise InputError(
            f"label_counts must be a table [clients, classes]; got shape {counts.shape}. "
            "Give one row per client, also when there is a single client."
        )
    for bad, what in ((~np.isfinite(counts), "not finite"), (counts < 0.0, "negative")):
        if bad.any():
            i, k = (int(j) for j in np.argwhere(bad)[0])
            raise InputError(
                f"label_counts[{i}, {k}] is {counts[i, k]:g}, which is {what}; counts must be "
                f"finite and >= 0 ({int(bad.sum())} such entries)"
            )
    if not counts.any():
        raise InputError("label_counts are all zero: no client has any example to weigh")
    _check_sizes(counts)
    _check_no_shares(counts)
    return counts


def _check_no_shares(counts: Floats) -> None:
    """Raise InputError for label shares: they do not say how many examples a client has."""
    used = counts[counts.any(axis=1)]
    even = len(used) > 1 and bool((np.abs(used.sum(axis=1) - 1.0) < 1e-6).all())
    if even and not bool((used == np.rint(used)).all()):
        raise InputError(
            "each row of label_counts sums to 1: these are shares, and count as one example per "
            "client; give counts, as shares * sizes[:, None]"
        )


def _check_sizes(counts: Floats) -> None:
    """Raise InputError for a client whose number of examples is out of the allowed range."""
    with np.errstate(over="ignore"):
        sizes = counts.sum(axis=1)
    bad = (sizes > 0.0) & ((sizes < LEAST_SIZE) | (sizes > LARGEST_SIZE))
    if bad.any():
        i = int(np.argmax(bad))
        raise InputError(
            f"label_counts[{i}] has {sizes[i]:g} examples in all; give 0 where a client has none, "
            f"else {LEAST_SIZE:g} to {LARGEST_SIZE:g} (counts in another unit will do)"
        )


def checked_sizes(label_counts: ArrayLike) -> Floats:
    """Counts [M, K], or sizes [M] as a table with one column, which suffices with `rows`."""
    try:
        given = numbers(label_counts)
    except ValueError:
        return checked_counts(label_counts)  # raises, with what is wrong
    return checked_counts(given[:, None] if given.ndim == 1 else given)


def checked_rows(rows: ArrayLike, target: ArrayLike, clients: int) -> tuple[Floats, Floats]:
    """Embeddings of clients [M, d] and of the target [d]. Raises InputError unless finite."""
    table = _finite("rows", rows, "a table of numbers [clients, d]")
    if table.ndim != 2 or table.shape[0] != clients or table.shape[1] == 0:
        raise InputError(
            f"rows must have a row for each of the {clients} clients of label_counts; got shape "
            f"{table.shape}"
        )
    goal = _finite("target", target, f"a list of {table.shape[1]} numbers")
    if goal.shape != table.shape[1:]:
        raise InputError(
            f"beside rows the target is an embedding, too: rows have {table.shape[1]} columns, "
            f"target has shape {goal.shape}"
        )
    return table, goal


def checked_cost(given: ArrayLike, clients: int) -> Floats:
    """`cost` [M]. Raises InputError unless all are finite and in range."""
    values = _finite("cost", given, f"a list of {clients} numbers")
    if values.shape != (clients,):
        raise InputError(
            f"cost must have one number per client: there are {clients} clients, cost has "
            f"shape {values.shape}"
        )
    for bad, why in (
        (values <= LEAST_COST, f"; it must be above {LEAST_COST:g}"),
        (values > LARGEST_COST, f", which drowns all else; allowed: up to {LARGEST_COST:g}"),
    ):
        if bad.any():
            i = int(np.argmax(bad))
            raise InputError(f"cost[{i}] is {values[i]:g}{why}")
    return values


def _finite(name: str, given: ArrayLike, form: str) -> Floats:
    """The numbers of an argument. Raises InputError, which names the first that is not finite."""
    try:
        values = numbers(given)
    except ValueError as error:
        raise InputError(f"{name} must be {form}; {error}") from error
    if not np.isfinite(values).all():
        at = ", ".join(str(int(i)) for i in np.argwhere(~np.isfinite(values))[0])
        raise InputError(f"{name}[{at}] is not finite; give {form}")
    return values


def check_setting(
    lam: float | None, ess: float | None, cap: float | None, fidelity: Fidelity
) -> None:
    """Raise InputError unless exactly one of lam and ess is given and all are in range."""
    check_name("fidelity", fidelity, get_args(Fidelity))
    if (lam is None) == (ess is None):
        given = "neither" if lam is None else f"both (lam={described(lam)}, ess={described(ess)})"
        raise InputError(f"give exactly one of lam and ess; got {given}")
    for name, value in (("lam", lam), ("ess", ess), ("cap", cap)):
        if value is not None and math.isnan(number(value)):
            check_number(name, value)  # text; NaN itself is refused by the ranges below
    if lam is not None:
        _check_lam(lam)
    if ess is not None and not 0.0 < number(ess) <= 1.0:
        raise InputError(f"ess is a fraction of the examples, 0 < ess <= 1; got {described(ess)}")
    if cap is not None and not 0.0 < number(cap) <= 1.0:
        raise InputError(f"cap must be a weight, 0 < cap <= 1; got {described(cap)}")


def _check_lam(lam: float) -> None:
    """Raise InputError for a lam that is out of range."""
    value = number(lam)
    if not value >= 0.0:
        raise InputError(f"lam must be a number >= 0, inf allowed; got {described(lam)}")
    if value not in (0.0, math.inf) and not LEAST_LAM <= value <= LARGEST_LAM:
        limit = "0" if value < 1.0 else "inf"
        raise InputError(
            f"lam must be 0, from {LEAST_LAM:g} to {LARGEST_LAM:g}, or inf; got {described(lam)}: "
            f"give lam={limit}, the limit that it is next to"
        )


def check_cap(cap: float, active: int) -> None:
    """Raise InputError for a cap under which the weights of `active` clients sum to less than 1."""
    # The tolerance lets cap = 1/M pass, although M times its float may be below 1.
    if cap * active < 1.0 - SUM_TOLERANCE:
        raise InputError(
            f"cap={cap:g} cannot be met: {active} clients with examples could carry "
            f"{cap * active:.6g} in all, the weights must sum to 1; use cap >= {1.0 / active:.6g}"
        )
