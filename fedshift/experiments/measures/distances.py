"""How far apart the clients of a run are: in their inputs, and in their labels."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedshift.data import Task
from fedshift.shifts import domain_auc, label_distances

# Chosen: 15 pairs of clients with 200 examples each take two seconds where all pairs of a hundred
# clients would take ten minutes.
MOST_CLIENTS, MOST_EXAMPLES, FOLDS = 6, 200, 5


def measured_shift(task: Task, labels: NDArray[np.float64], seed: int) -> dict[str, Any]:
    """Distances between clients, labels [M, K] their counts; see `fedshift.shifts.measures`.

    domain_auc, js, hellinger, variation   [d, d] for the d <= 6 `clients`, spread evenly over
                                           those with 5 examples or more; domain_auc from at most
                                           200 examples of each, as the method sees them
    mean        of every table over its pairs; None where there is no pair
    mean_all    the same of js, hellinger and variation over all pairs of the M clients
    """
    able = [i for i, client in enumerate(task.clients) if len(client.x) >= FOLDS]
    # Spread, not the first six: looks and noise levels often rise with the client's number.
    places = np.linspace(0, len(able) - 1, min(len(able), MOST_CLIENTS)).round().astype(int)
    drawn = [able[place] for place in places]
    inputs = [task.clients[i].x.numpy() for i in drawn]
    distances = vars(label_distances(labels))
    pairs = {name: table[np.ix_(drawn, drawn)] for name, table in distances.items()}
    tables = {"domain_auc": domain_auc(inputs, seed, folds=FOLDS, most=MOST_EXAMPLES), **pairs}
    return {
        "clients": drawn,
        "examples": MOST_EXAMPLES,
        **tables,
        "mean": {name: _mean(table) for name, table in tables.items()},
        "mean_all": {name: _mean(table) for name, table in distances.items()},
    }


def _mean(table: NDArray[np.float64]) -> float | None:
    """Mean over the pairs that have a value."""
    # Below the diagonal: every pair once, and no client with itself.
    values = table[np.tril_indices(len(table), -1)]
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if finite.size else None
