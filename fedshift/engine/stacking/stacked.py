"""Train clients together with `torch.func.vmap`: each operation runs once for many clients.

Clients are trained together if what they are sent and keep has the same names, shapes and types, in
blocks that fit in memory. Data and plans are padded to the block's largest, with weight 0. Each
client's result is that of `loop`, but for the order of sums.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any, NoReturn, cast

import torch
from torch import Tensor

from fedshift.algorithms.base import is_elementwise
from fedshift.arguments import check_fields
from fedshift.client.plans import PlansOfClient, widths
from fedshift.client.trainer import trained_by
from fedshift.data import ClientData, Plan
from fedshift.engine.backends import (
    FAILED,
    Block,
    ClientUpdate,
    Forgiving,
    Job,
    Reply,
    stamp,
    work,
)
from fedshift.engine.checks.replies import block_of
from fedshift.engine.dense import train as train_dense
from fedshift.engine.sums.summing import TermsOf
from fedshift.errors import InputError, UnfitError, shown
from fedshift.tree import Params, Parts, size_in_bytes

# Bytes that a block may take by default.
ROOM = 1 << 30
# How many copies of a client's message and state exist at once: before, after, the gradient, and
# intermediate products.
COPIES = 4
# How many names of blocks that were stacked once are remembered.
MOST_SEEN = 100
# Phrases in torch's errors that mean that vmap cannot run an operation. Other errors come from the
# data, and would come without vmap, too.
ITS_WORDS = ("vmap", "atching rule", "functorch", "BatchedTensor")

# A block of clients: Python's ids of their data.
Name = tuple[int, ...]
# What must be equal for clients to be trained together.
Form = tuple[Any, ...]


@dataclass(eq=False)
class Stacked:
    """A backend that trains clients together, as many at a time as fit in `memory` bytes.

        for played in run(algorithm, federation, 10, backend=Stacked()): ...

    It needs methods and networks of tensor operations alone. Raises UnfitError, with the place and
    the reason, for Python that looks at values (FedALA; label sets in private mode), random layers,
    recurrent layers, and BatchNorm where batches have different sizes. Networks and terms of your
    own must not mix the examples of a batch in other ways. Stacked data are kept for later rounds,
    those used last, as far as they fit in `memory`.

    dense: train phases by `fedshift.engine.dense`, which is faster. It takes chains of linear
    layers and ReLUs, trained by plain SGD; UnfitError says what else it met. Its blocks (`stream`)
    may be made in inference mode: clone() what you write to.
    """

    memory: int = ROOM
    dense: bool = False
    _kept: dict[Name, _Kept] = field(default_factory=dict, repr=False)
    _seen: set[Name] = field(default_factory=set, repr=False)
    _measured: tuple[ClientUpdate, int] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.memory < 1:
            raise InputError(f"{self.memory} bytes for stacked clients; give 1 or more")

    def __call__(self, update: ClientUpdate, jobs: Iterable[Job]) -> Iterator[Reply]:
        for came in self.stream(update, jobs):
            yield from came.replies()
            del came  # so that its memory is free while the next one is trained

    def stream(
        self, update: ClientUpdate, jobs: Iterable[Job], terms_of: TermsOf | None = None
    ) -> Iterator[Block]:
        """The jobs' blocks as they were trained; `terms_of` is not used: summing is the caller's.

        Where failures are answers (`Forgiving`), a block with a failed client comes one by one.
        """
        for block in self._blocks(update, list(jobs)):
            yield from _trained(update, block, self._data(block), self.dense)

    def _blocks(self, update: ClientUpdate, jobs: Sequence[Job]) -> list[tuple[Job, ...]]:
        """Cut jobs into blocks: of one form, in order of examples, and small enough for memory.

        Clients with similar numbers of examples come together, so that little is padding.
        """
        blocks: list[tuple[Job, ...]] = []
        formed: dict[Form, list[Job]] = {}
        forms = Forms()
        for job in jobs:
            formed.setdefault(forms.of(job), []).append(job)
        for alike in formed.values():
            alike.sort(key=lambda job: (job.data.y.size(0), job.client))
            share = self._share(update, alike[-1])
            most = max(1, self.memory // share)
            # Blocks as equal as possible: 12 and 12 clients, not 23 and 1.
            each = -(-len(alike) // -(-len(alike) // most))
            blocks += [tuple(alike[i : i + each]) for i in range(0, len(alike), each)]
        return blocks

    def _share(self, update: ClientUpdate, job: Job) -> int:
        """Bytes that a client takes, as large as this one."""
        if self.dense:  # without autograd, nothing is saved for a gradient
            self._measured = update, 0
        elif self._measured is None or self._measured[0] != update:
            self._measured = update, _saved(update, job)
        data = sum(v.numel() * v.element_size() for v in job.data)
        model = size_in_bytes(job.message) + size_in_bytes(job.state)
        return max(1, data + COPIES * model + self._measured[1])

    def _data(self, block: Sequence[Job]) -> ClientData:
        """The block's data, stacked. A block that comes a second time is kept for later rounds.

        Not the first time: cohorts that are drawn anew hardly ever come again. Memory that is freed
        at once serves the next block, while new memory takes several times as long to fill. Blocks
        that were used least recently go first.
        """
        clients = tuple(job.data for job in block)
        name = tuple(map(id, clients))
        kept = self._kept.pop(name, None)
        if kept is None and name not in self._seen:
            # Start afresh now and then: Python may have given an id to another object since.
            self._seen = {name} if len(self._seen) >= MOST_SEEN else self._seen | {name}
            return _padded(clients)
        stamps = tuple(map(stamp, clients))
        if kept is None or kept.stamps != stamps:
            kept = _Kept(clients, stamps, _padded(clients))
        self._kept[name] = kept
        size = sum(one.stacked.x.nbytes for one in self._kept.values())
        for old in tuple(self._kept):
            if size <= self.memory:
                break
            size -= self._kept.pop(old).stacked.x.nbytes
        return kept.stacked


@dataclass(frozen=True)
class _Kept:
    """Clients' data, and the same stacked. Stamps show whether data were written to since.

    The clients are kept alive, so that Python gives their ids to no other object.
    """

    clients: tuple[ClientData, ...]
    stamps: tuple[tuple[object, ...], ...]
    stacked: ClientData


class Forms:
    """The forms of a round's jobs: names, shapes and types of what clients are sent and keep.

    Each distinct tree of tensors gets a number, so that comparing forms compares numbers.
    """

    def __init__(self) -> None:
        self._numbers: dict[Form, int] = {}
        # The numbers by Python's id of a tree: most of a message is one object for all clients.
        self._by_id: dict[int, int] = {}
        self._last: tuple[Job, Form] | None = None

    def of(self, job: Job) -> Form:
        """The form of a job. All jobs must outlive this object, which compares them by id."""
        if self._last is None or not _is_same_at_sight(self._last[0], job):
            sent, kept = job.message, job.state
            numbers = map(self._number, (*sent.values(), *kept.values()))
            shape = job.data.x.shape[1:]
            form = job.t, len(sent), *sent, *kept, *numbers, *widths(job.plans), shape
            self._last = job, form
        return self._last[1]

    def _number(self, tree: Params) -> int:
        number = self._by_id.get(id(tree))
        if number is None:
            form = tuple((k, v.shape, v.dtype) for k, v in tree.items())
            number = self._by_id[id(tree)] = self._numbers.setdefault(form, len(self._numbers))
        return number


def _is_same_at_sight(one: Job, other: Job) -> bool:
    """Fast path: same objects and no client state, hence the same form."""
    a, b = one.plans, other.plans
    if not (isinstance(a, PlansOfClient) and isinstance(b, PlansOfClient) and a.group is b.group):
        return False
    if one.t != other.t or one.data.x.shape != other.data.x.shape or any(other.state.values()):
        return False
    if [*one.message] != [*other.message] or [*one.state] != [*other.state]:
        return False
    return all(map(is_, one.message.values(), other.message.values())) and not any(
        one.state.values()
    )


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


def shorten(job: Job, steps: int) -> Job:
    """The job, with at most so many steps in each phase."""

    def cut(p: Plan) -> Plan:
        sizes = None if p.sizes is None else p.sizes[:steps]
        return p._replace(rows=p.rows[:steps], weight=p.weight[:steps], sizes=sizes)

    return job._replace(plans={name: cut(plan) for name, plan in job.plans.items()})


def _saved(update: ClientUpdate, job: Job) -> int:
    """Bytes that autograd saves in one step of a client, measured by training one."""
    seen: dict[int, int] = {}

    def note(v: Tensor) -> Tensor:
        seen[v.untyped_storage().data_ptr()] = v.untyped_storage().nbytes()
        return v

    # An error here is ignored: it comes again in the block, and is reported there.
    with (
        contextlib.suppress(RuntimeError, ValueError, IndexError),
        torch.autograd.graph.saved_tensors_hooks(note, lambda v: v),
    ):
        update(*shorten(job, 1)[1:5])
    return sum(seen.values())


def _trained(
    update: ClientUpdate, block: Sequence[Job], data: ClientData, dense: bool
) -> list[Block]:
    """Train one block.

    If it fails, clients are trained one by one, to find out which of them is to blame: the error is
    then that of `loop`. Where failures are answers (`Forgiving`) and there is one, the blocks are
    those of single clients.
    """
    inner = update.update if isinstance(update, Forgiving) else update
    try:
        return [_together(inner, block, data, dense)]
    except InputError:
        raise
    except (RuntimeError, ValueError, IndexError, TypeError) as e:
        if not any(word in str(e) for word in ITS_WORDS):
            # Raises for the first client that fails, unless failures are answers.
            alone = [work(update, job) for job in block]
            if any(reply.update.keys() == {FAILED} for reply in alone):
                return [block_of(reply) for reply in alone]
        _refuse(e)


def _together(update: ClientUpdate, block: Sequence[Job], data: ClientData, dense: bool) -> Block:
    if any(job.how is not None for job in block):
        raise UnfitError(
            "fedshift.engine.one_by_one are for backends that take clients one by one; of stacked "
            "clients there is Stacked(dense=True) besides"
        )
    plans = {name: [job.plans[name] for job in block] for name in block[0].plans}
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
        messages = _stack([job.message for job in block])
        states = _stack([job.state for job in block])
        updates, changed = train(messages, states, data, tensors)
    return Block.of(tuple(job.client for job in block), updates, changed, block[0].t)


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
