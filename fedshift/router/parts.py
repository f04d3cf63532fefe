"""The sums that a fit of the client head reads of all clients' examples, wherever these are.

Shapes: N clients, n examples of one client, e client features, C candidates, G bins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from fedshift.router.moments import Moments, moments
from fedshift.router.quality import calibration_gaps
from fedshift.router.score import ClientHead
from fedshift.seeds import generator
from fedshift.server.cap import capped_sizes

FOLDS = 5
# Folds are held out in turn until this many examples have been; more fits would change little.
ENOUGH = 2000

What = Literal["moments", "origin_sums", "held_out_sums"]
Item = TypeVar("Item")
Answer = TypeVar("Answer")


class OriginSums(NamedTuple):
    """What a client sends in one round of the refit: loss [], its gradient gamma [N], xi [N, e]."""

    loss: Tensor
    gamma: Tensor
    xi: Tensor


class HeldOutSums(NamedTuple):
    """A client's one message about its held-out examples: n [], loss [C], gaps [C, G], square [C].

    All float64.
    """

    n: Tensor
    loss: Tensor
    gaps: Tensor
    square: Tensor


class Question(NamedTuple):
    """One question to all clients, about all examples (fold -1) or one of the parts of a fold.

    what   "moments"; "origin_sums" for one head; "held_out_sums" for candidate heads, or without
           heads those of the router before the fit
    """

    what: What
    fold: int = -1
    held_out: bool = False
    heads: tuple[ClientHead, ...] = ()


class Clients(Protocol):
    """All clients of a fit, which answer questions by sums."""

    def ask(self, question: Question) -> Sequence[Any]:
        """`Moments`, `OriginSums` or `HeldOutSums` of each client, in the order of ids.

        Held-out sums are those of the clients that have such examples; [] if none can answer.
        """

    def each(self, work: Callable[[Item], Answer], items: Sequence[Item]) -> list[Answer]:
        """The results of `work` for each item; the messages of all items may be combined."""


@dataclass(frozen=True, eq=False)
class Part:
    """All clients' examples, or one of the two parts of a fold (`assigned_folds`).

    Under a cap each client's sums are multiplied by m_i / n_i, where m are the `capped_sizes` of
    its n: in a fit no client counts for more than this share, whatever size it claims.
    """

    clients: Clients
    cap: float = 1.0
    fold: int = -1
    held_out: bool = False

    def of_fold(self, k: int, *, held_out: bool) -> Part:
        """The examples to fit on, or those held out, of the k-th fold."""
        return Part(self.clients, self.cap, k, held_out)

    @cached_property
    def sizes(self) -> Tensor:
        """How many examples each client has in it, [N] float64."""
        return capped_sizes(self._claimed, self.cap)

    def moments(self) -> list[Moments]:
        """The moments of each client, in the order of ids."""
        return self._scaled(self._ask("moments"), self._claimed)

    def origin_sums(self, head: ClientHead) -> list[OriginSums]:
        """The sums of each client for this head, in the order of ids."""
        return self._scaled(self._ask("origin_sums", head), self._claimed)

    def held_out_sums(self, heads: Sequence[ClientHead]) -> list[HeldOutSums]:
        """The sums of each client with examples, for candidate heads; see `Question`."""
        sent = self._ask("held_out_sums", *heads)
        return self._scaled(sent, torch.stack([one.n for one in sent])) if sent else []

    @cached_property
    def _claimed(self) -> Tensor:
        return torch.stack([one.n for one in self._ask("moments")])

    def _ask(self, what: What, *heads: ClientHead) -> Sequence[Any]:
        return self.clients.ask(Question(what, self.fold, self.held_out, heads))

    def _scaled(self, sent: Sequence[Any], n: Tensor) -> list[Any]:
        if self.cap >= 1.0:
            return list(sent)
        # Clients without examples have sums of 0 anyway.
        factors = torch.where(n > 0, capped_sizes(n, self.cap) / n.clamp(min=1.0), 1.0).tolist()
        return [type(s)(*(by * v for v in s)) for s, by in zip(sent, factors, strict=True)]


def origin_sums(head: ClientHead, features: Tensor, client: int) -> OriginSums:
    """sum_b -log softmax(z(h_b))[client] over a client's features h [n, e], and its gradient."""
    h = features.double()
    logs = head(h).log_softmax(1)
    # The gradient of -log softmax by the logits is the posterior, minus 1 for the true client.
    slope = logs.exp()
    slope[:, client] -= 1.0
    return OriginSums(-logs[:, client].sum(), slope.sum(0), slope.T @ h)


def held_out_sums(logits: Tensor, client: int, before: Tensor | None = None) -> HeldOutSums:
    """The sums of one client for candidates' logits z [C, n, N] of its held-out examples.

    With l_cb = -log softmax(z_cb)[client], and l_0b the same of the logits `before` [n, N],
    loss_c = sum_b l_cb and square_c = sum_b (l_cb - l_0b)^2; gaps as in `quality.calibration_gaps`.
    """
    logs = logits.double().log_softmax(2)
    loss = -logs[..., client]
    loss_before = loss if before is None else -before.double().log_softmax(1)[:, client]
    # All examples of a client have the same true origin.
    origin = torch.full((logits.shape[1],), client)
    gaps = torch.stack([calibration_gaps(p, origin) for p in logs.exp()])
    square = (loss - loss_before).square().sum(1)
    return HeldOutSums(torch.tensor(float(len(origin))).double(), loss.sum(1), gaps, square)


def summed(replies: Iterable[tuple[Tensor, ...]]) -> list[Tensor]:
    """The sums over clients of each entry that they sent."""
    return [torch.stack(part).sum(0) for part in zip(*replies, strict=True)]


@dataclass(frozen=True, eq=False)
class Here:
    """Clients whose examples are in this process.

    features  h [n, e] of each client
    logits    [n, N] of each client, by the router before the fit; or None
    seed      for drawing the folds
    fresh     other examples of these clients, which every fold holds out in place of its own
    """

    features: Sequence[Tensor]
    logits: Sequence[Tensor] | None = None
    seed: int = 0
    fresh: Here | None = None
    _parts: dict[tuple[int, bool], Here] = field(default_factory=dict, init=False, repr=False)

    def ask(self, question: Question) -> list[Any]:
        """As `Clients`."""
        part, heads = self.part(question.fold, held_out=question.held_out), question.heads
        if question.what == "moments":
            return [moments(h) for h in part.features]
        if question.what == "origin_sums":
            return [origin_sums(heads[0], h, i) for i, h in enumerate(part.features)]
        sums = list[HeldOutSums]()
        for i, h in enumerate(part.features):
            before = None if part.logits is None else part.logits[i]
            if len(h) and heads:
                sums.append(held_out_sums(torch.stack([f(h) for f in heads]), i, before))
            elif len(h) and before is not None:
                sums.append(held_out_sums(before[None], i))
        return sums

    def each(self, work: Callable[[Item], Answer], items: Sequence[Item]) -> list[Answer]:
        """As `Clients`, one by one."""
        return [work(item) for item in items]

    def part(self, fold: int, *, held_out: bool) -> Here:
        """The examples that a question is about; examples in no fold are always fitted on."""
        if fold < 0 or self.fresh is not None:
            return self.fresh if self.fresh is not None and held_out else self
        if (fold, held_out) not in self._parts:
            assigned = (assigned_folds(len(h), self.seed, i) for i, h in enumerate(self.features))
            masks = [(f == fold) == held_out for f in assigned]
            features = [h[rows] for h, rows in zip(self.features, masks, strict=True)]
            logits = self.logits and [z[rows] for z, rows in zip(self.logits, masks, strict=True)]
            self._parts[fold, held_out] = Here(features, logits, self.seed)
        return self._parts[fold, held_out]


def assigned_folds(n: int, seed: int, client: int) -> Tensor:
    """The fold [n] in which each example is held out; -1 for never.

    About 1/5 of the examples are in each fold. The single example of a client is never held out.
    """
    if n < 2:
        return torch.full((n,), -1)
    # Keyed by (seed, client), so that a client's folds do not depend on the other clients.
    return torch.randperm(n, generator=generator(seed, "calibration", client)) % FOLDS


def folds_of(sizes: Tensor) -> list[int]:
    """The folds to hold out in turn, for sizes n [N]; [] if no client has two examples."""
    folds, count = list[int](), 0
    for k in range(FOLDS):
        # Compute the number: a client may claim so many examples that a permutation would not fit.
        held_out = sum((int(n) + FOLDS - 1 - k) // FOLDS for n in sizes.tolist() if n >= 2)
        if count < ENOUGH and held_out:
            count += held_out
            folds.append(k)
    return folds
