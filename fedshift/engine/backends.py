"""Backends: how the clients of one cohort are run. All give the same result."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

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

    t: the round that it answers.
    """

    client: int
    update: Parts
    changed: Parts
    t: int = 0


@sketched
class Block(NamedTuple):
    """The results of C clients that were trained together: stacked, leaves [C, ...].

    t: the round that they answer.
    """

    clients: tuple[int, ...]
    updates: Parts
    changed: Parts
    t: int = 0

    def first(self) -> Reply:
        """The first client's reply, which keeps the block alive."""
        # Views: only the forms of its tensors are looked at while the block lives.
        return Reply(self.clients[0], _row(self.updates), _row(self.changed), self.t)

    def replies(self) -> list[Reply]:
        """The reply of each."""
        updates = _rows(self.updates, len(self.clients))
        # What a client keeps outlives the round; as a view it would keep the whole block alive.
        kept = _rows(self.changed, len(self.clients), copy=True)
        many = zip(self.clients, updates, kept, strict=True)
        return [Reply(client, update, changed, self.t) for client, update, changed in many]

    def split(self, parts: Collection[str]) -> tuple[Block, Block]:
        """(these parts of the updates alone, all the rest)."""
        inside = {k: tree for k, tree in self.updates.items() if k in parts}
        outside = {k: tree for k, tree in self.updates.items() if k not in parts}
        return self._replace(updates=inside, changed={}), self._replace(updates=outside)


def joined(blocks: Sequence[Block]) -> Block:
    """One block of all clients, ascending, from blocks of one form whose clients keep no state."""
    blocks = sorted(blocks, key=lambda block: block.clients)
    clients = [client for block in blocks for client in block.clients]
    order = sorted(range(len(clients)), key=clients.__getitem__)

    def whole(leaves: list[Tensor]) -> Tensor:
        joint = torch.cat(leaves)
        # Where blocks hold consecutive clients, no second copy of all updates is made.
        return joint if order == list(range(len(order))) else joint[order]

    updates = {
        part: {k: whole([block.updates[part][k] for block in blocks]) for k in tree}
        for part, tree in blocks[0].updates.items()
    }
    return blocks[0]._replace(clients=tuple(sorted(clients)), updates=updates)


def _row(stacked: Parts) -> Parts:
    return {part: {name: v[0] for name, v in tree.items()} for part, tree in stacked.items()}


def _rows(stacked: Parts, count: int, *, copy: bool = False) -> list[Parts]:
    """Each client's rows, as views of the block; as copies on request or from inference mode."""
    rows: list[Parts] = [{part: {} for part in stacked} for _ in range(count)]
    for part, tree in stacked.items():
        for name, v in tree.items():
            for one, row in zip(rows, v.unbind(), strict=True):
                # Views of inference tensors cannot be written to outside of inference mode.
                one[part][name] = row.clone() if copy or v.is_inference() else row
    return rows


def stamp(data: ClientData) -> tuple[object, ...]:
    """Identity and version of each tensor: equal only while nothing was written to them.

    Valid while they are alive. Where this torch has no versions, no two stamps are equal. Tensors
    of inference mode have none either; they count as never written to.
    """
    if not supported("version"):
        return (object(),)
    return *map(id, data), *(version(v) or 0 for v in data)


Backend = Callable[[ClientUpdate, Iterable[Job]], Iterator[Reply]]
# A backend that sums updates may answer with a block for clients that it summed together.
Summer = Callable[[ClientUpdate, Iterable[Job]], Iterator[Reply | Block]]


@runtime_checkable
class InBlocks(Protocol):
    """A backend that trains clients together, and can answer with blocks."""

    def trained(self, update: ClientUpdate, jobs: Iterable[Job]) -> Iterator[Block]:
        """The jobs' results, block by block as they are trained; a client that fails raises."""
        ...


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
            "sees a GPU; make workers before anything is trained, or set CUDA_VISIBLE_DEVICES= "
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
            # As bytes in a tensor, since updates hold nothing else.
            reason = (str(e) or type(e).__name__).encode()
            return {FAILED: {"reason": torch.frombuffer(bytearray(reason), dtype=torch.uint8)}}, {}
