"""The pieces that every method with one model per client is made of."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedshift.client.local import Local, Oracle, Trained
from fedshift.client.objectives import Term
from fedshift.data import ClientData, Plan
from fedshift.model import Model, split_buffers
from fedshift.server.combine import combine_counters, total
from fedshift.server.optimizers import ServerOptimizer
from fedshift.tree import Params, Parts, sub

REVEALED = {
    "delta": "the change of the shared parameters",
    "buffers": "running statistics of normalisation layers, where the model has them",
    "counters": "how many batches those statistics have seen, where the model has them",
    "report": "the client's id and its mean training loss (for monitoring only)",
    "evaluation": "how many validation examples of each label it has and gets right (for metrics "
    'and ess = "auto"; leave out both and nothing of it is sent)',
}
REGISTERED = {"n": "number of training examples, once", "labels": "examples per label, once"}


def revealed(needs: tuple[str, ...]) -> dict[str, str]:
    """What leaves a client of a method that registers `needs` and sends a plain update."""
    held = dict.fromkeys(("n", *needs))
    return REVEALED | {"register": "; ".join(REGISTERED[k] for k in held)}


def context_of(start: Params, buffers: Params, state: Parts, data: ClientData) -> Parts:
    """What terms see besides the model and the batch: the client's state, the anchor and the id."""
    return {**state, "anchor": start, "anchor_buffers": buffers, "client": {"id": data.id}}


def heard(message: Parts, state: Parts) -> Parts:
    """What terms know on a client besides the model: its state, and what else it was sent."""
    return state | {k: v for k, v in message.items() if k not in ("params", "buffers")}


def train_locally(
    model: Model,
    objective: Term,
    phases: Mapping[str, Local],
    start: Params,
    buffers: Params,
    state: Parts,
    data: ClientData,
    plans: Mapping[str, Plan],
    *extra: Oracle,
) -> Trained:
    """All phases in turn from `start`, which is the anchor as well."""
    context = context_of(start, buffers, state, data)
    return train_phases(model, objective, phases, start, buffers, context, data, plans, *extra)


def train_phases(
    model: Model,
    objective: Term,
    phases: Mapping[str, Local],
    start: Params,
    buffers: Params,
    context: Parts,
    data: ClientData,
    plans: Mapping[str, Plan],
    *extra: Oracle,
) -> Trained:
    """All phases in turn from `start`, with an anchor of one's own in the context."""
    end, after, losses = start, buffers, []
    for name, phase in phases.items():
        done = phase(model, objective, end, after, context, data, plans[name], *extra)
        end, after = done.params, done.buffers
        losses.append(done.loss)
    loss = losses[0] if len(losses) == 1 else torch.stack(losses).mean()
    return Trained(end, after, loss)


def update_of(
    model: Model, start: Params, end: Params, buffers: Params, loss: Tensor, data: ClientData
) -> Parts:
    """The update that leaves a client: change, buffers as values, counters, and the report.

    The change has no names of `model.fixed`.
    """
    floats, counters = split_buffers(buffers)
    return {
        "delta": sub(model.trainable(end), model.trainable(start)),
        "buffers": floats,
        "counters": counters,
        "report": {"id": data.id, "loss": loss},
    }


def averaged(cohort: Params) -> dict[str, Tensor]:
    """What `fold` needs of a plain mean of changes: sums by the cohort's weights."""
    return dict.fromkeys(("delta", "buffers"), cohort["weight"])


def fold(server: Parts, updates: Parts, delta: Params, optimizer: ServerOptimizer) -> Parts:
    """The server's step along `delta`, with the buffers combined by the cohort's weights.

    Parameters that nobody sends (`Model.fixed`) stay as they are.
    """
    weights, old = updates["cohort"]["weight"], server["params"]
    moved, state = optimizer(
        {k: v for k, v in old.items() if k in delta}, delta, server["optimizer"]
    )
    params = old | moved
    buffers = total(updates, "buffers", weights)
    counters = combine_counters(weights, updates["counters"])
    return {"params": params, "optimizer": state, "buffers": buffers | counters}
