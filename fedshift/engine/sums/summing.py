"""Check replies and sum them: in the main process (`check_and_sum`), or in a worker that trains.

All replies are blocks. In the main process, a block of one client waits until the clients before it
have arrived: sums then have the order, and errors name the client, of a loop. A block of several
clients is checked and summed as soon as it arrives.

A worker that trains several clients checks them itself, and sends sums in place of their updates.
From the first bad reply on it sends updates as they are, so that the main process can name the
client and the fault, as a loop would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol, runtime_checkable

import torch

from fedshift.engine.backends import (
    Backend,
    Block,
    ClientUpdate,
    Job,
    Look,
    Reply,
)
from fedshift.engine.checks.gate import Admitted, Asked, Dropped, Gate
from fedshift.engine.checks.replies import block_of, check_finite, inspect_parts
from fedshift.engine.sums.running import RunningSums, join_blocks
from fedshift.errors import DivergedError, TrainingError
from fedshift.tree import Params, Parts, size_in_bytes

# Single clients that are checked and summed together. The majority of them decides what a reply
# must look like, and the totals are read and written once for all of them.
SOME = 8
# Called with a client and what changed of its state.
Keep = Callable[[int, Parts], object]


class Terms(NamedTuple):
    """What a worker needs to check and sum its clients' updates.

    weights: part -> the weights of these clients, ascending. parts, fixed, infinite: as in
    `engine.checks.gate.Asked`
    """

    gate: Gate
    parts: frozenset[str]
    weights: Mapping[str, tuple[float, ...]]
    fixed: frozenset[str] = frozenset()
    infinite: Params | None = None


# Gives the terms for some clients, ascending; None where their updates should travel unsummed.
TermsOf = Callable[[Sequence[int]], Terms | None]
# A backend, all of whose replies are blocks.
Stream = Callable[[ClientUpdate, Iterable[Job]], Iterator[Block]]


@runtime_checkable
class InBlocks(Protocol):
    """A backend that trains clients together, or in other processes."""

    def stream(
        self, update: ClientUpdate, jobs: Iterable[Job], terms_of: TermsOf | None = None
    ) -> Iterator[Block]:
        """Blocks as they were trained; other processes may sum theirs by these terms."""
        ...


def terms(sums: RunningSums, gate: Gate, asked: Asked, clients: Sequence[int]) -> Terms | None:
    """The terms for clients that another process trains, ascending; None where it shall not sum.

    It shall not where a client has weight 0: the sum leaves it out, and would hide its bad numbers.
    Nor for fewer than three clients: a float64 sum takes as many bytes as two float32 updates.
    """
    parts = frozenset(sums.weights)
    if not parts or len(clients) < 3 or sums.revealing(clients) != parts:
        return None
    return Terms(gate, asked.parts, sums.numbers(clients), asked.fixed, asked.infinite)


def stream_of(backend: Backend, terms_of: TermsOf | None = None) -> Stream:
    """The backend with blocks for replies, the only form that is known from here on.

    terms_of: gives the terms by which the backend's processes sum; None: they do not sum.
    """
    stream: Callable[[ClientUpdate, Iterable[Job]], Iterator[Reply | Block]] = backend
    if isinstance(backend, InBlocks):
        stream = partial(backend.stream, terms_of=terms_of)
    # map() keeps no reply, so that its memory is free while the next client trains.
    return lambda update, jobs: map(block_of, stream(update, jobs))


def check_and_sum(
    gate: Gate, blocks: Iterable[Block], asked: Asked, sums: RunningSums,
    keep: Keep | None = None, some: int = SOME,
) -> Admitted:  # fmt: skip
    """Check replies and add them to `sums`, in ascending client id whatever order they arrive in.

    Clients are checked `some` at a time. Their changed states go to `keep`; without it, they stay
    in the blocks. Numbers that are not finite are first looked for in the sums, which costs one
    look for all clients; only if there are any, each reply is searched. Raises TrainingError for
    the first client whose reply cannot be used: DivergedError where its numbers are not finite.
    """
    arrivals = _Arrivals(gate, asked, sums, keep)
    groups = [asked.clients[i : i + some] for i in range(0, len(asked.clients), some)][::-1]
    for block in _once_each(blocks, asked):
        arrivals.add(block)
        del block  # so that its memory is free while the next one is trained
        while groups and arrivals.have_all(groups[-1]):
            arrivals.finish(groups.pop())
    while groups:
        arrivals.finish(groups.pop())
    return Admitted(tuple(arrivals.good), ())


def _once_each(blocks: Iterable[Block], asked: Asked) -> Iterator[Block]:
    """The blocks; TrainingError for a client that answers twice, or was not asked."""
    unanswered = set(asked.clients)
    for block in blocks:
        for client in block.clients:
            if client not in unanswered:
                twice = client in asked.clients
                raise TrainingError(
                    f"client {client} {'answered twice' if twice else 'was not asked'}"
                )
            unanswered.remove(client)
        yield block
        del block  # while the next one is trained


class _Arrived(NamedTuple):
    """A client that has arrived: its block, and its row there.

    look: index in `_looks` of the block's look, if its clients are checked and summed already; None
    for a single client, which is not.
    """

    block: Block
    row: int
    look: int | None


@dataclass(eq=False)
class _Arrivals:
    """The replies of a round so far. good: usable ones, without what was summed of them."""

    gate: Gate
    asked: Asked
    sums: RunningSums
    keep: Keep | None
    good: list[Block] = field(default_factory=list)
    _waiting: dict[int, _Arrived] = field(default_factory=dict)
    _looks: list[Look] = field(default_factory=list)

    def add(self, block: Block) -> None:
        """Note a block. Several clients are checked and summed now; a single one in its turn."""
        if len(block.clients) == 1:
            self._waiting[block.clients[0]] = _Arrived(block, 0, None)
            return
        if not (block.sums or self._passes(block)):
            for one in block.each():
                self.add(one)
            return
        (left,) = self.sums.add([block])
        self._add_usable(left)
        if left.look not in self._looks:
            self._looks.append(left.look)
        number = self._looks.index(left.look)
        for row, client in enumerate(block.clients):
            self._waiting[client] = _Arrived(left, row, number)

    def have_all(self, clients: Sequence[int]) -> bool:
        """Whether all of these clients have arrived."""
        return self._waiting.keys() >= set(clients)

    def finish(self, clients: tuple[int, ...]) -> None:
        """Check and sum those of these clients that are not yet, and keep their states."""
        here = [self._waiting.pop(client) for client in clients if client in self._waiting]
        looks = {one.look for one in here}
        # Blocks passed one by one, each alike within itself. If they differ from one another, all
        # are checked together: the majority then decides which client is odd.
        if len(here) < len(clients) or None in looks or len(looks) > 1:
            for left in self._sum(here, clients):
                self._add_usable(left)
        for block, row, _ in here if self.keep else ():
            self.keep(block.clients[row], block.state(row))  # type: ignore[misc]

    def _passes(self, block: Block) -> bool:
        """Whether a block that no other process has checked looks like the first, and passes."""
        if self._looks and block.look != self._looks[0]:
            return False
        return not self.gate.admit([block], self.asked._replace(clients=block.clients)).bad

    def _add_usable(self, left: Block) -> None:
        self.good.append(left._replace(changed={}) if self.keep and left.changed else left)

    def _sum(self, here: Sequence[_Arrived], clients: tuple[int, ...]) -> list[Block]:
        """Check these clients together, and sum the single ones among them.

        Returns these without the parts that were summed.
        """
        gate, asked = self.gate, self.asked._replace(clients=clients)
        blocks = [one.block if one.look is None else one.block.one(one.row) for one in here]

        def name(bad: Sequence[Dropped] = ()) -> None:
            # Raise for the first bad client. Now every number of every reply is looked at.
            if bad := gate.admit(blocks, asked).bad or bad:
                raise _refusal(gate, bad[0], blocks, asked)

        admitted = gate.admit(blocks, asked, self.sums.revealing(clients))
        if admitted.bad:
            name(admitted.bad)
        try:
            left = self.sums.add([one.block for one in here if one.look is None])
        except TrainingError:
            name()
            raise
        if not self.sums.finite():
            name()
        return left


def _refusal(gate: Gate, bad: Dropped, blocks: Sequence[Block], asked: Asked) -> TrainingError:
    """The error for a refused reply: DivergedError if its numbers are not finite."""
    try:
        for block in blocks:
            # Not if refused for its size: a search through an expanded tensor, which may have come
            # as a few bytes, needs memory for every number.
            if bad.client in block.clients and size_in_bytes(block.updates) <= gate.max_bytes:
                check_finite(block, asked.infinite)
    except DivergedError:
        return DivergedError(bad.reason)
    except (TrainingError, RuntimeError, TypeError):
        pass  # these are no plain tensors, and the reason in `bad` says so
    return TrainingError(bad.reason)


def train_and_sum(
    backend: Backend, update: ClientUpdate, jobs: Sequence[Job], terms: Terms
) -> list[Block]:
    """Train, check and sum in a worker: [one block of all clients, with their sums].

    From the first block on that does not pass the gate, or looks unlike those before it, clients
    follow one by one and unsummed, for the main process to check.
    """
    messages = {job.client: job.message for job in jobs}
    clients = tuple(sorted(messages))
    of_round = terms.parts, terms.fixed, terms.infinite
    asked = Asked(jobs[0].t, clients, messages.__getitem__, *of_round)
    sums, good, others = _sums_of(clients, terms), list[Block](), list[Block]()
    blocks = stream_of(backend)(update, jobs)
    for block in blocks:
        of_block = asked._replace(clients=block.clients)
        if not (_alike([*good[:1], block]) and not terms.gate.admit([block], of_block).bad):
            others = [block, *blocks]
            break
        good += sums.add([block])
        del block  # while the next one is trained
    if sums.totals:
        good = [join_blocks(good)._replace(sums=sums.totals)]
    else:  # no client sent any part that is to be summed
        good, others = [], [*good, *others]
    return [*good, *(one for block in others for one in block.each())]


def _sums_of(clients: tuple[int, ...], terms: Terms) -> RunningSums:
    """The running sums of a worker."""
    # Most parts share their weights; `RunningSums` recognises this by the tensor's identity.
    tensors = {w: torch.tensor(w, dtype=torch.float64) for w in set(terms.weights.values())}
    weights = {part: tensors[w] for part, w in terms.weights.items()}
    return RunningSums(torch.tensor(clients), weights)


def _alike(blocks: Sequence[Block]) -> bool:
    """Whether what these blocks' clients send and keep looks the same."""
    looks = [
        (block.look, inspect_parts(block.changed, several=len(block.clients) > 1))
        for block in blocks
    ]
    return all(look == looks[0] for look in looks)
