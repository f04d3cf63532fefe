"""Backends: how the clients of one cohort are run. All give the same result."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedshift.client.trainer import Trainer, trained_by
from fedshift.data import ClientData, Plan
from fedshift.errors import TrainingError, UnfitError
from fedshift.kernels.torch_private import supported, version
from fedshift.sketch import sketched
from fedshift.tree import Parts

ClientUpdate = Callable[[Parts, Parts, ClientData, Mapping[str, Plan]], tuple[Parts, Parts]]


FAILED = "failed"


@sketched
class Job(NamedTuple):
    """One client's work in round t.

    how: what trains its phases; None is their own loop (`client.trainer`).
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
    """The result of a job: the update that leaves the client and its changed state.

    t: the round that it answers. This is what backends give that train clients one by one; the
    engine makes a `Block` of it (`fedshift.engine.checks.replies.block_of`).
    """

    client: int
    update: Parts
    changed: Parts
    t: int = 0


# Of one client's update: part -> name -> (shape, type).
Look = dict[str, dict[str, tuple[torch.Size, torch.dtype]]]
# The look of a block that was not looked at yet; never written to.
UNSEEN: Look = {}


@sketched
class Block(NamedTuple):
    """What came of C clients, updates and changed states as one.

    Every reply goes through the engine in this form, from whatever trained its client to the sums.
    Leaves are [C, ...] of several clients, and [...] of one, as C often is.

    t        the round that they answer
    look     what each client's update looked like when it came, with the parts that were added up
             since and are no longer in `updates`; `block_of` notes it
    sums     the sums over these clients, in float64, made in the process that trained them; empty
             once the running sums of the round have them
    odd      what was wrong with a reply that is no parts of plain tensors, and so is not here
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
        """The block of leaves [C, ...], also where C is 1."""
        if len(clients) == 1:
            updates, changed = _row(updates, 0), _row(changed, 0)
        return Block(clients, updates, changed, t)

    def replies(self) -> list[Reply]:
        """The reply of each client, without what was summed."""
        if self.odd:
            failed = _failed(self.odd)
            return [Reply(client, failed, {}, self.t) for client in self.clients]
        rows = enumerate(self.each())
        return [
            Reply(one.clients[0], _writable(one.updates), self.state(i), self.t) for i, one in rows
        ]

    def state(self, row: int) -> Parts:
        """What one of the clients changed of its state.

        It outlives the round: as a view it would keep the whole block alive.
        """
        if len(self.clients) == 1:
            return _writable(self.changed)
        return _writable(_row(self.changed, row), copy=True)

    def each(self) -> list[Block]:
        """A block of each client."""
        return [self.one(row) for row in range(len(self.clients))]

    def one(self, row: int) -> Block:
        """The block of one of the clients."""
        if len(self.clients) == 1:
            return self
        updates, changed = _row(self.updates, row), _row(self.changed, row)
        return Block((self.clients[row],), updates, changed, self.t, self.look, odd=self.odd)

    def rows(self, leaf: Tensor) -> Sequence[Tensor]:
        """A leaf, client by client."""
        return leaf.unbind() if len(self.clients) > 1 else (leaf,)


def _row(stacked: Parts, row: int) -> Parts:
    return {part: {k: v[row] for k, v in tree.items()} for part, tree in stacked.items()}


def _writable(parts: Parts, *, copy: bool = False) -> Parts:
    """The same numbers; copied if asked, or made in inference mode, where no one could write to
    them.
    """
    return {
        part: {k: v.clone() if copy or v.is_inference() else v for k, v in tree.items()}
        for part, tree in parts.items()
    }


def stamp(data: ClientData) -> tuple[object, ...]:
    """Identity and version of each tensor: equal only while nothing was written to them.

    Valid while they are alive. Where this torch has no versions, no two stamps are equal. Tensors
    of inference mode have none either; they count as never written to.
    """
    if not supported("version"):
        return (object(),)
    return *map(id, data), *(version(v) or 0 for v in data)


Backend = Callable[[ClientUpdate, Iterable[Job]], Iterator[Reply]]


def loop(update: ClientUpdate, jobs: Iterable[Job]) -> Iterator[Reply]:
    """One client after the other in this process. A failure is raised with the client's id."""
    for job in jobs:
        yield work(update, job)


def work(update: ClientUpdate, job: Job) -> Reply:
    """One client's work. Raises TrainingError, with the client's id, where torch refuses it.

    UnfitError passes: there the backend cannot train this run, and no client is to blame.
    """
    try:
        # `how` is set around the call, so that methods and phases need not know of it.
        with contextlib.nullcontext() if job.how is None else trained_by(job.how):
            result = update(job.message, job.state, job.data, job.plans)
    except UnfitError:
        raise
    except (RuntimeError, ValueError, IndexError) as e:
        check_forked(e)
        raise TrainingError(f"client {job.client} failed: {e}") from e
    return Reply(job.client, *result, job.t)


def check_forked(e: Exception) -> None:
    """Raise UnfitError where torch takes no gradients in a forked process; no client is to blame.

    That is so once the process that forked it has taken some itself, if torch sees a GPU.
    """
    if "fork-based multiprocessing" in str(e):
        raise UnfitError(
            "workers cannot train: this process took gradients before it forked them, and torch "
            "sees a GPU. Make workers before anything is trained, or set CUDA_VISIBLE_DEVICES= "
            "(nothing) for this program, or leave workers out"
        ) from e


@dataclass(frozen=True)
class Forgiving:
    """A client's work whose failure is an answer, so that others' work goes on.

    The answer is an update of one part, "failed", with the reason in UTF-8.
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
