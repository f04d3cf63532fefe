"""What FedPALS weights are computed from: counts, a target and a setting, or an `InputError`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedshift.arguments import check_number
from fedshift.errors import InputError, check_name
from fedshift.real import described, number, numbers
from fedshift.server.simplex import NO_CAP, Floats

Fidelity = Literal["squared", "norm"]

# How far the sum of weights may be from 1.
SUM_TOLERANCE = 1e-12
# Examples of a client that has any, and lambdas above 0: beyond these squares and quotients leave
# the range of floats, and one client's weight drowns in the rounding of another's.
LEAST_SIZE, LARGEST_SIZE = 1e-12, 1e18
LEAST_LAM, LARGEST_LAM = 1e-100, 1e100
# Rows whose largest entry is from here to 1 are used as they are; label shares are.
UNSCALED = 2.0**-20


def checked_counts(label_counts: ArrayLike) -> Floats:
    """Label counts [M, K]: finite, not negative, some positive; `InputError` for all else."""
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
    return counts


def _check_sizes(counts: Floats) -> None:
    with np.errstate(over="ignore"):
        sizes = counts.sum(axis=1)
    bad = (sizes > 0.0) & ((sizes < LEAST_SIZE) | (sizes > LARGEST_SIZE))
    if bad.any():
        i = int(np.argmax(bad))
        raise InputError(
            f"label_counts[{i}] has {sizes[i]:g} examples in all; give 0 where a client has none, "
            f"else {LEAST_SIZE:g} to {LARGEST_SIZE:g} (counts in another unit will do)"
        )


def checked_target(target: ArrayLike, classes: int, rescale: bool) -> Floats:
    """A target [K] that sums to 1 within 1e-6, or is rescaled to; `InputError` for all else."""
    if not isinstance(rescale, bool | np.bool_):
        raise InputError(f"normalise_target must be True or False; got {described(rescale)}")
    try:
        shares = numbers(target)
    except ValueError as error:
        raise InputError(f"target must be a list of {classes} numbers; {error}") from error
    if shares.shape != (classes,):
        raise InputError(
            f"target must have one entry per class: label_counts has {classes} classes, target has "
            f"shape {shares.shape}"
        )
    for bad, what in ((~np.isfinite(shares), "not finite"), (shares < 0.0, "negative")):
        if bad.any():
            k = int(np.argmax(bad))
            raise InputError(f"target[{k}] is {shares[k]:g}, which is {what}; allowed: 0 to 1")
    with np.errstate(over="ignore"):
        total = float(shares.sum())
    # An infinite total passes, too: `rescaled` divides by the largest entry first.
    if rescale and total > 0.0:
        return rescaled(shares)
    if abs(total - 1.0) > 1e-6:
        raise InputError(
            f"target sums to {total:.9g}, it must sum to 1 within 1e-6; pass label shares, or "
            "normalise_target=True to have it divided by its sum"
        )
    return shares


def rescaled(wanted: Floats) -> Floats:
    """A target divided by its sum, which may lie beyond the range of floats."""
    with np.errstate(over="ignore"):
        total = float(wanted.sum())
    if not LEAST_LAM <= total <= LARGEST_LAM:
        return rescaled(wanted / wanted.max())
    return wanted / total


def checked_rows(rows: ArrayLike, target: ArrayLike, clients: int) -> tuple[Floats, Floats, float]:
    """Rows [M, d] and a target [d], both divided by a power of 2, and that; `InputError` if odd.

    1 for numbers like shares; it brings others to where the solver's tolerances are made for.
    """
    given = []
    for name, value, shape in (("rows", rows, "[clients, d]"), ("target", target, "[d]")):
        try:
            v = numbers(value)
        except ValueError as error:
            raise InputError(f"{name} must be numbers {shape}; {error}") from error
        if v.ndim != shape.count(",") + 1 or 0 in v.shape or not np.isfinite(v).all():
            raise InputError(f"{name} must be finite numbers {shape}; got shape {v.shape}")
        given.append(v)
    table, aim = given
    if table.shape != (clients, aim.size):
        raise InputError(
            f"rows must have one row per client and one column per entry of the target, "
            f"{(clients, aim.size)}; got shape {table.shape}"
        )
    largest = float(max(np.abs(table).max(), np.abs(aim).max()))
    if not LEAST_LAM <= max(largest, LEAST_LAM) <= LARGEST_LAM:
        raise InputError(f"rows and target must lie within {LARGEST_LAM:g}; got {largest:g}")
    usual = UNSCALED <= largest <= 1.0 or largest < LEAST_LAM
    scale = 1.0 if usual else 2.0 ** math.ceil(math.log2(largest))
    return table / scale, aim / scale, scale


def checked_charges(name: str, charges: ArrayLike, clients: int, least: float) -> Floats:
    """Costs or prices [M] of clients, from `least` to 1e100; `InputError` for all else."""
    try:
        values = numbers(charges)
    except ValueError as error:
        raise InputError(f"{name} must be a list of {clients} numbers; {error}") from error
    if values.shape != (clients,):
        raise InputError(
            f"{name} must have one entry per client, {clients}; got shape {values.shape}"
        )
    bad = ~((values >= least) & (values <= LARGEST_LAM))
    if bad.any():
        i = int(np.argmax(bad))
        raise InputError(f"{name}[{i}] is {values[i]:g}; allowed: {least:g} to {LARGEST_LAM:g}")
    return values


def check_costs(costs: Floats) -> None:
    """Raise InputError unless all costs lam / n_i + cost_i are positive and comparable."""
    if not costs.all():
        raise InputError(
            "lam / n_i + cost_i must be more than 0 for every client where some have a cost or a "
            "price: without it the weights would not be unique; give lam > 0, or each a cost"
        )
    if not costs.max() <= LARGEST_SIZE / LEAST_SIZE * costs.min():
        raise InputError(
            f"costs lam / n_i + cost_i from {costs.min():g} to {costs.max():g}: the largest may be "
            f"{LARGEST_SIZE / LEAST_SIZE:g} times the smallest"
        )


def check_setting(
    lam: float | None,
    ess: float | None,
    cap: float | None,
    fidelity: Fidelity,
    charged: bool = False,
) -> None:
    """Raise InputError unless exactly one of lam and ess is given and all lie in their ranges.

    charged: clients have costs, so that neither is needed.
    """
    check_name("fidelity", fidelity, get_args(Fidelity))
    if (lam is None) == (ess is None) and not (charged and lam is None):
        given = "neither" if lam is None else f"both (lam={described(lam)}, ess={described(ess)})"
        raise InputError(f"give exactly one of lam and ess; got {given}")
    for name, value in (("lam", lam), ("ess", ess), ("cap", cap)):
        if value is not None and math.isnan(number(value)):
            check_number(name, value)  # NaN itself is left to the ranges
    if lam is not None:
        _check_lam(lam)
    if ess is not None and not 0.0 < number(ess) <= 1.0:
        raise InputError(f"ess is a fraction of the examples, 0 < ess <= 1; got {described(ess)}")
    if cap is not None and not 0.0 < number(cap) <= 1.0:
        raise InputError(f"cap must be a weight, 0 < cap <= 1; got {described(cap)}")


def _check_lam(lam: float) -> None:
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
    # cap = 1/M must pass, although M times its float may be below 1.
    if cap * active < 1.0 - SUM_TOLERANCE:
        raise InputError(
            f"cap={cap:g} cannot be met: {active} clients with examples could carry "
            f"{cap * active:.6g} in all, the weights must sum to 1; use cap >= {1.0 / active:.6g}"
        )


@dataclass(frozen=True, eq=False)
class Given:
    """Checked input of the clients with examples, and their places among all of them.

    Rows and target are divided by `scale`; counts [m, K] are what the rows are rounded from.
    """

    rows: Floats
    sizes: Floats
    target: Floats
    bound: float
    counts: Floats | None
    places: NDArray[np.intp]
    count: int
    scale: float

    def unit(self, fidelity: Fidelity) -> float:
        """What f was divided by."""
        return self.scale if fidelity == "norm" else self.scale**2


def given_of(
    label_counts: ArrayLike, target: ArrayLike, cap: float | None, rescale: bool,
    rows: ArrayLike | None = None,
) -> Given:  # fmt: skip
    """The arguments of `pals_weights`, checked; `InputError` where they are wrong."""
    counts = checked_counts(label_counts)
    sizes = counts.sum(axis=1)
    active = np.flatnonzero(sizes > 0.0)
    n, scale = sizes[active], 1.0
    if rows is None:
        shares = checked_target(target, counts.shape[1], rescale)
        mixed = counts[active] / n[:, None]
    elif rescale:
        raise InputError("normalise_target divides label shares by their sum; leave it out of rows")
    else:
        table, shares, scale = checked_rows(rows, target, counts.shape[0])
        mixed = table[active]
    largest = NO_CAP
    if cap is not None:
        largest = number(cap)
        check_cap(largest, active.size)
    # Up to rounding of the cap all clients at it must sum to 1.
    bound = NO_CAP if largest >= 1.0 else max(largest, 1.0 / active.size)
    exact = counts[active] if rows is None else None
    return Given(mixed, n, shares, bound, exact, active, counts.shape[0], scale)
