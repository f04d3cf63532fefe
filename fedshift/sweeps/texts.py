"""Means, deviations, intervals and differences over seeds, as text for tables."""

from __future__ import annotations

from fedshift.report.intervals import Moments
from fedshift.report.tables import MISSING


def spread(result: Moments | None, digits: int) -> str:
    """ "92.4 ± 2.1", without a deviation for a single seed."""
    if result is None:
        return MISSING
    mean = f"{result.mean:.{digits}f}"
    return mean if result.sd is None else f"{mean} ± {result.sd:.{digits}f}"


def interval(result: Moments | None, digits: int) -> str:
    """ "90.3 to 94.5"."""
    if result is None or result.low is None or result.high is None:
        return MISSING
    return f"{result.low:.{digits}f} to {result.high:.{digits}f}"


def difference(result: Moments | None, digits: int, unit: str = "seed") -> str:
    """ "+25.3 (+20.1 to +30.5)", the interval only where there is one; "+0.0 on every seed"."""
    if result is None:
        return MISSING
    mean = f"{result.mean:+.{digits}f}"
    if result.low is None or result.high is None:
        return mean
    if result.sd == 0.0:
        return f"{mean} on every {unit}"
    return f"{mean} ({result.low:+.{digits}f} to {result.high:+.{digits}f})"
