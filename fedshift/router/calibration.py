"""How well calibrated a router is, and the choice of the best calibrated fit, from sums.

Clients hold out some examples from a fit. For every candidate each client sends the held-out loss
and calibration gaps, which add up over clients. Shapes: N clients, n examples of one client, C
candidates, G bins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedshift.errors import TrainingError
from fedshift.router.quality import calibration_gaps
from fedshift.router.score import ClientHead
from fedshift.seeds import generator

# None below 1: the network was trained on these examples, on which clients are easier to
# distinguish than on new queries. A router that seems too cautious here is too sure there.
TEMPERATURES = (1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 8.0)
FOLDS = 5
# Folds are held out in turn until this many examples were: more fits would change nothing.
ENOUGH = 2000
# A refit is better only if its loss is lower by this many standard errors. Chance, and examples
# that the network was trained on, flatter refits: by two on 643 patients where they were worse.
CLEARLY = 3.0

Features = Sequence[Tensor]
Fit = Callable[[Features, float], ClientHead]


class HeldOutSums(NamedTuple):
    """A client's one message on its held-out examples: n [], loss [C], gaps [C, G], square [C].

    All float64.
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
    loss_before = loss if before is None else -before.double().log_softmax(1)[:, client]
    # All of a client's examples have the same origin: itself.
    origin = torch.full((logits.shape[1],), client)
    gaps = torch.stack([calibration_gaps(p, origin) for p in logs.exp()])
    square = (loss - loss_before).square().sum(1)
    return HeldOutSums(torch.tensor(float(len(origin))).double(), loss.sum(1), gaps, square)


class HeldOut(NamedTuple):
    """Figures of held-out examples: their number, the mean loss of the origin in nats, and ECE.

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
        before, after = self.before, self.after
        if before is None:
            return True
        gain = before.loss - after.loss
        # The standard error of the mean change, example by example; a difference of two means'
        # errors would be far too large, since both are of the same examples.
        error = math.sqrt(max(after.square - gain**2, 0.0) / after.examples)
        return gain > CLEARLY * error and after.error <= before.error

    def __str__(self) -> str:
        after, before = self.after, self.before
        choice = f"strength {self.strength:g}, temperature {self.temperature:g}"
        figures = f"held-out calibration error {after.error:.3f}, loss {after.loss:.3f} nats"
        if before is None:
            return f"{figures}, {after.examples} examples ({choice})"
        advice = "use this refit" if self.better else "keep the router that it was made from"
        return (
            f"{figures}; before {before.error:.3f} and {before.loss:.3f}, "
            f"{after.examples} examples ({choice}): {advice}"
        )


class Fold(NamedTuple):
    """All clients' examples with one fold held out: features to fit on, and those of the fold.

    before are the old router's logits [n, N] of the held-out examples, if it had any.
    """

    fit: Features
    held_out: Features
    before: Features | None


def split_into_folds(features: Features, before: Features | None, seed: int) -> list[Fold]:
    """The folds that are held out in turn, each about 1/5 of every client's examples h [n, e].

    A client's examples are permuted by a generator of (seed, client). A client with a single
    example keeps it for the fits; the list is empty if no client has more.
    """
    assigned = [_assigned_folds(len(h), seed, i) for i, h in enumerate(features)]
    folds, count = list[Fold](), 0
    for k in range(FOLDS):
        masks = [f == k for f in assigned]
        held_out = [h[rows] for h, rows in zip(features, masks, strict=True)]
        if count < ENOUGH and any(map(len, held_out)):
            count += sum(map(len, held_out))
            fit = [h[~rows] for h, rows in zip(features, masks, strict=True)]
            logits = before and [z[rows] for z, rows in zip(before, masks, strict=True)]
            folds.append(Fold(fit, held_out, logits))
    return folds


def _assigned_folds(n: int, seed: int, client: int) -> Tensor:
    """The fold [n] that each example is held out in; -1 for one that never is."""
    if n < 2:
        return torch.full((n,), -1)
    # A client's folds depend on its own id alone, not on which other clients there are.
    return torch.randperm(n, generator=generator(seed, "calibration", client)) % FOLDS


def before(folds: Sequence[Fold]) -> HeldOut | None:
    """The figures of the router before the refit, on the same held-out examples."""
    sums = [
        held_out_sums(z[None], i) for p in folds for i, z in enumerate(p.before or ()) if len(z)
    ]
    return figures(sums)[0] if sums else None


def tempered(head: ClientHead, sizes: Tensor, temperature: float) -> ClientHead:
    """z -> (z - log n/N) / T + log n/N: log density ratios over T; itself at T = 1."""
    if temperature == 1.0:
        return head
    # The prior is left out of the division: only the evidence of the features is tempered.
    log_shares = _log_shares(sizes)
    return ClientHead((head.gamma - log_shares) / temperature + log_shares, head.xi / temperature)


def figures(sums: Sequence[HeldOutSums]) -> list[HeldOut]:
    """The figures of each candidate over all clients, from their sums."""
    n, loss, gaps, square = (torch.stack(part).sum(0) for part in zip(*sums, strict=True))
    error = gaps.abs().sum(1) / n
    rows = zip((loss / n).tolist(), error.tolist(), (square / n).tolist(), strict=True)
    return [HeldOut(int(n), *row) for row in rows]


class Chosen(NamedTuple):
    """The strength and temperature of least held-out loss, with their figures."""

    strength: float
    temperature: float
    figures: HeldOut


def choose(
    fit: Fit, strengths: Sequence[float], temperatures: Sequence[float], folds: Sequence[Fold]
) -> Chosen:
    """The candidate of least held-out loss, the first of equals.

    fit makes a head of all clients' features and a strength. A strength whose fit does not
    converge is left out; raises its TrainingError if none converges.
    """
    candidates, failed = list[Chosen](), list[TrainingError]()
    for strength in strengths:
        try:
            sums = [
                s for fold in folds for s in _sums_sent(fit(fold.fit, strength), fold, temperatures)
            ]
        except TrainingError as e:
            failed.append(e)
            continue
        pairs = zip(temperatures, figures(sums), strict=True)
        candidates += [Chosen(strength, t, f) for t, f in pairs]
    if not candidates:
        raise failed[-1]
    # NaN compares as neither less nor more: count it as the worst.
    return min(
        candidates, key=lambda c: c.figures.loss if math.isfinite(c.figures.loss) else math.inf
    )


def _sums_sent(
    head: ClientHead, fold: Fold, temperatures: Sequence[float]
) -> Iterator[HeldOutSums]:
    sizes = torch.tensor([float(len(h)) for h in fold.fit]).double()
    heads = [tempered(head, sizes, t) for t in temperatures]
    for i, h in enumerate(fold.held_out):
        if len(h):
            before = None if fold.before is None else fold.before[i]
            yield held_out_sums(torch.stack([f(h) for f in heads]), i, before)


def _log_shares(sizes: Tensor) -> Tensor:
    """log n/N [N]; 0 for clients without examples, whose logits are minus infinity anyway."""
    n = sizes.double()
    return torch.where(n > 0, n / n.sum(), 1.0).log()
