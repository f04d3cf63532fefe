"""Sums that a process makes of the updates that it trained, so that these need not travel.

A share of a round's clients passes the gate where it was trained; if all of it is good, its updates
are summed there as `fedshift.engine.fold` does, and the sums leave in their place. Otherwise the
updates leave as they are, and the gate of the main process says what is wrong with which client. Of
its own share the main process says so at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch

from fedshift.engine.arrivals import in_turn
from fedshift.engine.backends import Backend, Job, Reply
from fedshift.engine.fold import Fold, Share
from fedshift.engine.gate import Asked, Gate


class Terms(NamedTuple):
    """What a process must know to sum its clients' updates: part -> their weights, ascending."""

    gate: Gate
    parts: frozenset[str]
    weights: Mapping[str, tuple[float, ...]]


@runtime_checkable
class Sums(Protocol):
    """A backend whose processes can sum what they train."""

    def summing(self, books: Books) -> Backend:
        """The backend that does so, and enters the sums in the books."""
        ...


@dataclass(frozen=True, eq=False)
class Books:
    """The fold of a round in the main process, and what replies have to pass."""

    fold: Fold
    gate: Gate
    asked: Asked

    def terms(self, clients: Sequence[int]) -> Terms | None:
        """For some of the clients, ascending; None where nothing of theirs is to be summed.

        A client of weight 0 is left out of sums, so that they would not tell of its numbers. Sums
        in float64 are as large as two updates.
        """
        weights, whole = self.fold.weights, frozenset(self.fold.weights)
        if not whole or len(clients) < 3 or self.fold.telling(clients) != whole:
            return None
        at = torch.searchsorted(self.fold.ids, torch.tensor(clients))
        numbers = {part: tuple(w[at].double().tolist()) for part, w in weights.items()}
        return Terms(self.gate, self.asked.parts, numbers)

    def summed(self, replies: Iterable[Reply], jobs: Sequence[Job]) -> Iterable[Reply]:
        """The main process's own replies, past the gate, without what was summed and entered.

        Raises what `engine.arrivals.in_turn` does for the first that cannot be used.
        """
        clients = tuple(sorted(job.client for job in jobs))
        terms = self.terms(clients)
        if terms is None:
            return replies
        fold = _fold(clients, terms)
        asked = self.asked._replace(clients=clients)
        good = in_turn(self.gate, replies, asked, fold.take, fold).good
        self.fold.enter(fold.share())
        return good


def summing(backend: Backend, books: Books) -> Backend:
    """The backend, which sums what it can by itself."""
    return backend.summing(books) if isinstance(backend, Sums) else backend


def summed(
    replies: Sequence[Reply], jobs: Sequence[Job], terms: Terms
) -> tuple[Sequence[Reply], Share | None]:
    """(replies without what was summed, the sums); the replies as they are where one is bad."""
    messages = {job.client: job.message for job in jobs}
    clients = tuple(sorted(messages))
    asked = Asked(jobs[0].t, clients, messages.__getitem__, terms.parts)
    fold = _fold(clients, terms)
    admitted = terms.gate.admit(replies, asked, fold.telling(clients))
    if admitted.bad:
        return replies, None
    left = fold.take(admitted.good)
    share = fold.share()
    # Nothing was summed where clients send nothing of that name.
    return (left, share) if share.totals and fold.finite() else (replies, None)


def _fold(clients: tuple[int, ...], terms: Terms) -> Fold:
    """Where a process sums its clients' updates."""
    weights = {k: torch.tensor(w, dtype=torch.float64) for k, w in terms.weights.items()}
    return Fold(torch.tensor(clients), weights)
