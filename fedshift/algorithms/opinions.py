"""Predictions of a cohort's models on the server's inputs, for central tuning."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fedshift.algorithms.method import Method
from fedshift.errors import DivergedError
from fedshift.model import Model
from fedshift.server.rows import wire_labels
from fedshift.tree import Params, Parts


class Opinions(NamedTuple):
    """Probabilities p [C, n, L] of the cohort's models for their labels [C, L], on x [n, ...].

    w [C], or [C, n], are their weights. absent [K] marks the labels that no client of the cohort
    has.
    """

    x: Tensor
    p: Tensor
    labels: Tensor
    w: Tensor
    absent: Tensor


def answers(inner: Method, server: Parts, updates: Parts, x: Tensor, batch: int) -> Tensor:
    """Logits [C, n, L] on x of every client's model, rebuilt from its message and its update.

    Minus infinity in slots without a label. Raises DivergedError for outputs that are not finite.
    """
    cohort = updates["cohort"]
    labels, logits = wire_labels(server, cohort["id"]), []
    for j, i in enumerate(cohort["id"].tolist()):
        # Rebuild the model as the client had it, in private mode with rows in the client's slots.
        sent = inner.broadcast(server | {"cohort": cohort}, i)["params"]
        params = sent | {k: sent[k] + v[j] for k, v in updates["delta"].items()}
        buffers = {k: v[j] for k, v in (updates["buffers"] | updates["counters"]).items()}
        # For a client without labels mask nothing: its softmax would be 0 / 0, and NaN times its
        # weight of 0 is NaN.
        empty = (labels[j] < 0) & (labels[j] >= 0).any()
        z = logits_of(inner.model, params, buffers, x, batch).masked_fill(empty, -torch.inf)
        if not bool(torch.isfinite(z.softmax(1)).all()):
            raise DivergedError(
                f"client {i}: its model's outputs on the server's inputs are not finite, "
                "before any tuning; its training diverged: lower the clients' lr"
            )
        logits.append(z)
    return torch.stack(logits)


def logits_of(model: Model, params: Params, buffers: Params, x: Tensor, batch: int) -> Tensor:
    """A model's logits on x, in blocks, without gradient."""
    with torch.no_grad():
        outs = [model(params, buffers, block) for block in torch.split(x, batch)]
    return torch.cat([out["logits"] for out in outs])


def cast(x: Tensor, params: Params) -> Tensor:
    """Floating inputs in the parameters' type; bytes and token numbers unchanged."""
    return x.to(next(iter(params.values())).dtype) if x.is_floating_point() else x
