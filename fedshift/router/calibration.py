"""How right a router's probabilities are, and the fit of which they are rightest, from sums.

Clients keep some examples out of a fit. Of these each sends, for every candidate, a loss and the
gaps of calibration, which add. Shapes: N clients, n examples of one client, C candidates, G bins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedshift.errors import TrainingError
from fedshift.router.head import ClientHead
from fedshift.router.quality import calibration_gaps
from fedshift.seeds import generator

# None below 1: the network was trained on these examples, so that clients look further apart on
# them than on new queries, and what seems too cautious here is too sure there.
TEMPERATURES = (1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 8.0)
FOLDS = 5
# Folds are held out in turn until so many examples were: more would cost fits and change nothing.
ENOUGH = 2000
# Standard errors that a refit's loss must be below the loss before it. Chance alone, and examples
# that the network knows, make refits look better: by two on 643 patients where they were worse.
CLEARLY = 3.0

Features = Sequence[Tensor]
Fit = Callable[[Features, float], ClientHead]


class HeldOutSums(NamedTuple):
    """What a client sends of its held-out examples, once: n [], loss [C], gaps [C, G], square [C].

    float64.
    """

    n: Tensor
    loss: Tensor
    gaps: Tensor
    square: Tensor


def held_out_sums(logits: Tensor, client: int, before: Tensor | None = None) -> HeldOutSums:
    """The sums of one client for candidates' logits z [C, n, N] of its held-out examples.

    With l_cb = -log softmax(z_cb)[client], and l_0b the same of the logits `before` [n, N],
    loss_c = sum_b l_cb and square_c = sum_b (l_cb - l_0b)^2; gaps as in `quality.calibration_gaps`.
    """
    logs = logits.double().log_softmax(2)
    loss = -logs[..., client]
    known = loss if before is None else -before.double().log_softmax(1)[:, client]
    origin = torch.full((logits.shape[1],), client)
    gaps = torch.stack([calibration_gaps(p, origin) for p in logs.exp()])
    square = (loss - known).square().sum(1)
    return HeldOutSums(torch.tensor(float(len(origin))).double(), loss.sum(1), gaps, square)


class HeldOut(NamedTuple):
    """Of held-out examples: how many, the mean loss of the origin in nats, and ECE.

    ECE is that of `quality.calibration_error`, over all clients' examples together; square is the
    mean square of an example's change of loss.
    """

    examples: int
    loss: float
    error: float
    square: float = 0.0


@dataclass(frozen=True)
class Calibration:
    """Held-out figures of the router that was refitted, and of the refit that was chosen.

    before is None where the router had no logits for these clients; strength is the refit's penalty
    or loading, temperature what its log density ratios were divided by.
    """

    before: HeldOut | None
    after: HeldOut
    strength: float
    temperature: float

    @property
    def better(self) -> bool:
        """Whether the refit is recommended: clearly less loss, and no larger calibration error.

        Clearly: by more than `CLEARLY` standard errors of the mean change.
        """
        was, now = self.before, self.after
        if was is None:
            return True
        gain = was.loss - now.loss
        spread = math.sqrt(max(now.square - gain**2, 0.0) / now.examples)
        return gain > CLEARLY * spread and now.error <= was.error

    def __str__(self) -> str:
        now, was = self.after, self.before
        chosen = f"strength {self.strength:g}, temperature {self.temperature:g}"
        said = f"held-out calibration error {now.error:.3f}, loss {now.loss:.3f} nats"
        if was is None:
            return f"{said}, {now.examples} examples ({chosen})"
        advice = "use this refit" if self.better else "keep the router that it was made from"
        return (
            f"{said}; before {was.error:.3f} and {was.loss:.3f}, {now.examples} examples "
            f"({chosen}): {advice}"
        )


class Part(NamedTuple):
    """One division of all clients' examples: features to fit on, features held out, and theirs.

    before are the logits [n, N] that the router before the refit gives to those held out, if any.
    """

    fit: Features
    held_out: Features
    before: Features | None


def divided(features: Features, before: Features | None, seed: int) -> list[Part]:
    """The folds that are held out in turn, each about 1/5 of every client's examples h [n, e].

    A client's examples are permuted by a generator of (seed, client). Who has one alone keeps it
    for the fits; empty where that is so of all.
    """
    folds = [_folds(len(h), seed, i) for i, h in enumerate(features)]
    parts, count = list[Part](), 0
    for k in range(FOLDS):
        out = [f == k for f in folds]
        held_out = [h[rows] for h, rows in zip(features, out, strict=True)]
        if count < ENOUGH and any(map(len, held_out)):
            count += sum(map(len, held_out))
            fit = [h[~rows] for h, rows in zip(features, out, strict=True)]
            known = before and [z[rows] for z, rows in zip(before, out, strict=True)]
            parts.append(Part(fit, held_out, known))
    return parts


def _folds(n: int, seed: int, client: int) -> Tensor:
    """The fold [n] that each example is held out in; -1 for one that never is."""
    if n < 2:
        return torch.full((n,), -1)
    return torch.randperm(n, generator=generator(seed, "calibration", client)) % FOLDS


def before(parts: Sequence[Part]) -> HeldOut | None:
    """The figures of the router before the refit, on the same held-out examples."""
    sums = [
        held_out_sums(z[None], i) for p in parts for i, z in enumerate(p.before or ()) if len(z)
    ]
    return figures(sums)[0] if sums else None


def tempered(head: ClientHead, sizes: Tensor, temperature: float) -> ClientHead:
    """z -> (z - log n/N) / T + log n/N: log density ratios over T; itself at T = 1."""
    if temperature == 1.0:
        return head
    own = _log_shares(sizes)
    return ClientHead((head.gamma - own) / temperature + own, head.xi / temperature)


def figures(sums: Sequence[HeldOutSums]) -> list[HeldOut]:
    """What all clients' sums say of each candidate."""
    n, loss, gaps, square = (torch.stack(part).sum(0) for part in zip(*sums, strict=True))
    error = gaps.abs().sum(1) / n
    rows = zip((loss / n).tolist(), error.tolist(), (square / n).tolist(), strict=True)
    return [HeldOut(int(n), *row) for row in rows]


class Chosen(NamedTuple):
    """The strength and temperature of least held-out loss, and what they have."""

    strength: float
    temperature: float
    figures: HeldOut


def choose(
    fit: Fit, strengths: Sequence[float], temperatures: Sequence[float], parts: Sequence[Part]
) -> Chosen:
    """The candidate of least held-out loss, the first of equals.

    fit makes a head of all clients' features and a strength. A strength whose fit does not end is
    left out; raises its TrainingError where that is so of all.
    """
    candidates, failed = list[Chosen](), list[TrainingError]()
    for strength in strengths:
        try:
            sums = [s for part in parts for s in _sent(fit(part.fit, strength), part, temperatures)]
        except TrainingError as e:
            failed.append(e)
            continue
        pairs = zip(temperatures, figures(sums), strict=True)
        candidates += [Chosen(strength, t, f) for t, f in pairs]
    if not candidates:
        raise failed[-1]
    return min(
        candidates, key=lambda c: c.figures.loss if math.isfinite(c.figures.loss) else math.inf
    )


def _sent(head: ClientHead, part: Part, temperatures: Sequence[float]) -> Iterator[HeldOutSums]:
    sizes = torch.tensor([float(len(h)) for h in part.fit]).double()
    heads = [tempered(head, sizes, t) for t in temperatures]
    for i, h in enumerate(part.held_out):
        if len(h):
            known = None if part.before is None else part.before[i]
            yield held_out_sums(torch.stack([one(h) for one in heads]), i, known)


def _log_shares(sizes: Tensor) -> Tensor:
    """log n/N [N]; 0 for clients without examples, whose logits are minus infinity anyway."""
    n = sizes.double()
    return torch.where(n > 0, n / n.sum(), 1.0).log()
