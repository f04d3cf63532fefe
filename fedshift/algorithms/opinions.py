"""What a cohort's models say on inputs of the server, for central tuning."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fedshift.algorithms.base import Algorithm
from fedshift.errors import DivergedError
from fedshift.model import Model
from fedshift.server.rows import wire_labels
from fedshift.tree import Params, Parts


class Opinions(NamedTuple):
    """What the cohort's models say: p [C, n, L] on inputs x [n, ...], labels [C, L].

    w [C], or [C, n], are their weights. absent [K] marks the labels that no client of the cohort
    holds.
    """

    x: Tensor
    p: Tensor
    labels: Tensor
    w: Tensor
    absent: Tensor


def answers(inner: Algorithm, server: Parts, updates: Parts, x: Tensor, batch: int) -> Tensor:
    """Logits [C, n, L] on x of every client's model, rebuilt from what it was sent and sent back.

    Minus infinity where a client has no label. Raises DivergedError for answers that are none.
    """
    cohort = updates["cohort"]
    labels, logits = wire_labels(server, cohort["id"]), []
    for j, i in enumerate(cohort["id"].tolist()):
        # Rebuilt as the client had it: in private mode rows are in that client's slots.
        sent = inner.broadcast(server | {"cohort": cohort}, i)["params"]
        params = sent | {k: sent[k] + v[j] for k, v in updates["delta"].items()}
        buffers = {k: v[j] for k, v in (updates["buffers"] | updates["counters"]).items()}
        # Mask nothing for a client without labels: 0/0 = NaN would survive its weight of 0.
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
    """Inputs in the parameters' type; bytes and token numbers as they are."""
    return x.to(next(iter(params.values())).dtype) if x.is_floating_point() else x
