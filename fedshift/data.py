"""What a client holds, what chance decides about one local phase, and one federated task.

Shapes: n examples of a client, K classes, S steps, B batch size, M training clients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
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

    `size` is how many rows are not padding; losses divide by it, never by `len(x)`. `seed` is for
    layers that draw random numbers (dropout) in this step.
    """

    x: Tensor
    y: Tensor
    w: Tensor
    rows: Tensor
    size: Tensor
    seed: int = 0


class Plan(NamedTuple):
    """All that chance and schedules decide about one local phase.

    rows [S, B] of the client's data, weight [S, B] (0 marks padding), lr []; `seed` is that of the
    first step's random layers.
    `sizes` gives the rows of each step that are not padding where that is known outside of the
    tensors: steps are then cut to size and behave as in plain training, which BatchNorm needs.
    Without it (clients stacked to equal shapes) padding stays and is masked.
    """

    rows: Tensor
    weight: Tensor
    lr: Tensor
    sizes: tuple[int, ...] | None = None
    seed: int = 0

    @property
    def steps(self) -> int:
        """Planned steps, padding steps included."""
        return int(self.rows.shape[0])


def client_data(x: Tensor, y: Tensor, client: int) -> ClientData:
    """A client with importance 1 for each example; labels of any integer type become int64.

    x [n, ...], y [n] with labels 0, 1, ...; `client` is the client's position in the federation.
    Raises InputError for unequal lengths, labels that are not such a vector, and an id that is not
    a whole number of at least 0.
    """
    if not isinstance(client, Integral) or client < 0:
        raise InputError(f"client id {client!r}: must be a whole number, 0 for the first client")
    for name, v in (("x", x), ("y", y)):
        if not isinstance(v, Tensor):
            raise InputError(
                f"client {client}: {name} is a {type(v).__name__}; give torch.as_tensor({name})"
            )
    if len(x) != len(y):
        raise InputError(f"client {client} has {len(x)} inputs and {len(y)} labels; give as many")
    _check_labels(y, client)
    return ClientData(x, y.long(), torch.ones(len(y)), torch.tensor(int(client)))


def _check_labels(y: Tensor, client: int) -> None:
    if y.ndim != 1:
        raise InputError(f"client {client}: labels of shape {tuple(y.shape)}; give one per example")
    if y.is_floating_point() or y.is_complex():
        raise InputError(
            f"client {client}: labels are {y.dtype}; they are class numbers 0, 1, ...: "
            "give whole numbers, as y.long() makes them"
        )
    if len(y) and int(y.min()) < 0:
        raise InputError(f"client {client} has label {int(y.min())}; labels are 0, 1, ..., K-1")


def check_clients(clients: Sequence[ClientData]) -> None:
    """Refuse, with InputError, clients that cannot be one federation.

    There must be one at least, ids must be positions, labels class numbers in int64, and all
    inputs of one type.
    """
    if not clients:
        raise InputError("no clients; give at least one, made by fedshift.data.client_data")
    ids = [int(c.id) for c in clients]
    if ids != list(range(len(ids))):
        raise InputError(
            f"client ids must be 0..{len(ids) - 1} in order, got {ids[:10]}; "
            "an id is the client's position, client_data(x, y, position)"
        )
    for i, c in enumerate(clients):
        _check_labels(c.y, i)
        if c.y.dtype != torch.int64:
            raise InputError(f"client {i}: labels are {c.y.dtype}; client_data makes them int64")
        if c.x.dtype != clients[0].x.dtype:
            raise InputError(
                f"client {i}: x is {c.x.dtype}, client 0's is {clients[0].x.dtype}; "
                "give all clients inputs of one type"
            )


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
    batches: list[Tensor] = []
    if steps is None:
        for _ in range(epochs or 0):
            batches += epoch_order(n, batch, generator)
    else:
        while n and len(batches) < steps:
            batches += epoch_order(n, batch, generator)
        batches = batches[:steps]
    rows = torch.zeros(len(batches), batch, dtype=torch.int64)
    weight = torch.zeros(len(batches), batch)
    for s, drawn in enumerate(batches):
        rows[s, : len(drawn)] = drawn
        weight[s, : len(drawn)] = 1.0
    seed = int(torch.randint(2**62, (), generator=generator))
    rate = torch.tensor(lr, dtype=torch.float64)
    return Plan(rows, weight, rate, tuple(map(len, batches)), seed)


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
        plan.seed + step,
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
    tests             each client's own test examples, where the model is used on the clients' own
                      kind of data; `test` then has all of them, in the order of the clients
    """

    clients: tuple[ClientData, ...]
    validation: tuple[Examples, ...]
    target: Tensor
    test: Examples
    target_validation: Examples | None
    classes: tuple[str, ...]
    tests: tuple[Examples, ...] = ()

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
        if self.tests and len(self.tests) != len(self.clients):
            raise InputError(
                f"{len(self.clients)} clients and {len(self.tests)} test sets; give one per client"
            )
        if self.target.shape != (len(self.classes),):
            raise InputError(
                f"the target has {tuple(self.target.shape)} entries for {len(self.classes)} classes"
            )

    def table(self) -> dict[str, Tensor]:
        """What clients register once, before round 1: n [M] and labels [M, K], float64."""
        return register(self.clients, len(self.classes))


def register(clients: Sequence[ClientData], classes: int) -> dict[str, Tensor]:
    """The server's own table of the clients: n [M] and labels [M, K], float64.

    Raises InputError without clients, and for a label that is not below K.
    """
    if not clients:
        raise InputError("no clients to register; give at least one")
    for i, c in enumerate(clients):
        if len(c.y) and int(c.y.max()) >= classes:
            raise InputError(
                f"client {i} has label {int(c.y.max())}; with {classes} classes labels are "
                f"0..{classes - 1}: give register a larger number of classes"
            )
    return {
        "n": torch.stack([count(c).double() for c in clients]),
        "labels": torch.stack([label_counts(c, classes).double() for c in clients]),
    }
