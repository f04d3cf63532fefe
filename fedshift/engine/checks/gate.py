"""The gate: checks a cohort's replies before the server's state is touched.

It is the same on every engine. Nothing that a reply says about its own weight is read: weights come
from the server's table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from fedshift.arguments import check_fields
from fedshift.engine.backends import Block
from fedshift.engine.checks.replies import (
    check_reply,
    expected_look,
    failure,
    finite,
    misshapen,
)
from fedshift.errors import InputError, from_elsewhere, unknown
from fedshift.server.cap import check_cap
from fedshift.tree import Params, Parts

OnBad = Literal["stop", "drop"]
Kind = Literal["timeout", "error", "lost", "reply", "late"]


class Dropped(NamedTuple):
    """A client that was drawn and sent nothing usable, and why.

    kind     "timeout": no answer in time; "error": it reported that it failed; "lost": it was not
             there; "reply": its reply cannot be used; "late": it answered another round
    """

    client: int
    reason: str
    kind: Kind = "error"  # the default is for checkpoints of versions that had no kinds


class Asked(NamedTuple):
    """What a round asked for: its clients (ascending), and the message that each was sent.

    parts     names of the parts that may leave a client of the method; empty: not known
    fixed     names of parameters that are sent to clients and not back (`Model.fixed`)
    infinite  buffers that were not finite before round 1, as a mask of -inf; they pass where they
              are still the same
    """

    t: int
    clients: tuple[int, ...]
    message: Callable[[int], Parts]
    parts: frozenset[str] = frozenset()
    fixed: frozenset[str] = frozenset()
    infinite: Params | None = None


class Admitted(NamedTuple):
    """Usable replies, and the clients that have none; both by client id."""

    good: tuple[Block, ...]
    bad: tuple[Dropped, ...]

    @property
    def clients(self) -> tuple[int, ...]:
        """The clients with usable replies, ascending."""
        return tuple(sorted(client for block in self.good for client in block.clients))

    def states(self) -> Iterator[tuple[int, Parts]]:
        """(client, what changed of its state) for the clients with usable replies, ascending."""
        place = {client: (b, i) for b in self.good for i, client in enumerate(b.clients)}
        for client in self.clients:
            block, row = place[client]
            yield client, block.state(row)


@dataclass(frozen=True)
class Gate:
    """Limits of what is let through, and of rounds that lack replies.

    on_bad       "stop": a bad reply ends a run in one process, with TrainingError; "drop": its
                 client drops out of the round, and so does one whose training fails. On Flower bad
                 replies are dropped either way
    max_bytes    of a reply's tensors
    max_reply    of a reply on Flower, in times the bytes of the model or, if more, of what clients
                 were sent; 1 MiB beside. Larger ones are not loaded
    max_norm     of a reply's change of the shared model, over all its tensors; inf: any
    min_clients  with fewer usable replies a round is skipped: the server's state stays
    max_gap      skipped, too, where ||T - S^T a|| of those present is larger
    target       T [K] for `max_gap`
    max_skips    so many rounds skipped in a row end the run
    max_weight   of a client, by every weight rule (`fedshift.server.cap`); in a round of C clients
                 no less than 1/C. 1: any

    With "stop", rounds that would be skipped end the run. Raises InputError for values out of
    range, and for max_gap without a target.
    """

    on_bad: OnBad = "stop"
    max_bytes: int = 1 << 31
    max_norm: float = math.inf
    min_clients: int = 1
    max_gap: float = math.inf
    target: tuple[float, ...] = ()
    max_skips: int = 10
    max_weight: float = 1.0
    max_reply: float = 8.0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.on_bad not in get_args(OnBad):
            raise unknown("on_bad", str(self.on_bad), get_args(OnBad))
        if not (self.max_norm > 0 and self.max_gap >= 0):
            raise InputError(
                f"max_norm={self.max_norm}, max_gap={self.max_gap}; allowed: max_norm > 0, "
                "max_gap >= 0"
            )
        for name in ("max_bytes", "min_clients", "max_skips"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.max_reply > 0:
            raise InputError(f"max_reply must be more than 0, got {self.max_reply}")
        check_cap("max_weight", self.max_weight)
        shares = all(0.0 <= t <= 1.0 for t in self.target)
        if self.target and not (shares and abs(sum(self.target) - 1.0) <= 1e-6):
            raise InputError(f"target must be shares from 0 to 1 that sum to 1, got {self.target}")
        if math.isfinite(self.max_gap) and not self.target:
            raise InputError("max_gap needs the target's label shares; give target as well")

    def admit(
        self, blocks: Sequence[Block], asked: Asked, summed: Collection[str] = ()
    ) -> Admitted:
        """Sort replies, in any order, into usable ones and clients that drop out, with reasons.

        A client that answers twice drops out: nothing tells which answer is genuine. A client that
        was not asked is reported, and its reply is not used. summed: parts whose numbers are not
        checked to be finite here, because the caller checks their sum.
        """
        admitted = self._sort(blocks, asked, summed)
        bad = {one.client for one in admitted.bad}
        if any(len(b.clients) > 1 and not bad.isdisjoint(b.clients) for b in blocks):
            # A block is refused as a whole. Take it apart, to find out which client is to blame.
            blocks = [one for block in blocks for one in block.each()]
            admitted = self._sort(blocks, asked, summed)
        return admitted

    def gap(self, table: Params, weights: Tensor) -> float:
        """||T - S^T a|| of clients with these rows of the table, weights [C]; NaN without T."""
        if not self.target or "labels" not in table:
            return math.nan
        rows = table["labels"] / table["n"].clamp(min=1.0)[:, None]
        return float((torch.tensor(self.target, dtype=torch.float64) - weights @ rows).norm())

    def lacking(self, used: int, gap: float) -> str:
        """Why a round with so many usable replies must be skipped; empty if it need not be.

        A gap that cannot be computed (NaN) fails every limit.
        """
        if used < self.min_clients:
            return f"{used} usable replies, fewer than min_clients = {self.min_clients}"
        if math.isfinite(self.max_gap) and not gap <= self.max_gap:
            return f"the gap to the target is {gap:.4g}, above max_gap = {self.max_gap:g}"
        return ""

    def _sort(self, blocks: Sequence[Block], asked: Asked, summed: Collection[str]) -> Admitted:
        """`admit`, where all clients of a block pass or are refused together."""
        bad = dict.fromkeys(asked.clients, "no answer in time")
        kinds: dict[int, Kind] = dict.fromkeys(asked.clients, "timeout")
        due, answered = frozenset(asked.clients), dict[int, Block]()
        for block in blocks:
            if twice := [client for client in block.clients if client in answered]:
                for client in twice:
                    bad |= dict.fromkeys(
                        answered[client].clients, f"client {client} answered twice"
                    )
                    kinds |= dict.fromkeys(answered[client].clients, "reply")
                continue
            bad |= dict.fromkeys(block.clients, self._why_refused(block, asked.t, due))
            kinds |= dict.fromkeys(block.clients, _kind_of(block, asked.t))
            answered |= dict.fromkeys(block.clients, block)
        # One entry per block: its first client stands for all of them.
        usable = [block for client, block in sorted(answered.items()) if client == block.clients[0]]
        usable = [block for block in usable if not bad[block.clients[0]]]
        expected = expected_look(asked.message, usable, asked.parts, asked.fixed) if usable else {}
        for block in usable:
            why = misshapen(block, expected)
            bad |= dict.fromkeys(block.clients, why or self._why_unusable(block, asked, summed))
        good = tuple(block for block in usable if not bad[block.clients[0]])
        # Reasons may quote names that a client chose: `from_elsewhere` makes them safe to print.
        lost = (Dropped(i, from_elsewhere(bad[i]), kinds[i]) for i in sorted(bad) if bad[i])
        return Admitted(good, tuple(lost))

    def _why_refused(self, block: Block, t: int, due: frozenset[int]) -> str:
        """Why a reply is refused before its numbers are looked at; due: the clients asked."""
        client = block.clients[0]
        if not due.issuperset(block.clients):
            return f"client {client} was not asked"
        if block.t != t:
            return f"client {client} answers round {block.t}; this is round {t}"
        if block.odd:
            return f"client {client} {block.odd}"
        size = sum([v.nbytes for tree in block.updates.values() for v in tree.values()])
        if (size := size // len(block.clients)) > self.max_bytes:
            return f"client {client} sent {size} bytes; allowed: {self.max_bytes}"
        if (why := failure(block.updates)) is not None:
            return f"client {client} failed: {why}"
        return ""

    def _why_unusable(self, block: Block, asked: Asked, summed: Collection[str]) -> str:
        """Why the numbers of a reply cannot be used."""
        try:
            check_reply(block, asked.message, summed, asked.infinite)
        except (RuntimeError, TypeError, ValueError) as e:
            # Torch raises these for tensors of types that it cannot sum.
            return str(e)
        if math.isinf(self.max_norm):
            return ""
        changes = {k: block.rows(v) for k, v in block.updates.get("delta", {}).items()}
        for i, client in enumerate(block.clients):
            norm = norm_of({k: rows[i] for k, rows in changes.items()})
            if not norm <= self.max_norm:
                return (
                    f"client {client} sent a change of norm {norm:.4g}, above max_norm = "
                    f"{self.max_norm:g}"
                )
        return ""


def _kind_of(block: Block, t: int) -> Kind:
    """The kind of drop-out, for a client whose reply was refused; t: this round."""
    if block.t != t:
        return "late"
    return "error" if not block.odd and failure(block.updates) is not None else "reply"


def norm_of(change: Params) -> float:
    """The Euclidean norm over all tensors, in float64."""
    real = (torch.view_as_real(v) if v.is_complex() else v for v in change.values())
    return math.sqrt(sum(float(v.double().square().sum()) for v in real))


def first_not_finite(after: Parts, before: Parts) -> str:
    """The name of the server's first tensor that is not finite, and was before; empty if none.

    All of its state is searched, not the model alone: an infinity in the optimiser's moments would
    stop all learning.
    """
    for part, tree in after.items():
        was = before.get(part, {})
        for name, v in tree.items():
            if v is not was.get(name) and not finite(v) and finite(was.get(name, torch.zeros(()))):
                return f"{part}/{name}"
    return ""


def reshaped(after: Parts, before: Parts) -> str:
    """The name of the server's first tensor of another shape or type than before; empty if none.

    Torch broadcasts tensors of unequal shapes in a sum without an error.
    """
    for part, tree in after.items():
        for name, v in tree.items():
            was = before.get(part, {}).get(name, v)
            if v.shape != was.shape or v.dtype != was.dtype:
                return f"{part}/{name}"
    return ""
