"""Clients under a cap: in a fit no client counts for more, whatever size it claims."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from fedshift.router.moments import Moments
from fedshift.router.parts import Clients, Fold, HeldOutSums, OriginSums, Part
from fedshift.router.score import ClientHead
from fedshift.server.cap import capped_sizes

Item = TypeVar("Item")
Answer = TypeVar("Answer")


def bounded(clients: Clients, cap: float) -> Clients:
    """The clients, with each share of the examples limited to the cap; unchanged for a cap of 1."""
    return clients if cap >= 1.0 else _Bounded(clients, cap)


@dataclass(frozen=True, eq=False)
class _Bounded:
    """Multiplies each client's sums by m_i / n_i, where m are the `capped_sizes` of n.

    This gives its examples less weight in a fit. For held-out examples, sizes are their numbers.
    Nothing changes at the clients.
    """

    clients: Clients
    cap: float

    @property
    def whole(self) -> Part:
        return _Part(self.clients.whole, self.cap)

    def fold(self, k: int) -> Fold:
        fit, held_out = self.clients.fold(k)
        return Fold(_Part(fit, self.cap), _Part(held_out, self.cap))

    def each(self, work: Callable[[Item], Answer], items: Sequence[Item]) -> list[Answer]:
        return self.clients.each(work, items)


@dataclass(frozen=True, eq=False)
class _Part:
    part: Part
    cap: float

    @property
    def sizes(self) -> Tensor:
        return capped_sizes(self.part.sizes, self.cap)

    def moments(self) -> list[Moments]:
        factors = self._factors(self.part.sizes)
        sent = zip(self.part.moments(), factors, strict=True)
        return [Moments(*(by * v for v in one)) for one, by in sent]

    def origin_sums(self, head: ClientHead) -> list[OriginSums]:
        factors = self._factors(self.part.sizes)
        sent = zip(self.part.origin_sums(head), factors, strict=True)
        return [OriginSums(*(by * v for v in one)) for one, by in sent]

    def held_out_sums(self, heads: Sequence[ClientHead]) -> list[HeldOutSums]:
        sent = self.part.held_out_sums(heads)
        if not sent:
            return []
        factors = self._factors(torch.stack([one.n for one in sent]))
        return [HeldOutSums(*(by * v for v in one)) for one, by in zip(sent, factors, strict=True)]

    def _factors(self, n: Tensor) -> list[float]:
        # Clients without examples have sums of 0 anyway.
        return torch.where(n > 0, capped_sizes(n, self.cap) / n.clamp(min=1.0), 1.0).tolist()
