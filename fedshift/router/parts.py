"""Parts of all clients' examples, which a fit reads only through the sums that clients may send.

Shapes: N clients, n examples of one client, e client features, C candidates, G bins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from fedshift.router.moments import Moments, moments
from fedshift.router.quality import calibration_gaps
from fedshift.router.score import ClientHead
from fedshift.seeds import generator

FOLDS = 5
# Folds are held out in turn until this many examples have been; more fits would change little.
ENOUGH = 2000

Features = Sequence[Tensor]
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


class Part(Protocol):
    """A part of all clients' examples, accessible only through what each client may send."""

    @property
    def sizes(self) -> Tensor:
        """How many examples each client has in it, [N] float64."""

    def moments(self) -> Sequence[Moments]:
        """The moments of each client, in the order of ids."""

    def origin_sums(self, head: ClientHead) -> Sequence[OriginSums]:
        """The sums of each client for this head, in the order of ids."""

    def held_out_sums(self, heads: Sequence[ClientHead]) -> Sequence[HeldOutSums]:
        """The sums of each client with examples, for candidate heads.

        Without heads, those of the router before the fit; [] if it has no logits.
        """


class Fold(NamedTuple):
    """All clients' examples in two parts: those to fit on, and those held out."""

    fit: Part
    held_out: Part


class Each(Protocol):
    """How fits for several candidates are done: one by one, or side by side."""

    def __call__(self, work: Callable[[Item], Answer], items: Sequence[Item]) -> list[Answer]:
        """The results of `work` for each item."""


class Clients(Protocol):
    """All clients of a fit."""

    @property
    def whole(self) -> Part:
        """All examples."""

    def fold(self, k: int) -> Fold:
        """All examples, with the k-th of `FOLDS` folds held out (`assigned_folds`)."""

    def each(self, work: Callable[[Item], Answer], items: Sequence[Item]) -> list[Answer]:
        """As `Each`; the messages of all items may be combined."""


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
    """Clients whose examples are in this process; it is both a `Part` and `Clients`.

    features  h [n, e] of each client
    logits    [n, N] of each client, by the router before the fit; or None
    seed      for drawing the folds
    """

    features: Features
    logits: Features | None = None
    seed: int = 0

    @property
    def whole(self) -> Here:
        return self

    @property
    def sizes(self) -> Tensor:
        return torch.tensor([float(len(h)) for h in self.features], dtype=torch.float64)

    def moments(self) -> list[Moments]:
        return [moments(h) for h in self.features]

    def origin_sums(self, head: ClientHead) -> list[OriginSums]:
        return [origin_sums(head, h, i) for i, h in enumerate(self.features)]

    def held_out_sums(self, heads: Sequence[ClientHead]) -> list[HeldOutSums]:
        return list(self._held_out_sums(heads))

    def _held_out_sums(self, heads: Sequence[ClientHead]) -> Iterator[HeldOutSums]:
        for i, h in enumerate(self.features):
            before = None if self.logits is None else self.logits[i]
            if len(h) and heads:
                yield held_out_sums(torch.stack([f(h) for f in heads]), i, before)
            elif len(h) and before is not None:
                yield held_out_sums(before[None], i)

    def fold(self, k: int) -> Fold:
        assigned = [assigned_folds(len(h), self.seed, i) for i, h in enumerate(self.features)]
        # Examples in no fold (-1) are always fitted on.
        return Fold(self._of([f != k for f in assigned]), self._of([f == k for f in assigned]))

    def each(self, work: Callable[[Item], Answer], items: Sequence[Item]) -> list[Answer]:
        return [work(item) for item in items]

    def _of(self, masks: Sequence[Tensor]) -> Here:
        features = [h[rows] for h, rows in zip(self.features, masks, strict=True)]
        logits = self.logits and [z[rows] for z, rows in zip(self.logits, masks, strict=True)]
        return Here(features, logits, self.seed)


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
