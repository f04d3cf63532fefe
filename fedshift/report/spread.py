"""How evenly the clients are served: the worst one, the lowest tenth, the spread."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fedshift.report.tables import Cell, Table

Accuracies = Sequence[float | None]


@dataclass(frozen=True)
class Spread:
    """Statistics of accuracies over the clients that have one; all None if none has."""

    clients: int
    mean: float | None
    worst: float | None
    bottom_decile: float | None
    sd: float | None
    gini: float | None


def spread_table(runs: Iterable[tuple[str, Sequence[str], Accuracies]]) -> Table:
    """A row for each run, given as (label, names of its clients, their accuracies)."""
    rows: list[tuple[Cell, ...]] = []
    for label, names, accuracies in runs:
        s = spread(accuracies)
        measured = [i for i, a in enumerate(accuracies) if a is not None]
        worst = min(measured, key=lambda i: accuracies[i] or 0.0, default=None)
        name = None if worst is None else names[worst]
        rows.append((label, s.clients, s.mean, s.worst, name, s.bottom_decile, s.sd, s.gini))
    head = ("Run", "Clients", "Mean", "Worst", "Worst client", "Bottom decile", "s.d.", "Gini")
    return Table(head, tuple(rows), ("", "d", ".1%", ".1%", "", ".1%", ".1%", ".4f"))


def spread(accuracies: Accuracies) -> Spread:
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
