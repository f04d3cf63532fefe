"""Building blocks of methods: updates, the server's state and step, and what a client reveals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from fedshift.data import ClientData
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
    columns = dict.fromkeys(("n", *needs))
    return REVEALED | {"register": "; ".join(REGISTERED[k] for k in columns)}


def with_labels(inner: Mapping[str, str]) -> Mapping[str, str]:
    """What `inner` reveals, plus label counts, for a wrapper whose clients register them."""
    labels = REGISTERED["labels"]
    if labels in inner["register"]:
        return inner
    return {**inner, "register": f"{inner['register']}; {labels}"}


def heard(message: Parts, state: Parts) -> Parts:
    """What terms may read on a client: its state, and its message without the model."""
    return state | {k: v for k, v in message.items() if k not in ("params", "buffers")}


def update_of(
    model: Model, start: Params, end: Params, buffers: Params, loss: Tensor, data: ClientData
) -> Parts:
    """The update that leaves a client: change, buffers as values, counters, and the report.

    The change does not include `model.fixed`.
    """
    # Separate floating statistics, which are averaged, from counters, which never are.
    floats, counters = split_buffers(buffers)
    return {
        "delta": sub(model.trainable(end), model.trainable(start)),
        "buffers": floats,
        "counters": counters,
        "report": {"id": data.id, "loss": loss},
    }


def server_state(
    model: Model,
    optimizer: ServerOptimizer,
    params: Params,
    buffers: Params,
    table: Params,
    needs: Iterable[str] = (),
) -> Parts:
    """The server's state before round 1: the shared model, its optimiser, and table columns."""
    return {
        "params": params,
        "buffers": buffers,
        # Fixed parameters are never sent, so the optimiser needs no moments for them.
        "optimizer": optimizer.init(model.trainable(params)),
        "table": {k: table[k] for k in ("n", *needs)},
    }


def averaged(cohort: Params) -> dict[str, Tensor]:
    """What `fold` needs for a plain mean of changes: sums with the cohort's weights."""
    return dict.fromkeys(("delta", "buffers"), cohort["weight"])


def fold(server: Parts, updates: Parts, delta: Params, optimizer: ServerOptimizer) -> Parts:
    """The server's step along `delta`, with buffers combined by the cohort's weights.

    Parameters that are never sent (`Model.fixed`) do not change.
    """
    weights, old = updates["cohort"]["weight"], server["params"]
    # `delta` has only trained parameters; `old | moved` keeps the order and bits of all others.
    moved, state = optimizer(
        {k: v for k, v in old.items() if k in delta}, delta, server["optimizer"]
    )
    params = old | moved
    buffers = total(updates, "buffers", weights)
    counters = combine_counters(weights, updates["counters"])
    return {"params": params, "optimizer": state, "buffers": buffers | counters}
