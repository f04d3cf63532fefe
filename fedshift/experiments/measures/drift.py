"""How far clients' gradients are from one another: why FedDRM weighs its two losses."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedshift.client.gradients import pass_gradient
from fedshift.client.local import Local
from fedshift.client.objectives import CrossEntropy, Term
from fedshift.client.origin import ClientEntropy
from fedshift.data import ClientData
from fedshift.engine.run import Federation
from fedshift.model import Model
from fedshift.seeds import generator
from fedshift.tree import Params, sq_norm, sub, weighted_sum

# Examples per step, and steps per client: 1,000 examples are enough to compare.
BATCH, MOST = 500, 2


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
    # The two drifts are compared, so they must be over the same parameters.
    both = [k for k in taken["drift_class"] if all(bool(g[k].any()) for g in taken.values())]
    if not both:  # two networks in one: nothing that both losses move
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
    """Every client's gradient, leaves [M, ...]."""
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
    steps = min(-(-n // BATCH), MOST)
    phase = Local(batch=BATCH, steps=steps, only=shared)
    # A seed of its own: the measurement must not move the run's random streams.
    plan = phase.plan(n, 1, generator(0, "drift", int(data.id)))
    # The client loss compares with all clients, not with one round's cohort.
    cohort = {"present": torch.ones(clients, dtype=torch.bool)}
    context = {"client": {"id": data.id}, "cohort": cohort}
    whole = pass_gradient(phase, model, term, *pair, context, data, plan)
    return {k: v for k, v in whole.items() if k.startswith(shared)}
