"""What a backend is: a function that trains the clients of a round. And the plainest one, `loop`.

Jobs go in, one per client, and replies come out, in any order. All backends give the same result,
but for rounding where one sums in another order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedshift.arguments import called
from fedshift.client.trainer import Trainer, trained_by
from fedshift.data import ClientData, Plan
from fedshift.errors import TrainingError, UnfitError
from fedshift.kernels.torch_private import versions
from fedshift.sketch import sketched
from fedshift.tree import Parts

ClientUpdate = Callable[[Parts, Parts, ClientData, Mapping[str, Plan]], tuple[Parts, Parts]]


FAILED = "failed"


@sketched
class Job(NamedTuple):
    """One client's work in a round: what it is sent, keeps, holds, and the batches that it takes.

    t     the round
    how   the function that trains its phases; None: the plain loop of `Local` (`client.trainer`)
    """

    client: int
    message: Parts
    state: Parts
    data: ClientData
    plans: Mapping[str, Plan]
    t: int = 0
    how: Trainer | None = None


@sketched
class Reply(NamedTuple):
    """The answer to a job: the update that leaves the client, and what changed of its state.

    t: the round that it answers.

    This is how backends answer that train clients one by one. It is a block of one client before
    the engine has looked at it: `fedshift.engine.checks.replies.block_of` makes the `Block` at the
    engine's door, and nothing behind it knows replies. Two classes, because a block records the
    shapes that the gate compares. A backend around another may change a reply with `_replace`; in a
    block, that would leave the record of the tensors that were there before.
    """

    client: int
    update: Parts
    changed: Parts
    t: int = 0


# How one client's update looks: part -> name -> (shape, type).
Look = dict[str, dict[str, tuple[torch.Size, torch.dtype]]]
# Marks a block that has not been inspected yet; compared by identity, and never written to.
UNSEEN: Look = {}


@sketched
class Block(NamedTuple):
    """The answers of C clients as one: the only form of replies within the engine.

    Tensors are [C, ...] for several clients. For one they are [...], without the first axis: most
    blocks have one client, and this saves a view of each of its tensors.

    t        the round that they answer
    look     names, shapes and types of each client's update when it arrived (`block_of` records
             them); parts that were summed since are listed here though `updates` lacks them
    sums     sums over these clients in float64, where the process that trained them has summed;
             empty once the round's running sums have them
    odd      why the reply was rejected on arrival, if it was no dictionary of plain tensors; its
             tensors are left out then
    """

    clients: tuple[int, ...]
    updates: Parts
    changed: Parts
    t: int = 0
    look: Look = UNSEEN
    sums: Parts = {}  # noqa: RUF012 - never written to
    odd: str = ""

    @staticmethod
    def of(clients: tuple[int, ...], updates: Parts, changed: Parts, t: int) -> Block:
        """A block of tensors [C, ...]; the first axis goes where C is 1."""
        if len(clients) == 1:
            updates, changed = _row(updates, 0), _row(changed, 0)
        return Block(clients, updates, changed, t)

    def replies(self) -> list[Reply]:
        """Each client's reply, for callers outside of a round; summed parts are missing."""
        if self.odd:
            failed = _failed(self.odd)
            return [Reply(client, failed, {}, self.t) for client in self.clients]
        rows = enumerate(self.each())
        return [
            Reply(one.clients[0], _writable(one.updates), self.state(i), self.t) for i, one in rows
        ]

    def state(self, row: int) -> Parts:
        """What one of the clients changed of its state."""
        if len(self.clients) == 1:
            return _writable(self.changed)
        # A copy, because states outlive the round: a view would keep the whole block in memory.
        return _writable(_row(self.changed, row), copy=True)

    def each(self) -> list[Block]:
        """One block per client."""
        return [self.one(row) for row in range(len(self.clients))]

    def one(self, row: int) -> Block:
        """The block of the client in this row."""
        if len(self.clients) == 1:
            return self
        updates, changed = _row(self.updates, row), _row(self.changed, row)
        return Block((self.clients[row],), updates, changed, self.t, self.look, odd=self.odd)

    def rows(self, leaf: Tensor) -> Sequence[Tensor]:
        """A tensor of the block, client by client."""
        return leaf.unbind() if len(self.clients) > 1 else (leaf,)


def _row(stacked: Parts, row: int) -> Parts:
    return {part: {k: v[row] for k, v in tree.items()} for part, tree in stacked.items()}


def _writable(parts: Parts, *, copy: bool = False) -> Parts:
    """The same numbers in tensors that can be written to; copied only where that is needed.

    Tensors of inference mode cannot be written to outside of it.
    """
    return {
        part: {k: v.clone() if copy or v.is_inference() else v for k, v in tree.items()}
        for part, tree in parts.items()
    }


def stamp(data: ClientData) -> tuple[object, ...]:
    """Cache key: identity and version of each tensor, valid while the tensors are alive.

    Equal only while nothing was written to them. Tensors of inference mode have no version; they
    count as never written to.
    """
    return *map(id, data), *(v or 0 for v in versions(data))


Backend = Callable[[ClientUpdate, Iterable[Job]], Iterator[Reply]]


def loop(update: ClientUpdate, jobs: Iterable[Job]) -> Iterator[Reply]:
    """Train one client after the other in this process; failures name the client."""
    for job in jobs:
        yield work(update, job)


def work(update: ClientUpdate, job: Job) -> Reply:
    """Train one client. Raises TrainingError, with the client's id, where training fails.

    So it does where the method wrote into its arguments: messages are common to all clients, and
    examples to all runs. UnfitError passes as it is: the backend cannot train this run, and no
    client is to blame.
    """
    given = _given(job)
    before = versions(given)
    try:
        # Set around the call, not passed through it, so that no method needs to hand it on.
        with contextlib.nullcontext() if job.how is None else trained_by(job.how):
            result = update(job.message, job.state, job.data, job.plans)
    except UnfitError:
        raise
    except (RuntimeError, ValueError, IndexError) as e:
        check_forked(e)
        raise TrainingError(f"client {job.client} failed: {e}") from e
    _check_unwritten(job, given, before)
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise TrainingError(
            f"the method's client_update gave {called(result)}; it returns two things: what the "
            "client sends, and the changed parts of its state"
        )
    return Reply(job.client, *result, job.t)


def _check_unwritten(job: Job, given: Sequence[Tensor], before: Sequence[int | None]) -> None:
    """Raise TrainingError if a tensor of `given` was written to since its version was read."""
    if (after := versions(given)) != before:
        written = next(v for v, a, b in zip(given, before, after, strict=True) if a != b)
        raise TrainingError(
            f"the method's client_update wrote into {_name(job, written)}, which it was given "
            f"(client {job.client}); it must leave its arguments as they are: write into v.clone()"
        )


def _given(job: Job) -> list[Tensor]:
    """All tensors that a method is given."""
    trees = (tree for parts in (job.message, job.state) for tree in parts.values())
    return [*job.data, *(v for tree in trees for v in tree.values())]


def _name(job: Job, tensor: Tensor) -> str:
    """What a message calls a tensor of the job."""
    names = [f"data.{k}" for k, v in zip(job.data._fields, job.data, strict=True) if v is tensor]
    for what, parts in (("message", job.message), ("state", job.state)):
        for part, tree in parts.items():
            names += [f'{what}["{part}"]["{k}"]' for k, v in tree.items() if v is tensor]
    return names[0] if names else "a tensor"


def check_forked(e: Exception) -> None:
    """Raise UnfitError if the error means that autograd does not work in this forked process.

    Where torch sees a GPU, it refuses gradients in a fork of a process that has taken some.
    """
    if "fork-based multiprocessing" in str(e):
        raise UnfitError(
            "workers cannot train: this process took gradients before it forked them, and torch "
            "sees a GPU. Make workers before anything is trained, or set CUDA_VISIBLE_DEVICES= "
            "(nothing) for this program, or leave workers out"
        ) from e


@dataclass(frozen=True)
class Forgiving:
    """Turns a client's failure into an answer, so that the other clients' work goes on.

    The answer is an update of one part, "failed", that has the reason as UTF-8 bytes. The gate
    reads it, and drops the client.
    """

    update: ClientUpdate

    def __call__(
        self, message: Parts, state: Parts, data: ClientData, plans: Mapping[str, Plan]
    ) -> tuple[Parts, Parts]:
        try:
            return self.update(message, state, data, plans)
        except UnfitError:
            raise
        except (RuntimeError, ValueError, IndexError) as e:
            check_forked(e)
            return _failed(str(e) or type(e).__name__), {}


def _failed(why: str) -> Parts:
    return {FAILED: {"reason": torch.frombuffer(bytearray(why.encode()), dtype=torch.uint8)}}
