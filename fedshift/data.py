"""A client's examples, the random plan of one local phase, and a federated task.

Shapes: n examples of a client, K classes, S steps, B batch size, M training clients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from fedshift.arguments import called, check_fields, check_listed, check_whole
from fedshift.errors import InputError, shown
from fedshift.examples import (
    check_finite,
    check_importance,
    check_labels,
    check_numbered,
    check_plain,
)
from fedshift.examples import first_not_finite as first_not_finite
from fedshift.kernels.torch_private import within_vmap
from fedshift.real import is_whole
from fedshift.sketch import sketched
from fedshift.tree import Params

MADE = "make each by fedshift.data.client_data(x, y, position)"


@sketched
class ClientData(NamedTuple):
    """One client's examples: x [n, ...], y [n] int64, w [n], id [].

    `w` is each example's importance in the loss, finite and 0 or more; an example with w = 0 counts
    as absent. So importance weighting changes the data, not the code of losses. Within a round,
    w = 0 marks padding at the end; a `Federation` has no such examples (`of_importance`).
    """

    x: Tensor
    y: Tensor
    w: Tensor
    id: Tensor


@sketched
class Batch(NamedTuple):
    """Examples of one step: x [B, ...], y [B], w [B], rows [B] (indices into the client's data).

    size    how many rows are not padding; losses divide by it, never by `len(x)`
    seed    for layers that draw random numbers (dropout) in this step
    even    whether all importances are 1. Means over the batch are then plain means
    """

    x: Tensor
    y: Tensor
    w: Tensor
    rows: Tensor
    size: Tensor
    seed: int = 0
    even: bool = False


@sketched
class Plan(NamedTuple):
    """All random choices and scheduled numbers of one local phase.

    rows    [S, B], indices into the client's data
    weight  [S, B], 0 for padding; like lr, it may be shared by clients, so never write to it
    lr      []
    sizes   how many rows of each step are not padding. Batches are then cut to size, as in plain
            training, which BatchNorm needs. None if they differ between clients that are trained in
            one pass: padding then stays, and is masked
    seed    for random layers (dropout) in the first step; step s has seed + s
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

    x       inputs [n, ...]
    y       labels [n], from 0 on
    client  the client's position in the federation

    >>> import torch
    >>> from fedshift.data import client_data
    >>> client_data(torch.zeros(3, 2), torch.tensor([0, 1, 1]), 0).w.tolist()
    [1.0, 1.0, 1.0]

    Raises InputError for unequal lengths, labels that are not such a vector, inputs that are not
    finite, and an id that is not a whole number of at least 0.
    """
    if not is_whole(client) or client < 0:
        raise InputError(
            f"client id {shown(repr(client))}: must be a whole number, 0 for the first client"
        )
    for name, v in (("x", x), ("y", y)):
        check_plain(v, name, client)
    n, labels = (v.shape[0] if v.ndim else 0 for v in (x, y))
    if n != labels:
        raise InputError(f"client {client} has {n} inputs and {labels} labels; give as many")
    check_labels(y, f"client {client}")
    check_finite(x, f"client {client}: x", "training")
    return ClientData(x, y.long(), torch.ones(len(y)), torch.tensor(int(client)))


def of_importance(clients: Sequence[ClientData]) -> Sequence[ClientData]:
    """The clients without their examples of importance 0; unchanged if there are none."""
    if isinstance(clients, Surveyed):
        return clients
    counted = [c.w != 0 for c in clients]
    if all(bool(rows.all()) for rows in counted):
        return clients
    pairs = zip(clients, counted, strict=True)
    # Clients that lose nothing stay the same objects: no copy of a large data set.
    return tuple(
        c if bool(rows.all()) else ClientData(c.x[rows], c.y[rows], c.w[rows], c.id)
        for c, rows in pairs
    )


@runtime_checkable
class Surveyed(Protocol):
    """Clients that were checked together when they were made, so that none is checked again.

    `fedshift.pooled.Pooled` is one: it makes clients on demand.
    """

    def register(self, classes: int) -> dict[str, Tensor]:
        """n [M] and labels [M, K], float64; InputError for a label that is not below K."""

    def largest_label(self) -> int:
        """The largest label that a client has; -1 without examples."""


def largest_label(clients: Sequence[ClientData]) -> int:
    """The largest label that a client has; -1 without examples."""
    if isinstance(clients, Surveyed):
        return clients.largest_label()
    return max((int(c.y.long().max()) for c in clients if len(c.y)), default=-1)


def check_clients(clients: Sequence[ClientData]) -> None:
    """Raise InputError unless the clients can be one federation.

    There must be at least one. Ids must be positions, labels class numbers in int64, importances
    one per example, finite and not negative, and all inputs finite and of one type.
    """
    check_listed("clients", clients, ClientData, MADE)
    if isinstance(clients, Surveyed):
        return
    for i, c in enumerate(clients):
        check_client(c, i)
    # A client's id is its row in the server's table and in the weights.
    ids = [int(c.id) for c in clients]
    if ids != list(range(len(ids))):
        raise InputError(
            f"client ids must be 0..{len(ids) - 1} in order, got {ids[:10]}; "
            "an id is the client's position, client_data(x, y, position)"
        )
    for i, c in enumerate(clients):
        if c.x.dtype != clients[0].x.dtype:
            types = f"x is {c.x.dtype}, client 0's is {clients[0].x.dtype}"
            raise InputError(f"client {i}: {types}; give all clients inputs of one type")
        check_finite(c.x, f"client {i}: x", "training")


def check_client(c: ClientData, position: int) -> None:
    """Raise InputError unless its tensors have the forms that `client_data` gives them.

    `client_data` has checked most of this, but clients can also be made by `_replace`.
    """
    for name, v in (("x", c.x), ("y", c.y)):
        check_plain(v, name, position)
    check_labels(c.y, f"client {position}")
    check_importance(c.w, len(c.y), position)
    if c.y.dtype != torch.int64:
        raise InputError(f"client {position}: labels are {c.y.dtype}; client_data makes them int64")
    if not isinstance(c.id, Tensor) or c.id.ndim or c.id.dtype != torch.int64:
        what = f"{c.id.dtype} {tuple(c.id.shape)}" if isinstance(c.id, Tensor) else called(c.id)
        raise InputError(
            f"client {position}: id is {what}; it is a whole number in a tensor, as "
            f"client_data(x, y, {position}) makes it"
        )


def count(data: ClientData) -> Tensor:
    """The number of examples that are not padding, a 0-d float tensor."""
    return (data.w != 0).sum().to(data.w.dtype)


def label_counts(data: ClientData, classes: int) -> Tensor:
    """The number of examples of each label, without padding: [K] float."""
    # Not bincount: shapes must not depend on values, so that several clients can share a pass.
    counts = torch.zeros(classes, dtype=data.w.dtype, device=data.w.device)
    return counts.index_add(0, data.y, (data.w != 0).to(data.w.dtype))


def plan_phase(
    n: int, *, batch: int, lr: float, generator: torch.Generator,
    epochs: int | None = None, steps: int | None = None,
) -> Plan:  # fmt: skip
    """Draw the batches of a phase: whole epochs, or a fixed number of steps over fresh epochs.

    An epoch is a permutation of the n rows, cut every `batch` rows.
    """
    per_epoch = -(-n // batch)  # batches in an epoch; the last one may be shorter
    count = per_epoch * (epochs or 0) if steps is None else steps if n else 0
    rows, seed = _draw_rows(n, batch, count, generator)
    weight, sizes = _weight_and_sizes(n, batch, count)
    # The rate stays float64 until training casts it to the parameters' type.
    return Plan(rows, weight, torch.tensor(lr, dtype=torch.float64), sizes, seed)


# Clients of one size share what is not random: it takes as long to make as to draw the rest.
@lru_cache(maxsize=256)
@torch.inference_mode(False)
def _weight_and_sizes(n: int, batch: int, steps: int) -> tuple[Tensor, tuple[int, ...]]:
    """The weight [S, B] and the sizes of a plan: an epoch's last batch may be smaller."""
    per_epoch = -(-n // batch)
    epoch = torch.zeros(per_epoch * batch)
    epoch[:n] = 1.0
    weight = epoch.view(per_epoch, batch).repeat(-(-steps // max(1, per_epoch)), 1)[:steps]
    last = n - (per_epoch - 1) * batch
    sizes = tuple(last if s % per_epoch == per_epoch - 1 else batch for s in range(steps))
    return weight, sizes


def _draw_rows(n: int, batch: int, steps: int, generator: torch.Generator) -> tuple[Tensor, int]:
    """(rows [S, B] from as many epochs as needed, the seed of random layers)."""
    per_epoch = -(-n // batch)
    if n == per_epoch * batch and steps == per_epoch:  # one epoch without padding: a common case
        rows = torch.randperm(n, generator=generator).view(steps, batch)
    else:
        passes = -(-steps // per_epoch) if n else 0
        # Zeros beyond n are padding: row 0 is valid to look up, and its weight is 0.
        epochs = torch.zeros(passes, per_epoch * batch, dtype=torch.int64)
        for epoch in epochs[:, :n].unbind():
            torch.randperm(n, generator=generator, out=epoch)
        rows = epochs.view(passes * per_epoch, batch)[:steps]
    # Drawn last, so that a network's random layers do not change which batches are drawn.
    return rows, int(torch.randint(2**62, (), generator=generator))


def take(data: ClientData, plan: Plan, step: int) -> Batch:
    """The examples of one step, cut to its size if the plan has sizes."""
    rows = plan.rows[step]
    if plan.sizes is None:
        weight = plan.weight[step]
        # clamp: the loss of an empty batch must be 0, not 0 / 0.
        w, size = weight.to(data.w.dtype) * data.w[rows], weight.sum().clamp(min=1.0)
    else:
        count = plan.sizes[step]
        rows = rows[:count] if count < len(rows) else rows
        w, size = data.w[rows], plan.weight.new_full((), float(count))
    return Batch(data.x[rows], data.y[rows], w, rows, size, plan.seed + step)


def batches(data: ClientData, plan: Plan) -> Iterator[Batch]:
    """The examples of all steps in turn, equal to `take`'s, with less work in each step."""
    if plan.sizes is None or within_vmap(data.y):  # stacked clients: no value may be read
        yield from (take(data, plan, s) for s in range(plan.steps))
        return
    # Look labels up for all steps at once, but inputs step by step, as those may be very large.
    labels, importance = data.y[plan.rows], plan.weight
    # Not asked on a GPU, which would have to finish its work before it could answer.
    even = data.w.device.type == "cpu" and data.w.dtype == importance.dtype
    if not (even := even and bool((data.w == 1).all())):  # else the plan's weights, which are 1 too
        importance = data.w[plan.rows]
    counts = {size: plan.weight.new_full((), float(size)) for size in set(plan.sizes)}
    steps = zip(plan.rows.unbind(), labels.unbind(), importance.unbind(), plan.sizes, strict=True)
    for s, (rows, y, w, size) in enumerate(steps):
        if size < len(rows):
            rows, y, w = rows[:size], y[:size], w[:size]
        x = data.x.index_select(0, rows)  # twice as fast as data.x[rows]
        yield Batch(x, y, w, rows, counts[size], plan.seed + s, even=even)


@sketched
@dataclass(frozen=True)
class Examples:
    """Inputs and labels that no client trains on: x [n, ...], y [n] int64.

    scorer  only if the rows are on other machines: a function that asks these for a `Score` of
            (parameters, buffers). Then x is zeros, and y only has the right count of each label

    Labels of other integer types become int64. Raises InputError for inputs that are not finite,
    because a model's outputs for them mean nothing.
    """

    x: Tensor
    y: Tensor
    scorer: Callable[[tuple[Params, Params]], Any] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        check_numbered(self.y, "Examples")
        check_fields(self)
        if len(self.x) != len(self.y):
            raise InputError(f"{len(self.x)} inputs and {len(self.y)} labels; give as many")
        check_finite(self.x, "examples: x", "a model is scored on them")
        check_labels(self.y, "a set of examples")
        object.__setattr__(self, "y", self.y.long())

    def __len__(self) -> int:
        return len(self.y)


@sketched
@dataclass(frozen=True)
class Task:
    """A federation and the place where its model will be used.

    clients           M training clients, ids 0..M-1 in order
    validation        examples that each client holds out, to report recall on them
    target            the target's label distribution T [K] in float64
    test              test examples that follow T
    target_validation examples that follow T, for selectors that may look at the target, or None
    classes           names of the K classes
    tests             test examples of each client, if the model will be used on the clients' own
                      kind of data; `test` then has all of them, in the order of the clients
    kind              what is predicted: "classification", "regression" or "multilabel"
    outputs           for the other two kinds, names of the L numbers or labels to predict: they are
                      the last L columns of x [n, D], and `classes` are bins or sets of them
    """

    clients: tuple[ClientData, ...]
    validation: tuple[Examples, ...]
    target: Tensor
    test: Examples
    target_validation: Examples | None
    classes: tuple[str, ...]
    tests: tuple[Examples, ...] = ()
    kind: str = "classification"
    outputs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)
        check_clients(self.clients)
        for what, sets in (("validation", self.validation), ("test", self.tests)):
            if len(sets) != len(self.clients) and (sets or what == "validation"):
                many = f"{len(self.clients)} clients and {len(sets)} {what} sets"
                raise InputError(f"{many}; give one per client (it may be empty)")
        if self.target.shape != (len(self.classes),):
            raise InputError(
                f"the target has {tuple(self.target.shape)} entries for {len(self.classes)} classes"
            )

    def table(self) -> dict[str, Tensor]:
        """What clients register once, before round 1: n [M] and labels [M, K], float64."""
        return register(self.clients, len(self.classes))


def last_columns(x: Tensor, count: int) -> Tensor:
    """The values to predict: the last columns [n, count] of x [n, D], or [n] if count = 1."""
    columns = x[:, x.shape[1] - count :]
    return columns[:, 0] if count == 1 else columns


def register(clients: Sequence[ClientData], classes: int) -> dict[str, Tensor]:
    """The server's table of the clients: n [M] and labels [M, K], float64.

    >>> import torch
    >>> from fedshift.data import client_data, register
    >>> client = client_data(torch.zeros(3, 2), torch.tensor([0, 1, 1]), 0)
    >>> register([client], classes=2)["labels"].tolist()
    [[1.0, 2.0]]

    Raises InputError without clients, for a label that is not below K, and for clients that were
    changed into what `client_data` does not make: importances, for instance, are one number per
    example, floating, finite and 0 or more.
    """
    check_whole("the number of classes", classes)
    check_listed("clients", clients, ClientData, MADE)
    if isinstance(clients, Surveyed):
        return clients.register(classes)
    for i, c in enumerate(clients):
        check_client(c, i)
        if len(c.y) and int(c.y.max()) >= classes:
            raise InputError(
                f"client {i} has label {int(c.y.max())}; with {classes} classes labels are "
                f"0..{classes - 1}: give register a larger number of classes"
            )
    # Counted in float64: importances in 16 bits cannot count to 3,000.
    counted = [c._replace(w=c.w.double()) for c in clients]
    return {
        "n": torch.stack([count(c) for c in counted]),
        "labels": torch.stack([label_counts(c, classes) for c in counted]),
    }
