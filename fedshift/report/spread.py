"""How evenly the clients are served: the worst one, the lowest tenth, the spread."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """Statistics of the accuracies over the clients that have one; all None when none has."""

    clients: int
    mean: float | None
    worst: float | None
    bottom_decile: float | None
    sd: float | None
    gini: float | None


def spread(accuracies: Sequence[float | None]) -> Spread:
    """Mean, worst, bottom decile, standard deviation and Gini of M client accuracies.

    bottom decile = mean of the ceil(M / 10) lowest; sd^2 = sum_i (x_i - mean)^2 / M, because the
    clients are the whole population and not a sample of one;
    Gini = sum_ij |x_i - x_j| / (2 M^2 mean), 0 when all are equal (and when all are 0).
    Unknown accuracies (None) are left out. Worst and bottom decile as FederatedScope reports them
    (Xie et al. 2022, arXiv:2204.05011), except that its bottom decile is the single client at that
    rank; the mean below it does not jump when one client is added.
    """
    x = sorted(a for a in accuracies if a is not None)
    M = len(x)
    if not M:
        return Spread(0, None, None, None, None, None)
    mean = math.fsum(x) / M
    tenth = math.ceil(M / 10)
    sd = math.sqrt(math.fsum((v - mean) ** 2 for v in x) / M)
    # For sorted x, sum_ij |x_i - x_j| = 2 sum_i (2i + 1 - M) x_i with i from 0.
    differences = 2 * math.fsum((2 * i + 1 - M) * v for i, v in enumerate(x))
    gini = differences / (2 * M * M * mean) if mean > 0 else 0.0
    return Spread(M, mean, x[0], math.fsum(x[:tenth]) / tenth, sd, gini)
