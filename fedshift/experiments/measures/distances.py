"""How far apart the clients of a run are: in their inputs, their labels, and their gradients."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedshift.client.gradients import pass_gradient
from fedshift.client.local import Local
from fedshift.client.objectives import CrossEntropy, Term
from fedshift.client.origin import ClientEntropy
from fedshift.data import ClientData, Task
from fedshift.engine.run import Federation
from fedshift.model import Model
from fedshift.seeds import generator
from fedshift.shifts import domain_auc, label_distances
from fedshift.tree import Params, sq_norm, sub, weighted_sum

# Limits that keep it fast: 15 pairs of clients with 200 examples each take two seconds. All pairs
# of a hundred clients would take ten minutes.
MOST_CLIENTS, MOST_EXAMPLES, FOLDS = 6, 200, 5
# For gradients: examples per step, and steps per client; 1,000 examples are enough to compare.
BATCH, MOST_STEPS = 500, 2


def measured_shift(task: Task, labels: NDArray[np.float64], seed: int) -> dict[str, Any]:
    """Distances between clients, labels [M, K] their counts; see `fedshift.shifts.measures`.

    domain_auc, js, hellinger, variation   [d, d] for the d <= 6 `clients`, spread evenly over
                                           those with 5 examples or more; domain_auc from at most
                                           200 examples of each, as the method sees them
    mean        of every table over its pairs; None where there is no pair
    mean_all    the same of js, hellinger and variation over all pairs of the M clients
    """
    able = [i for i, client in enumerate(task.clients) if len(client.x) >= FOLDS]
    # Spread over all clients, since looks and noise levels often rise with the client's number.
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
    """Mean over the pairs that have a value; None if none has."""
    # Below the diagonal there is every pair once, and no client with itself.
    values = table[np.tril_indices(len(table), -1)]
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if finite.size else None


def gradient_drift(
    model: Model,
    served: tuple[tuple[Params, Params], ...],
    federation: Federation,
    shared: tuple[str, ...] = ("body.",),
) -> dict[str, float]:
    """D = sum_i w_i ||g_i - g||^2, g = sum_i w_i g_i, of the class loss and of the client loss.

    g_i is client i's gradient at the model that it serves, over at most 1,000 of its examples (to
    save time; drawn by its id), taken over those parameters named by `shared` that both losses
    reach; w_i = n_i / N. Keys drift_class and drift_client; NaN where both losses reach none. Wang
    et al. 2026 (FedDRM), arXiv 2509.23049, Section 2.4: a client sees one client label only, so the
    client loss drifts more. This measure is chosen; their Figure 3 has the gradients of the heads
    on one random embedding (`fedshift reproduce feddrm/fig3`).
    """
    weights = federation.table["n"].double()
    weights = weights / weights.sum()
    taken = {
        name: _stack_gradients(model, term, served, federation, shared)
        for name, term in (("drift_class", CrossEntropy()), ("drift_client", ClientEntropy()))
    }
    # The two drifts are compared, so they must be taken over the same parameters.
    both = [k for k in taken["drift_class"] if all(bool(g[k].any()) for g in taken.values())]
    if not both:  # two networks in one: no parameter depends on both losses
        return dict.fromkeys(taken, math.nan)
    return {name: _spread(weights, {k: g[k] for k in both}) for name, g in taken.items()}


def _spread(weights: Tensor, gradients: Params) -> float:
    mean = weighted_sum(weights, gradients)
    one = ({k: g[i] for k, g in gradients.items()} for i in range(len(weights)))
    apart = torch.stack([sq_norm(sub(g, mean)).double() for g in one])
    return float(weights @ apart)


def _stack_gradients(
    model: Model,
    term: Term,
    served: tuple[tuple[Params, Params], ...],
    federation: Federation,
    shared: tuple[str, ...],
) -> Params:
    """The gradients of all clients, stacked: tensors [M, ...]."""
    gradients = [
        _gradient(model, term, pair, data, shared, len(served))
        for pair, data in zip(served, federation.clients, strict=True)
    ]
    return {k: torch.stack([g[k] for g in gradients]) for k in gradients[0]}


def _gradient(
    model: Model,
    term: Term,
    pair: tuple[Params, Params],
    data: ClientData,
    shared: tuple[str, ...],
    clients: int,
) -> Params:
    # Examples of importance 0 count as absent.
    n = int((data.w != 0).sum())
    steps = min(-(-n // BATCH), MOST_STEPS)
    phase = Local(batch=BATCH, steps=steps, only=shared)
    # A generator of its own, so that measuring draws nothing from the run's random streams.
    plan = phase.plan(n, 1, generator(0, "drift", int(data.id)))
    # The client loss is a softmax over all clients here, and not over one round's cohort.
    cohort = {"present": torch.ones(clients, dtype=torch.bool)}
    context = {"client": {"id": data.id}, "cohort": cohort}
    whole = pass_gradient(phase, model, term, *pair, context, data, plan)
    return {k: v for k, v in whole.items() if k.startswith(shared)}
