"""Train clients together with `torch.func.vmap`: each operation runs once for many clients.

Clients are trained together if what they are sent and keep has the same names, shapes and types, in
blocks that fit in memory. Data and plans are padded to the block's largest, with weight 0. Each
client's result is that of `loop`, but for the order of sums.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch import Tensor

from fedshift.algorithms.method import is_elementwise
from fedshift.arguments import check_fields
from fedshift.client.trainer import trained_by
from fedshift.data import ClientData, Plan
from fedshift.engine.backends import Job, Reply, Stage, work
from fedshift.engine.dense import train as train_dense
from fedshift.errors import InputError, UnfitError, shown
from fedshift.tree import Parts, size_in_bytes

# Bytes that a block may take by default.
ROOM = 1 << 30
# How many copies of a client's message and state exist at once: before, after, the gradient, and
# intermediate products.
COPIES = 4
# Phrases in torch's errors that mean that vmap cannot run an operation. Other errors come from the
# data, and would come without vmap, too.
ITS_WORDS = ("vmap", "atching rule", "functorch", "BatchedTensor")


class _Ready(NamedTuple):
    """A job with the client's examples and batches."""

    job: Job
    data: ClientData
    plans: Mapping[str, Plan]


@dataclass(eq=False)
class Stacked:
    """A backend that trains clients together, as many at a time as fit in `memory` bytes.

        for played in run(algorithm, federation, 10, backend=Stacked()): ...

    It needs methods and networks of tensor operations alone. Raises UnfitError, with the place and
    the reason, for Python that looks at values (FedALA; label sets in private mode), random layers,
    recurrent layers, and BatchNorm where batches have different sizes. Networks and terms of your
    own must not mix the examples of a batch in other ways.

    dense: train phases by `fedshift.engine.dense`, which is faster. It takes chains of linear
    layers and ReLUs, trained by plain SGD; UnfitError says what else it met.
    """

    memory: int = ROOM
    dense: bool = False
    # The method whose step was measured, and the bytes that autograd saved in it.
    _measured: tuple[object, int] = field(default=(None, 0), repr=False)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.memory < 1:
            raise InputError(f"{self.memory} bytes for stacked clients; give 1 or more")

    def __call__(self, stage: Stage, jobs: Iterable[Job]) -> Iterator[Reply]:
        """Replies block by block: of one form, in order of examples, and small enough for memory.

        Clients with similar numbers of examples come together, so that little is padding.
        """
        if stage.trainer is not None:
            raise UnfitError(
                "fedshift.engine.one_by_one are for backends that take clients one by one; of "
                "stacked clients there is Stacked(dense=True) besides"
            )
        todo, alike = list(jobs), dict[Any, list[_Ready]]()
        plans = stage.plans([job.client for job in todo])
        for job, drawn in zip(todo, plans, strict=True):
            ready = _Ready(job, stage.data(job.client), drawn)
            alike.setdefault(_form(ready), []).append(ready)
        for many in alike.values():
            many.sort(key=lambda ready: (ready.data.y.size(0), ready.job.client))
            most = max(1, self.memory // self._share(stage, many[-1]))
            # Blocks as equal as possible: 12 and 12 clients, not 23 and 1.
            each = -(-len(many) // -(-len(many) // most))
            for i in range(0, len(many), each):
                block = many[i : i + each]
                yield from _trained(stage, block, self.dense)

    def _share(self, stage: Stage, ready: _Ready) -> int:
        """Bytes that a client takes, as large as this one."""
        if self.dense:  # without autograd, nothing is saved for a gradient
            self._measured = None, 0
        elif self._measured[0] is not stage.method:
            self._measured = stage.method, _saved(replace(stage, most=1, drops=True), ready.job)
        data = sum(v.numel() * v.element_size() for v in ready.data)
        model = size_in_bytes(ready.job.message) + size_in_bytes(ready.job.state)
        return max(1, data + COPIES * model + self._measured[1])


def _form(ready: _Ready) -> Any:
    """What must be equal for clients to be trained together."""
    kinds = tuple(
        (part, *((k, v.shape, v.dtype) for k, v in tree.items()))
        for parts in (ready.job.message, ready.job.state)
        for part, tree in parts.items()
    )
    widths = tuple((name, plan.rows.shape[1]) for name, plan in ready.plans.items())
    return len(ready.job.message), kinds, widths, ready.data.x.shape[1:]


class _NoSeed:
    """Stands in for a plan's seed, and raises when used: no number can be every client's seed."""

    def __add__(self, other: int) -> _NoSeed:
        return self

    def __index__(self) -> int:
        raise UnfitError(
            "clients cannot be stacked: dropout, augmentation and the like draw random numbers of "
            "their own for each client. Use the backend loop or workers"
        )

    __int__ = __index__


def _saved(stage: Stage, job: Job) -> int:
    """Bytes that autograd saves in one step of a client, measured by training one."""
    seen: dict[int, int] = {}

    def note(v: Tensor) -> Tensor:
        seen[v.untyped_storage().data_ptr()] = v.untyped_storage().nbytes()
        return v

    with torch.autograd.graph.saved_tensors_hooks(note, lambda v: v):
        work(stage, job)  # if it fails, so does the block, and is reported there
    return sum(seen.values())


def _trained(stage: Stage, block: Sequence[_Ready], dense: bool) -> Iterator[Reply]:
    """Train one block.

    If it fails, clients are trained one by one, to find out which of them is to blame: the error,
    or the reply of those that may drop out, is then that of `loop`.
    """
    try:
        updates, changed = _together(stage, block, dense)
    except InputError:
        raise
    except (RuntimeError, ValueError, IndexError, TypeError) as e:
        if not any(word in str(e) for word in ITS_WORDS):
            alone = [work(stage, ready.job) for ready in block]
            if any(reply.failed for reply in alone):
                yield from alone
                return
        _refuse(e)
    for row, ready in enumerate(block):
        sent, kept = _row(updates, row), _row(changed, row)
        # A copy, because states outlive the round: a view would keep the whole block in memory.
        kept = {part: {k: v.clone() for k, v in tree.items()} for part, tree in kept.items()}
        yield Reply(ready.job.client, sent, kept, ready.job.t)


def _row(stacked: Parts, row: int) -> Parts:
    return {part: {k: v[row] for k, v in tree.items()} for part, tree in stacked.items()}


def _together(stage: Stage, block: Sequence[_Ready], dense: bool) -> tuple[Parts, Parts]:
    """(updates, changed states) of the block's clients, leaves [C, ...]."""
    update = stage.method.client_update
    plans = {name: [ready.plans[name] for ready in block] for name in block[0].plans}
    sizes = {name: _common(many) for name, many in plans.items()}
    no_seed = cast(int, _NoSeed())

    def one(
        message: Parts, state: Parts, data: ClientData, drawn: Mapping[str, dict[str, Tensor]]
    ) -> tuple[Parts, Parts]:
        stacked = {
            name: Plan(v["rows"], v["weight"], v["lr"], sizes[name], no_seed)
            for name, v in drawn.items()
        }
        return update(message, state, data, stacked)

    at_once = dense and len(plans) == 1 and is_elementwise(update)
    train = one if at_once else torch.func.vmap(one)
    by = trained_by(train_dense if dense else None)
    # Without vmap there is no autograd either, and inference mode saves its bookkeeping.
    with torch.inference_mode(at_once), by:
        tensors = {name: _stretched(many) for name, many in plans.items()}
        messages = _stack([ready.job.message for ready in block])
        states = _stack([ready.job.state for ready in block])
        return train(messages, states, _padded([ready.data for ready in block]), tensors)


def _common(plans: Sequence[Plan]) -> tuple[int, ...] | None:
    """The sizes of batches, if all clients have the same, so that nothing is padding; else None."""
    return plans[0].sizes if len({plan.sizes for plan in plans}) == 1 else None


def _stretched(plans: Sequence[Plan]) -> dict[str, Tensor]:
    """rows and weight [C, S, B], padded to the most steps and the largest batch, and lr [C]."""
    lr = _joined([plan.lr for plan in plans])
    steps = max(plan.steps for plan in plans)
    # To the largest batch that there is: clients with few examples fill no batch of 256.
    wide = max((max(p.sizes or (p.rows.shape[1],), default=0) for p in plans), default=0)
    if all(plan.steps == steps for plan in plans):
        together = torch.stack([plan.rows for plan in plans])
        weights = _joined([p.weight for p in plans])
        return {"rows": together[..., :wide], "weight": weights[..., :wide], "lr": lr}
    rows = plans[0].rows.new_zeros(len(plans), steps, wide)
    weight = plans[0].weight.new_zeros(len(plans), steps, wide)
    for i, plan in enumerate(plans):
        rows[i, : plan.steps] = plan.rows[:, :wide]
        weight[i, : plan.steps] = plan.weight[:, :wide]
    return {"rows": rows, "weight": weight, "lr": lr}


def _padded(clients: Sequence[ClientData]) -> ClientData:
    """x [C, n, ...], y and w [C, n], id [C], n being the most examples of a client."""
    # `size(0)`, because len() of a tensor takes twice as long.
    lengths = {c.y.size(0) for c in clients}
    most = max(lengths)

    def longest(many: Sequence[Tensor]) -> Tensor:
        if len(lengths) == 1:
            return torch.stack(list(many))
        whole = many[0].new_zeros(len(many), most, *many[0].shape[1:])
        for row, v in zip(whole, many, strict=True):
            row[: len(v)] = v
        return whole

    x, y, w, ids = zip(*clients, strict=True)
    return ClientData(longest(x), longest(y), longest(w), torch.stack(list(ids)))


def _stack(many: Sequence[Parts]) -> Parts:
    """The clients' parts as one, of tensors [C, ...]."""
    return {
        part: {name: _joined([one[part][name] for one in many]) for name in tree}
        for part, tree in many[0].items()
    }


def _joined(leaves: list[Tensor]) -> Tensor:
    """[C, ...]; a tensor that all clients share is expanded, not copied."""
    first = leaves[0]
    if all(leaf is first for leaf in leaves):
        return first.expand(len(leaves), *first.shape)
    return torch.stack(leaves)


def _refuse(e: Exception) -> NoReturn:
    """Raise UnfitError with the place in the method or network, and torch's reason."""
    frames = [f for f in traceback.extract_tb(e.__traceback__) if "/torch/" not in f.filename]
    place = f"{frames[-1].filename.rpartition('/')[2]}, line {frames[-1].lineno}: {frames[-1].line}"
    reason = shown(str(e).strip().partition("\n")[0] or type(e).__name__, 200)
    raise UnfitError(
        f"clients cannot be stacked ({place}). torch says: {reason} Use the backend loop or workers"
    ) from e
