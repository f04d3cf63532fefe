"""The batches of one local phase: their random plan, and the examples of each step; tasks.

Shapes: n examples of a client, K classes, S steps, B batch size, M training clients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedshift.arguments import check_fields
from fedshift.errors import InputError
from fedshift.examples import ClientData as ClientData
from fedshift.examples import Surveyed as Surveyed
from fedshift.examples import check_client as check_client
from fedshift.examples import check_clients as check_clients
from fedshift.examples import check_finite, check_labels, check_numbered
from fedshift.examples import client_data as client_data
from fedshift.examples import count as count
from fedshift.examples import first_not_finite as first_not_finite
from fedshift.examples import label_counts as label_counts
from fedshift.examples import largest_label as largest_label
from fedshift.examples import of_importance as of_importance
from fedshift.examples import register as register
from fedshift.kernels.torch_private import within_vmap
from fedshift.sketch import sketched
from fedshift.tree import Params


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
