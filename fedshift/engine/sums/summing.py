"""Check replies and sum them: as they arrive, or in the process that trained them.

`in_turn` does so in the main process, in rounds whose first bad reply ends the run.

A backend may sum its clients' updates itself (`Sums`), so that only the sums travel. The clients
that one process trained then pass the gate there. If all of them are good, their updates are summed
(`engine.sums.running`), and the sums leave in their place. Otherwise the updates leave as they are,
and the gate of the main process says what is wrong with which client. Of clients that the main
process trained itself it says so at once. Clients that were trained together are checked and
summed together.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch

from fedshift.engine.backends import (
    Backend,
    Block,
    ClientUpdate,
    InBlocks,
    Job,
    Reply,
    Summer,
    joined,
)
from fedshift.engine.checks.gate import Admitted, Asked, Dropped, Gate
from fedshift.engine.checks.replies import check_finite
from fedshift.engine.sums.running import Fold, Share
from fedshift.errors import DivergedError, InputError, TrainingError
from fedshift.tree import Params, Parts, same_parts, size_in_bytes

# Replies checked together: their majority says what a reply looks like, and their sums are read
# from memory and written to it once.
SOME = 8
# Given a client and what it keeps of the round.
Keep = Callable[[int, Parts], object]
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

    def train_and_sum(
        self, backend: Backend, update: ClientUpdate, jobs: Sequence[Job]
    ) -> Iterator[Reply | Block]:
        """Train in this process, enter the sums, and yield what was not summed.

        All before the first bad block has passed the gate. Raises what `in_turn` does for the first
        reply that cannot be used.
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


def in_turn(
    gate: Gate, came: Iterable[Reply | Block], asked: Asked, fold: Fold,
    keep: Keep | None = None, some: int = SOME,
) -> Admitted:  # fmt: skip
    """Check replies in ascending client id, `some` at a time, whatever the order they arrive in.

    Good ones are added to `fold`, and what their clients keep is given to `keep`; without it, that
    stays in the replies. A reply waits only for clients of smaller id. Numbers that are not finite
    are looked for in the sums first, and only then in each reply.
    Raises TrainingError for the first client whose reply cannot be used: DivergedError where its
    numbers are not finite.
    """
    whole, replies = _as_one(came, asked, fold)
    if whole is not None:
        if keep:
            for client in whole.clients:
                keep(client, whole.changed)
        return Admitted((), (), whole)
    waiting: dict[int, Reply] = {}
    kept: list[Reply] = []
    left = [asked.clients[i : i + some] for i in range(0, len(asked.clients), some)]
    left.reverse()

    def let(clients: Sequence[int]) -> None:
        came = [waiting.pop(i) for i in clients if i in waiting]
        left = _taken(gate, came, asked._replace(clients=tuple(clients)), fold)
        if keep:
            for reply in left:
                keep(reply.client, reply.changed)
            left = [reply._replace(changed={}) for reply in left]
        kept.extend(left)

    for reply in _once_each(replies, asked):
        waiting[reply.client] = reply
        del reply
        while left and all(i in waiting for i in left[-1]):
            let(left.pop())
    while left:
        let(left.pop())
    return Admitted(tuple(kept), ())


def _as_one(
    came: Iterable[Reply | Block], asked: Asked, fold: Fold
) -> tuple[Block | None, Iterator[Reply]]:
    """(one block of all clients asked, no reply) where all arrived in blocks of one form that were
    checked and summed in their processes; else (None, each client's reply).
    """
    summed = fold.elsewhere
    rest, blocks = iter(came), list[Block]()
    for one in rest:
        if not (isinstance(one, Block) and summed.keys() >= set(one.clients)):
            return None, _singly([*blocks, one], rest)
        blocks.append(one)
    clients = sorted(client for block in blocks for client in block.clients)
    looks = [block.first().update for block in blocks]
    if tuple(clients) == asked.clients and all(same_parts(look, looks[0]) for look in looks):
        return joined(blocks), iter(())
    return None, _singly([*blocks], rest)


def _singly(ahead: list[Reply | Block], rest: Iterator[Reply | Block]) -> Iterator[Reply]:
    while (one := ahead.pop(0) if ahead else next(rest, None)) is not None:
        yield from one.replies() if isinstance(one, Block) else (one,)
        del one  # while the next one is trained


def _once_each(replies: Iterable[Reply], asked: Asked) -> Iterator[Reply]:
    silent = set(asked.clients)
    for reply in replies:
        if reply.client not in silent:
            twice = reply.client in asked.clients
            raise TrainingError(
                f"client {reply.client} {'answered twice' if twice else 'was not asked'}"
            )
        silent.remove(reply.client)
        yield reply
        del reply  # while the next one is trained


def _whole(reply: Reply, fold: Fold) -> Reply:
    """The reply with placeholders for what was summed elsewhere, whose form the gate compares."""
    if not isinstance(reply.update, dict):
        return reply
    return reply._replace(update={**fold.elsewhere.get(reply.client, {}), **reply.update})


def _taken(
    gate: Gate,
    came: Sequence[Reply],
    asked: Asked,
    fold: Fold,
) -> Sequence[Reply]:
    """Check replies together, add them to the sums, and return what was not summed.

    Replies that one process summed were checked there.
    """
    if fold.elsewhere:
        if len(came) == len(asked.clients) and fold.together(asked.clients):
            return fold.take(came)
        came = [_whole(reply, fold) for reply in came]

    def look(bad: Sequence[Dropped] = ()) -> None:
        # Check every number of every reply, to name the first client that is refused.
        if bad := gate.admit(came, asked).bad or bad:
            raise _refusal(gate, bad[0], came, asked)

    admitted = gate.admit(came, asked, fold.telling(asked.clients))
    if admitted.bad:
        look(admitted.bad)
    try:
        left = fold.take(admitted.good)
    except TrainingError:
        look()
        raise
    if not fold.finite():
        look()
    return left


def _refusal(gate: Gate, bad: Dropped, came: Sequence[Reply], asked: Asked) -> TrainingError:
    """The error that a refused reply ends the run with: DivergedError for numbers not finite."""
    try:
        for reply in came:
            # Not replies refused for their size: an expanded tensor may be far larger in memory.
            if reply.client == bad.client and size_in_bytes(reply.update) <= gate.max_bytes:
                check_finite(reply, asked.infinite)
    except DivergedError:
        return DivergedError(bad.reason)
    except (InputError, RuntimeError, TypeError, AttributeError):
        pass  # no tensors at all: `bad` says so
    return TrainingError(bad.reason)


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
    of_block = asked._replace(clients=tuple(i for i in asked.clients if i in block.clients))
    return not gate.admit(block.replies(), of_block).bad


def _asked(jobs: Sequence[Job], terms: Terms) -> Asked:
    messages = {job.client: job.message for job in jobs}
    clients = tuple(sorted(messages))
    of_round = terms.parts, terms.fixed, terms.infinite
    return Asked(jobs[0].t, clients, messages.__getitem__, *of_round)


def _fold(clients: tuple[int, ...], terms: Terms) -> Fold:
    """Where a process sums its clients' updates."""
    # Most parts are summed by the same weights: one tensor for each distinct row of them.
    tensors = {w: torch.tensor(w, dtype=torch.float64) for w in set(terms.weights.values())}
    return Fold(torch.tensor(clients), {part: tensors[w] for part, w in terms.weights.items()})
