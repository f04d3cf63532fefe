"""Check replies and sum them: in the main process (`in_turn`), or where they train (`summed`).

All replies are blocks. In the main process those of one client wait for the clients before them, so
that sums and errors are those of a loop. A block of several clients passes the gate, and is summed,
as soon as it is there.

Workers send the sums over their clients in place of the updates, and check these clients
themselves. After the first bad reply a worker sends updates as they are. The main process then
names the client and the fault, as a loop would.
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
from fedshift.engine.checks.replies import block_of, check_finite, looked_at
from fedshift.engine.sums.running import RunningSums, joined
from fedshift.errors import DivergedError, TrainingError
from fedshift.tree import Params, Parts, size_in_bytes

# Single clients that are checked together: their majority says what a reply looks like, and their
# sums are read from memory and written to it once.
SOME = 8
# Given a client and what it keeps of the round.
Keep = Callable[[int, Parts], object]


class Terms(NamedTuple):
    """What a process needs to check and sum its clients' updates: part -> their weights, ascending.

    parts, fixed, infinite: as in `engine.checks.gate.Asked`
    """

    gate: Gate
    parts: frozenset[str]
    weights: Mapping[str, tuple[float, ...]]
    fixed: frozenset[str] = frozenset()
    infinite: Params | None = None


# Of some clients, ascending; None where their updates should travel as they are.
TermsOf = Callable[[Sequence[int]], Terms | None]
# A backend, all of whose replies are blocks.
Stream = Callable[[ClientUpdate, Iterable[Job]], Iterator[Block]]


@runtime_checkable
class InBlocks(Protocol):
    """A backend that trains clients together, or in other processes."""

    def stream(
        self, update: ClientUpdate, jobs: Iterable[Job], terms_of: TermsOf | None = None
    ) -> Iterator[Block]:
        """What came of the jobs, as it lies in memory; other processes sum by these terms."""
        ...


def terms(sums: RunningSums, gate: Gate, asked: Asked, clients: Sequence[int]) -> Terms | None:
    """For clients that another process trains, ascending; None where it need not sum.

    Sums leave out clients of weight 0, whose bad numbers they would hide. Sums in float64 are as
    large as two updates, so that they pay from three clients on.
    """
    parts = frozenset(sums.weights)
    if not parts or len(clients) < 3 or sums.revealing(clients) != parts:
        return None
    return Terms(gate, asked.parts, sums.numbers(clients), asked.fixed, asked.infinite)


def streamed(backend: Backend, terms_of: TermsOf | None = None) -> Stream:
    """The backend's replies as blocks: what follows knows no other form.

    terms_of: by which its processes sum, if it has any; None: they do not.
    """
    stream: Callable[[ClientUpdate, Iterable[Job]], Iterator[Reply | Block]] = backend
    if isinstance(backend, InBlocks):
        stream = partial(backend.stream, terms_of=terms_of)
    # map() keeps no reply, so that its memory is free while the next client trains.
    return lambda update, jobs: map(block_of, stream(update, jobs))


def in_turn(
    gate: Gate, came: Iterable[Block], asked: Asked, sums: RunningSums,
    keep: Keep | None = None, some: int = SOME,
) -> Admitted:  # fmt: skip
    """Check replies in ascending client id, `some` clients at a time, whatever the order they
    arrive in.

    Good ones are added to `sums`, and what their clients keep is given to `keep`; without it, that
    stays in the blocks. A reply waits only for clients of smaller id. Numbers of single clients
    that are not finite are looked for in the sums first, and only then in each reply.
    Raises TrainingError for the first client whose reply cannot be used: DivergedError where its
    numbers are not finite.
    """
    arrivals = _Arrivals(gate, asked, sums, keep)
    groups = [asked.clients[i : i + some] for i in range(0, len(asked.clients), some)][::-1]
    for block in _once_each(came, asked):
        arrivals.add(block)
        del block  # its memory is free while the next one is trained
        while groups and arrivals.have(groups[-1]):
            arrivals.finish(groups.pop())
    while groups:
        arrivals.finish(groups.pop())
    return Admitted(tuple(arrivals.good), ())


def _once_each(blocks: Iterable[Block], asked: Asked) -> Iterator[Block]:
    silent = set(asked.clients)
    for block in blocks:
        for client in block.clients:
            if client not in silent:
                twice = client in asked.clients
                raise TrainingError(
                    f"client {client} {'answered twice' if twice else 'was not asked'}"
                )
            silent.remove(client)
        yield block
        del block  # while the next one is trained


class _Arrived(NamedTuple):
    """A client's row in the block in which it came.

    look: index of the block's form, if its clients were already checked and summed; None for a
    single client, which is still unchecked.
    """

    block: Block
    row: int
    look: int | None


@dataclass(eq=False)
class _Arrivals:
    """The replies of a round that have arrived; good: what was left of those that can be used."""

    gate: Gate
    asked: Asked
    sums: RunningSums
    keep: Keep | None
    good: list[Block] = field(default_factory=list)
    _waiting: dict[int, _Arrived] = field(default_factory=dict)
    _looks: list[Look] = field(default_factory=list)

    def add(self, block: Block) -> None:
        """Add what has arrived. Several clients that pass the gate are summed at once."""
        if len(block.clients) == 1:
            self._waiting[block.clients[0]] = _Arrived(block, 0, None)
            return
        if not (block.sums or self._pass(block)):
            for one in block.each():
                self.add(one)
            return
        (left,) = self.sums.add([block])
        self._let(left)
        if left.look not in self._looks:
            self._looks.append(left.look)
        number = self._looks.index(left.look)
        for row, client in enumerate(block.clients):
            self._waiting[client] = _Arrived(left, row, number)

    def have(self, clients: Sequence[int]) -> bool:
        """Whether all of these clients' replies are there."""
        return self._waiting.keys() >= set(clients)

    def finish(self, clients: tuple[int, ...]) -> None:
        """Check those of these clients that were not, sum them, and keep what is to be kept."""
        here = [self._waiting.pop(client) for client in clients if client in self._waiting]
        looks = {one.look for one in here}
        # Where clients of several blocks do not look alike, the majority says who is odd.
        if len(here) < len(clients) or None in looks or len(looks) > 1:
            for left in self._sum(here, clients):
                self._let(left)
        for block, row, _ in here if self.keep else ():
            self.keep(block.clients[row], block.state(row))  # type: ignore[misc]

    def _pass(self, block: Block) -> bool:
        """Whether clients that no other process has checked look like those before and pass."""
        if self._looks and block.look != self._looks[0]:
            return False
        return not self.gate.admit([block], self.asked._replace(clients=block.clients)).bad

    def _let(self, left: Block) -> None:
        self.good.append(left._replace(changed={}) if self.keep and left.changed else left)

    def _sum(self, here: Sequence[_Arrived], clients: tuple[int, ...]) -> list[Block]:
        """Check these clients together, add the single ones to the sums, and return what is left of
        them.
        """
        gate, asked = self.gate, self.asked._replace(clients=clients)
        came = [one.block if one.look is None else one.block.one(one.row) for one in here]

        def name(bad: Sequence[Dropped] = ()) -> None:
            # Look at every number of every reply, to name the first client that is refused.
            if bad := gate.admit(came, asked).bad or bad:
                raise _refusal(gate, bad[0], came, asked)

        admitted = gate.admit(came, asked, self.sums.revealing(clients))
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


def _refusal(gate: Gate, bad: Dropped, came: Sequence[Block], asked: Asked) -> TrainingError:
    """The error that a refused reply ends the run with: DivergedError for numbers not finite."""
    try:
        for block in came:
            # Not replies refused for their size: an expanded tensor may be far larger in memory.
            if bad.client in block.clients and size_in_bytes(block.updates) <= gate.max_bytes:
                check_finite(block, asked.infinite)
    except DivergedError:
        return DivergedError(bad.reason)
    except (TrainingError, RuntimeError, TypeError):
        pass  # no plain tensors: `bad` says so
    return TrainingError(bad.reason)


def summed(
    backend: Backend, update: ClientUpdate, jobs: Sequence[Job], terms: Terms
) -> list[Block]:
    """[one block of all clients, with their sums], in a process that trains for the main one.

    From the first block on that does not pass the gate, or does not look like those before it,
    clients follow one by one as they came: the main process has to see them.
    """
    messages = {job.client: job.message for job in jobs}
    clients = tuple(sorted(messages))
    of_round = terms.parts, terms.fixed, terms.infinite
    asked = Asked(jobs[0].t, clients, messages.__getitem__, *of_round)
    sums, good, others = _sums_of(clients, terms), list[Block](), list[Block]()
    came = streamed(backend)(update, jobs)
    for block in came:
        of_block = asked._replace(clients=block.clients)
        if not (_alike([*good[:1], block]) and not terms.gate.admit([block], of_block).bad):
            others = [block, *came]
            break
        good += sums.add([block])
        del block  # while the next one is trained
    if sums.totals:
        good = [joined(good)._replace(sums=sums.totals)]
    else:  # nothing of those names was sent
        good, others = [], [*good, *others]
    return [*good, *(one for block in others for one in block.each())]


def _sums_of(clients: tuple[int, ...], terms: Terms) -> RunningSums:
    """Where a process sums its clients' updates."""
    # Most parts are summed by the same weights: one tensor for each distinct row of them.
    tensors = {w: torch.tensor(w, dtype=torch.float64) for w in set(terms.weights.values())}
    weights = {part: tensors[w] for part, w in terms.weights.items()}
    return RunningSums(torch.tensor(clients), weights)


def _alike(blocks: Sequence[Block]) -> bool:
    """Whether their clients send, and keep, what looks the same."""
    looks = [
        (block.look, looked_at(block.changed, several=len(block.clients) > 1)) for block in blocks
    ]
    return all(look == looks[0] for look in looks)
