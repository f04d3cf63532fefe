"""Label shares, checked: what a target is, in every rule and function of the server."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedshift.errors import InputError
from fedshift.real import label_numbers

# How far a sum of shares may be from 1.
TOLERANCE = 1e-6


def label_shares(
    given: ArrayLike, name: str = "target", classes: int | None = None, rescale: bool = False
) -> NDArray[np.float64]:
    """Shares [K]. Raises InputError unless they are 0 or more and sum to 1 within 1e-6.

    classes  how many there must be; None: any number
    rescale  True divides by the sum, whatever it is
    """
    count = "" if classes is None else f"{classes} "
    try:
        shares = label_numbers(given)
    except ValueError as error:
        raise InputError(f"{name} must be a list of {count}numbers; {error}") from error
    if shares.ndim != 1 or classes not in (None, len(shares)):
        kinds = f": label_counts has {classes} classes, {name}" if classes else ";"
        raise InputError(f"{name} must have one entry per class{kinds} has shape {shares.shape}")
    for bad, what in ((~np.isfinite(shares), "not finite"), (shares < 0.0, "negative")):
        if bad.any():
            k = int(np.argmax(bad))
            raise InputError(f"{name}[{k}] is {shares[k]:g}, which is {what}; allowed: 0 to 1")
    with np.errstate(over="ignore"):
        total = float(shares.sum())
    # A total that overflows to infinity is fine: `rescaled` divides by the largest entry first.
    if rescale and total > 0.0:
        return rescaled(shares)
    if abs(total - 1.0) > TOLERANCE:
        ask = "pass label shares" + (
            ", or normalise_target=True to have it divided by its sum" if classes else ""
        )
        raise InputError(f"{name} sums to {total:.9g}, it must sum to 1 within 1e-6; {ask}")
    return shares


def rescaled(wanted: NDArray[np.float64]) -> NDArray[np.float64]:
    """A target divided by its sum, even if the sum is out of the range of floats."""
    with np.errstate(over="ignore"):
        total = float(wanted.sum())
    return wanted / total if 1e-100 <= total <= 1e100 else rescaled(wanted / wanted.max())
