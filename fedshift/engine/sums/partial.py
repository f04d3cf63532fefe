"""Sum updates in the process that trained them, so that only the sums travel.

A share of a round's clients passes the gate where it was trained. If all of it is good, its updates
are summed there (`engine.sums.running`), and the sums leave in their place. Otherwise the updates
leave as they are, and the gate of the main process says what is wrong with which client. Of its own
share the main process says so at once. Clients that were trained together pass the gate and
are summed together.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch

from fedshift.engine.backends import Backend, Block, ClientUpdate, InBlocks, Job, Reply, Summer
from fedshift.engine.checks.gate import Asked, Gate
from fedshift.engine.sums.arrivals import in_turn
from fedshift.engine.sums.running import Fold, Share
from fedshift.tree import Params

# Names, shapes and types of a client's update.
Look = dict[str, dict[str, tuple[torch.Size, torch.dtype]]]


class Terms(NamedTuple):
    """What a process needs to sum its clients' updates: part -> their weights, ascending.

    parts, fixed, infinite: as in `engine.checks.gate.Asked`
    """

    gate: Gate
    parts: frozenset[str]
    weights: Mapping[str, tuple[float, ...]]
    fixed: frozenset[str] = frozenset()
    infinite: Params | None = None


@runtime_checkable
class Sums(Protocol):
    """A backend that can sum what it trains."""

    def summing(self, books: Books) -> Summer:
        """The backend that does so, and enters the sums in the books."""
        ...


@dataclass(frozen=True, eq=False)
class Books:
    """The running sums of a round in the main process, and the gate that replies must pass."""

    fold: Fold
    gate: Gate
    asked: Asked

    def terms(self, clients: Sequence[int]) -> Terms | None:
        """For some of the clients, ascending; None where their updates are not worth summing.

        Sums leave out clients of weight 0, and so would hide bad numbers of theirs. Sums in float64
        are as large as two updates, so that they pay from three clients on.
        """
        whole = frozenset(self.fold.weights)
        if not whole or len(clients) < 3 or self.fold.telling(clients) != whole:
            return None
        asked, numbers = self.asked, self.fold.numbers(clients)
        return Terms(self.gate, asked.parts, numbers, asked.fixed, asked.infinite)

    def own(
        self, backend: Backend, update: ClientUpdate, jobs: Sequence[Job]
    ) -> Iterator[Reply | Block]:
        """Train in this process, enter the sums, and yield what was not summed.

        Everything before the first bad block has been validated. Raises what
        `engine.sums.arrivals.in_turn` does for the first reply that cannot be used.
        """
        clients = tuple(sorted(job.client for job in jobs))
        terms = self.terms(clients)
        if terms is None:
            yield from backend(update, jobs)
        elif isinstance(backend, InBlocks):
            blocks = backend.trained(update, jobs)
            left, share = _in_blocks(blocks, jobs, terms)
            if share is not None:
                self.fold.enter(share)
            yield from apart(itertools.chain(left, blocks), share)
        else:
            fold, asked = _fold(clients, terms), self.asked._replace(clients=clients)
            good = in_turn(self.gate, backend(update, jobs), asked, fold).good
            self.fold.enter(fold.share())
            yield from good


def summing(backend: Backend, books: Books) -> Summer:
    """The backend, which sums what it can by itself."""
    return backend.summing(books) if isinstance(backend, Sums) else backend


def summed(
    backend: Backend, update: ClientUpdate, jobs: Sequence[Job], terms: Terms
) -> tuple[Sequence[Reply | Block], Share | None]:
    """(replies without what was summed, the sums); the whole replies where one is bad.

    Blocks stay blocks, and are summed up to the first bad one.
    """
    if isinstance(backend, InBlocks):
        blocks = backend.trained(update, jobs)
        good, share = _in_blocks(blocks, jobs, terms)
        return [*good, *blocks], share
    replies = tuple(backend(update, jobs))
    asked = _asked(jobs, terms)
    fold = _fold(asked.clients, terms)
    admitted = terms.gate.admit(replies, asked, fold.telling(asked.clients))
    if admitted.bad:
        return replies, None
    left = fold.take(admitted.good)
    share = fold.share()
    # Nothing was summed where clients send nothing of that name.
    return (left, share) if share.totals and fold.finite() else (replies, None)


def apart(came: Iterable[Reply | Block], share: Share | None) -> Iterator[Reply | Block]:
    """A share's replies. Blocks are split, unless they were summed and their clients keep nothing:
    states are stored one by one as they arrive.
    """
    summed = frozenset[int]() if share is None else frozenset(share.clients)
    for one in came:
        if isinstance(one, Block) and (
            not summed.issuperset(one.clients) or any(one.changed.values())
        ):
            yield from one.replies()
        else:
            yield one


def _in_blocks(
    blocks: Iterable[Block], jobs: Sequence[Job], terms: Terms
) -> tuple[list[Block], Share | None]:
    """(what is left of the blocks up to the first bad one, which is whole; the sums).

    A block of another form than the first one is bad, too: the gate has to see both.
    """
    asked, like = _asked(jobs, terms), Look()
    fold, left, added = _fold(asked.clients, terms), list[Block](), list[int]()
    for block in blocks:
        look = _look(block)
        if look != (like := like or look) or not _good(terms.gate, block, asked):
            left.append(block)
            break
        ours, rest = block.split(terms.weights)
        fold.take_block(ours)
        added += block.clients
        left.append(rest)
        del block, ours  # while the next one is trained
    share = fold.share()._replace(clients=tuple(sorted(added)))
    return left, share if share.totals else None


def _look(block: Block) -> Look:
    """Names, shapes and types of its updates; keeps no tensor of the block alive."""
    return {
        part: {k: (v.shape[1:], v.dtype) for k, v in tree.items()}
        for part, tree in block.updates.items()
    }


def _good(gate: Gate, block: Block, asked: Asked) -> bool:
    """Whether all of a block passes the gate: as one, or each reply by itself."""
    if gate.passes(block, asked):
        return True
    own = asked._replace(clients=tuple(i for i in asked.clients if i in block.clients))
    return not gate.admit(block.replies(), own).bad


def _asked(jobs: Sequence[Job], terms: Terms) -> Asked:
    messages = {job.client: job.message for job in jobs}
    clients = tuple(sorted(messages))
    known = terms.parts, terms.fixed, terms.infinite
    return Asked(jobs[0].t, clients, messages.__getitem__, *known)


def _fold(clients: tuple[int, ...], terms: Terms) -> Fold:
    """Where a process sums its clients' updates."""
    # Most parts are summed by the same weights.
    known = {w: torch.tensor(w, dtype=torch.float64) for w in set(terms.weights.values())}
    return Fold(torch.tensor(clients), {part: known[w] for part, w in terms.weights.items()})
