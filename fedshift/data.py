"""What a client holds, what chance decides about one local phase, and one federated task.

Shapes: n examples of a client, K classes, S steps, B batch size, M training clients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedshift.errors import InputError


class ClientData(NamedTuple):
    """One client's examples: x [n, ...], y [n] int64, w [n], id [].

    `w` is an example's importance in the loss; `w = 0` marks padding at the end. Importance
    weighting is therefore a change of data, not of loss code.
    """

    x: Tensor
    y: Tensor
    w: Tensor
    id: Tensor


class Batch(NamedTuple):
    """Examples of one step: x [B, ...], y [B], w [B], rows [B] of the client's data, size [].

    `size` is how many rows are not padding; losses divide by it, never by `len(x)`.
    """

    x: Tensor
    y: Tensor
    w: Tensor
    rows: Tensor
    size: Tensor


class Plan(NamedTuple):
    """All that chance and schedules decide about one local phase.

    rows [S, B] of the client's data, weight [S, B] (0 marks padding), lr [].
    `sizes` gives the rows of each step that are not padding where that is known outside of the
    tensors: steps are then cut to size and behave as in plain training, which BatchNorm needs.
    Without it (clients stacked to equal shapes) padding stays and is masked.
    """

    rows: Tensor
    weight: Tensor
    lr: Tensor
    sizes: tuple[int, ...] | None = None

    @property
    def steps(self) -> int:
        """Planned steps, padding steps included."""
        return int(self.rows.shape[0])


def client_data(x: Tensor, y: Tensor, client: int) -> ClientData:
    """A client with importance 1 for each example. Raises InputError on unequal lengths."""
    if len(x) != len(y):
        raise InputError(f"client {client} has {len(x)} inputs and {len(y)} labels; give as many")
    return ClientData(x, y, torch.ones(len(y)), torch.tensor(client))


def count(data: ClientData) -> Tensor:
    """Examples that are not padding, a 0-d float tensor."""
    return (data.w != 0).sum().to(data.w.dtype)


def label_counts(data: ClientData, classes: int) -> Tensor:
    """Examples per label, padding left out: [K] float."""
    held = torch.zeros(classes, dtype=data.w.dtype, device=data.w.device)
    return held.index_add(0, data.y, (data.w != 0).to(data.w.dtype))


def epoch_order(n: int, batch: int, generator: torch.Generator) -> list[Tensor]:
    """Batches of one epoch: a permutation of n rows cut every `batch`, the last one shorter."""
    order = torch.randperm(n, generator=generator)
    return [order[start : start + batch] for start in range(0, n, batch)]


def plan_phase(
    n: int,
    *,
    batch: int,
    lr: float,
    generator: torch.Generator,
    epochs: int | None = None,
    steps: int | None = None,
) -> Plan:
    """Draw the batches of a phase: whole epochs, or a fixed number of steps over fresh epochs."""
    rows: list[Tensor] = []
    if steps is None:
        for _ in range(epochs or 0):
            rows += epoch_order(n, batch, generator)
    else:
        while n and len(rows) < steps:
            rows += epoch_order(n, batch, generator)
        rows = rows[:steps]
    index = torch.zeros(len(rows), batch, dtype=torch.int64)
    weight = torch.zeros(len(rows), batch)
    for s, row in enumerate(rows):
        index[s, : len(row)] = row
        weight[s, : len(row)] = 1.0
    return Plan(
        index, weight, torch.tensor(lr, dtype=torch.float64), tuple(len(row) for row in rows)
    )


def take(data: ClientData, plan: Plan, step: int) -> Batch:
    """The examples of one step, cut to their number where the plan knows it."""
    rows, weight = plan.rows[step], plan.weight[step]
    if plan.sizes is not None:
        rows, weight = rows[: plan.sizes[step]], weight[: plan.sizes[step]]
    return Batch(
        data.x[rows],
        data.y[rows],
        weight.to(data.w.dtype) * data.w[rows],
        rows,
        weight.sum().clamp(min=1.0),
    )


@dataclass(frozen=True)
class Examples:
    """Inputs and labels that belong to nobody's training: x [n, ...], y [n] int64."""

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True)
class Task:
    """A federation and the place where its model will be used.

    clients           M training clients, ids 0..M-1 in order
    validation        what each of them holds out; recall on it is what they can report
    target            the target's marginal T [K] in float64
    test              test examples that follow T
    target_validation examples that follow T, for selectors that may look at the target, or None
    classes           the K names
    """

    clients: tuple[ClientData, ...]
    validation: tuple[Examples, ...]
    target: Tensor
    test: Examples
    target_validation: Examples | None
    classes: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.clients:
            raise InputError("a task needs at least one training client")
        ids = [int(c.id) for c in self.clients]
        if ids != list(range(len(ids))):
            raise InputError(f"client ids must be 0..{len(ids) - 1} in order, got {ids[:10]}")
        if len(self.validation) != len(self.clients):
            raise InputError(
                f"{len(self.clients)} clients and {len(self.validation)} validation sets; "
                "give one per client (it may be empty)"
            )
        if self.target.shape != (len(self.classes),):
            raise InputError(
                f"the target has {tuple(self.target.shape)} entries for {len(self.classes)} classes"
            )

    def table(self) -> dict[str, Tensor]:
        """What clients register once, before round 1: n [M] and labels [M, K], float64."""
        return register(self.clients, len(self.classes))


def register(clients: Sequence[ClientData], classes: int) -> dict[str, Tensor]:
    """The server's own table of the clients: n [M] and labels [M, K], float64."""
    return {
        "n": torch.stack([count(c).double() for c in clients]),
        "labels": torch.stack([label_counts(c, classes).double() for c in clients]),
    }
