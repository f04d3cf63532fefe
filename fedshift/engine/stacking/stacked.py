"""Clients stacked: `torch.func.vmap` over them, so that each operation is called once for many.

Clients that are sent and keep tensors of the same shapes are trained together, in blocks that fit
in memory; data and plans are padded to the block's largest, with weight 0. What a client gets is
that of `loop` but for the order of sums.
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
from fedshift.client.dense import train as train_dense
from fedshift.client.local import Local
from fedshift.client.objectives import Term
from fedshift.client.plans import PlansOfClient, widths
from fedshift.client.slopes import Oracle
from fedshift.client.trainer import Trained, trained_by
from fedshift.data import ClientData, Plan, taken
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
from fedshift.engine.sums.summing import TermsOf
from fedshift.errors import InputError, UnfitError, shown
from fedshift.model import Model
from fedshift.tree import Params, Parts, size_in_bytes

# Bytes that a block may take, unless told otherwise.
ROOM = 1 << 30
# Copies of a client's messages and states at the same time: before, after, gradient, products.
COPIES = 4
# Blocks of clients that were stacked once, by name alone.
MOST_SEEN = 100
# Phrases in torch's errors that mean: vmap cannot run an operation. Others blame its input.
ITS_WORDS = ("vmap", "atching rule", "functorch", "BatchedTensor")

# A block's clients, by their ids.
Name = tuple[int, ...]
# What must be equal for clients to be stacked.
Form = tuple[Any, ...]


@dataclass(eq=False)
class Stacked:
    """A backend that trains clients together, as many at a time as fit in `memory` bytes.

        for played in run(algorithm, federation, 10, backend=Stacked()): ...

    For methods and networks of tensor operations alone. Raises UnfitError, with the place and the
    reason, for what cannot be stacked: Python that looks at values (FedALA; label sets in private
    mode), random layers, recurrent layers, BatchNorm where batches have different sizes. Networks
    and terms of one's own must not mix the examples of a batch by other means. Stacked data
    are kept for the rounds after, those used last, as far as they fit in `memory`, too.

    dense: phases are trained by `fedshift.client.dense`, which takes chains of linear layers and
    ReLUs alone, trained by plain SGD, and is faster; UnfitError says what else it met. Its blocks
    (`stream`) may be made in inference mode: clone() what is to be written to.
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
            del came  # while the next ones are trained

    def stream(
        self, update: ClientUpdate, jobs: Iterable[Job], terms_of: TermsOf | None = None
    ) -> Iterator[Block]:
        """What came of the jobs, block by block, as they lie in memory.

        Clients one by one where failures are answers, and there is one. They are not summed here.
        """
        for block in self._blocks(update, list(jobs)):
            yield from _trained(update, block, self._data(block), self.dense)

    def _blocks(self, update: ClientUpdate, jobs: Sequence[Job]) -> list[tuple[Job, ...]]:
        """Jobs of one form, the clients with most examples last, cut so that each block fits."""
        blocks: list[tuple[Job, ...]] = []
        formed: dict[Form, list[Job]] = {}
        forms = Forms()
        for job in jobs:
            formed.setdefault(forms.of(job), []).append(job)
        for alike in formed.values():
            alike.sort(key=lambda job: (job.data.y.size(0), job.client))
            share = self._share(update, alike[-1])
            most = max(1, self.memory // share)
            # As equal as possible: 12 and 12 clients, not 23 and 1.
            each = -(-len(alike) // -(-len(alike) // most))
            blocks += [tuple(alike[i : i + each]) for i in range(0, len(alike), each)]
        return blocks

    def _share(self, update: ClientUpdate, job: Job) -> int:
        """Bytes that a client like this one takes."""
        if self.dense:  # nothing is saved for a gradient
            self._measured = update, 0
        elif self._measured is None or self._measured[0] != update:
            self._measured = update, _saved(update, job)
        data = sum(v.numel() * v.element_size() for v in job.data)
        model = size_in_bytes(job.message) + size_in_bytes(job.state)
        return max(1, data + COPIES * model + self._measured[1])

    def _data(self, block: Sequence[Job]) -> ClientData:
        """The block's data, stacked; kept for another round, those used last the longest.

        Kept from the second time on: cohorts that are drawn anew hardly ever come again, and to
        fill memory that is new to the process takes several times as long as to use it again.
        """
        clients = tuple(job.data for job in block)
        name = tuple(map(id, clients))
        kept = self._kept.pop(name, None)
        if kept is None and name not in self._seen:
            # Forgotten now and then: an id may be another client's by then.
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
    """Clients' data and the same stacked; stamps show whether data were written to since.

    Clients are kept so that Python gives their ids to no other object.
    """

    clients: tuple[ClientData, ...]
    stamps: tuple[tuple[object, ...], ...]
    stacked: ClientData


class Forms:
    """The forms of a round's jobs: names, shapes and types.

    Each distinct tree gets a number, because trees are compared again and again.
    """

    def __init__(self) -> None:
        self._numbers: dict[Form, int] = {}
        # Numbers by id of a tree; most of a message is one tree for all clients.
        self._by_id: dict[int, int] = {}
        self._last: tuple[Job, Form] | None = None

    def of(self, job: Job) -> Form:
        """The form of a job; all jobs live as long as this object."""
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
    """In the place of a plan's seed: one number cannot be every client's."""

    def __add__(self, other: int) -> _NoSeed:
        return self

    def __index__(self) -> int:
        raise UnfitError(
            "clients cannot be stacked: dropout, augmentation and the like draw random numbers of "
            "their own for each client. Use the backend loop or workers"
        )

    __int__ = __index__


def shortened(job: Job, steps: int) -> Job:
    """The job with at most so many steps in each phase."""

    def cut(p: Plan) -> Plan:
        sizes = None if p.sizes is None else p.sizes[:steps]
        return p._replace(rows=p.rows[:steps], weight=p.weight[:steps], sizes=sizes)

    return job._replace(plans={name: cut(plan) for name, plan in job.plans.items()})


def _saved(update: ClientUpdate, job: Job) -> int:
    """Bytes that one step of a client keeps for its gradient, tried on a client."""
    seen: dict[int, int] = {}

    def note(v: Tensor) -> Tensor:
        seen[v.untyped_storage().data_ptr()] = v.untyped_storage().nbytes()
        return v

    # What fails here fails again in the block, where it is named.
    with (
        contextlib.suppress(RuntimeError, ValueError, IndexError),
        torch.autograd.graph.saved_tensors_hooks(note, lambda v: v),
    ):
        update(*shortened(job, 1)[1:5])
    return sum(seen.values())


def _trained(
    update: ClientUpdate, block: Sequence[Job], data: ClientData, dense: bool
) -> list[Block]:
    """What came of one block. A client that fails alone, too, fails as it does in `loop`.

    Of each client by itself where failures are answers, and there is one.
    """
    inner = update.update if isinstance(update, Forgiving) else update
    try:
        return [_together(inner, block, data, dense)]
    except InputError:
        raise
    except (RuntimeError, ValueError, IndexError, TypeError) as e:
        if not any(word in str(e) for word in ITS_WORDS):
            alone = [work(update, job) for job in block]  # raises, unless failures are answers
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
    by = trained_by(train_dense if dense else _train_each)
    # No gradient is taken of what is trained at once, and calls need not note what one would need.
    with torch.inference_mode(at_once), by:
        tensors = {name: _stretched(many) for name, many in plans.items()}
        messages = _stack([job.message for job in block])
        states = _stack([job.state for job in block])
        updates, changed = train(messages, states, data, tensors)
    return Block.of(tuple(job.client for job in block), updates, changed, block[0].t)


def _train_each(
    phase: Local, model: Model, objective: Term, params: Params, buffers: Params, context: Parts,
    data: ClientData, plan: Plan, *extra: Oracle,
) -> Trained:  # fmt: skip
    """`Local`'s own loop, over batches that are cut without a look at values, as vmap asks."""
    along = taken(data, plan)
    return phase.along(along, model, objective, params, buffers, context, data, plan, *extra)


def _common(plans: Sequence[Plan]) -> tuple[int, ...] | None:
    """The sizes of all batches, where all clients have the same: then nothing is padding."""
    return plans[0].sizes if len({plan.sizes for plan in plans}) == 1 else None


def _stretched(plans: Sequence[Plan]) -> dict[str, Tensor]:
    """rows and weight [C, S, B] with padding up to the most steps and rows, lr [C]."""
    lr = _joined([plan.lr for plan in plans])
    steps = max(plan.steps for plan in plans)
    # No further than the largest batch: a small client fills no batch of 256.
    wide = max((max(p.sizes or (p.rows.shape[1],), default=0) for p in plans), default=0)
    if all(plan.steps == steps for plan in plans):
        whole = torch.stack([plan.rows for plan in plans]), _joined([p.weight for p in plans])
        return {"rows": whole[0][..., :wide], "weight": whole[1][..., :wide], "lr": lr}
    rows = plans[0].rows.new_zeros(len(plans), steps, wide)
    weight = plans[0].weight.new_zeros(len(plans), steps, wide)
    for i, plan in enumerate(plans):
        rows[i, : plan.steps] = plan.rows[:, :wide]
        weight[i, : plan.steps] = plan.weight[:, :wide]
    return {"rows": rows, "weight": weight, "lr": lr}


def _padded(clients: Sequence[ClientData]) -> ClientData:
    """x [C, n, ...], y and w [C, n], id [C], n being the most examples of a client."""
    # `size`: len() of a tensor takes twice as long.
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
    """Leaves [C, ...]."""
    return {
        part: {name: _joined([one[part][name] for one in many]) for name in tree}
        for part, tree in many[0].items()
    }


def _joined(leaves: list[Tensor]) -> Tensor:
    """[C, ...]; what all clients share is there once, seen C times."""
    first = leaves[0]
    if all(leaf is first for leaf in leaves):
        return first.expand(len(leaves), *first.shape)
    return torch.stack(leaves)


def _refuse(e: Exception) -> NoReturn:
    """UnfitError with the place in the method or network, and torch's reason."""
    frames = [f for f in traceback.extract_tb(e.__traceback__) if "/torch/" not in f.filename]
    place = f"{frames[-1].filename.rpartition('/')[2]}, line {frames[-1].lineno}: {frames[-1].line}"
    reason = shown(str(e).strip().partition("\n")[0] or type(e).__name__, 200)
    raise UnfitError(
        f"clients cannot be stacked ({place}). torch says: {reason} Use the backend loop or workers"
    ) from e
