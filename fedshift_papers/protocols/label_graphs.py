"""How well clients' label sets connect the labels."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np


def algebraic_connectivity(labels: int, sets: Iterable[Iterable[int]]) -> float:
    """The second smallest eigenvalue of the Laplacian D - A, with A_yz = 1 if a set has y and z.

    It is 0 if the graph of labels is not connected, and K, the largest value, if each pair of
    labels shares a set (Fiedler 1973).

    >>> from fedshift_papers.protocols.label_graphs import algebraic_connectivity
    >>> round(algebraic_connectivity(4, [(0, 1), (1, 2), (2, 3), (3, 0)]), 12)
    2.0
    """
    adjacent = np.zeros((labels, labels))
    for one in sets:
        rows = list(one)
        adjacent[np.ix_(rows, rows)] = 1.0
    np.fill_diagonal(adjacent, 0.0)
    values = np.linalg.eigvalsh(np.diag(adjacent.sum(1)) - adjacent)
    return max(0.0, float(values[1]))
