"""Numbers in tables that are computed from several numbers of a run's summary."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np


def correlation(x: Sequence[float], y: Sequence[float]) -> float:
    """Pearson's r = cov(x, y) / (sd(x) sd(y)); NaN where x or y is constant, or has fewer than 3.

    >>> from fedshift_papers.reproduce.derived import correlation
    >>> round(correlation([0, 1, 2, 3], [1, 3, 5, 7]), 12)
    1.0
    """
    if len(x) < 3 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return math.nan
    return float(np.corrcoef(x, y)[0, 1])


def absent_and_loss(summary: Mapping[str, Any]) -> tuple[list[float], list[float]]:
    """(number of absent labels, loss before tuning), each a list over the rounds that tune."""
    rounds = (summary.get("label_sets") or {}).get("rounds", ())
    pairs = [(r["absent"], r["loss_before"]) for r in rounds if r.get("loss_before") is not None]
    return [float(a) for a, _ in pairs], [float(loss) for _, loss in pairs]


def _absent_loss_correlation(summary: Mapping[str, Any]) -> float | None:
    value = correlation(*absent_and_loss(summary))
    return None if math.isnan(value) else value


def _bytes_both(summary: Mapping[str, Any]) -> float | None:
    """Bytes per client of the last round's messages, down and up together."""
    final = summary["final"]
    down, up = final.get("bytes_down"), final.get("bytes_up")
    return None if down is None or up is None else float(down) + float(up)


# Name -> the function that computes it from a summary; None if it is not defined.
DERIVED: Mapping[str, Callable[[Mapping[str, Any]], float | None]] = {
    "absent_loss_correlation": _absent_loss_correlation,
    "bytes_both": _bytes_both,
}
