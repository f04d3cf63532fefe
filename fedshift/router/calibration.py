"""How well calibrated a router is, and the choice of the best calibrated fit, from sums.

Clients hold out some examples from a fit. For every candidate each client sends the held-out loss
and calibration gaps, which add up over clients. Shapes: N clients, n examples of one client, C
candidates, G bins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from fedshift.errors import TrainingError
from fedshift.router.parts import Each, Fold, HeldOutSums, Part
from fedshift.router.score import ClientHead

# None below 1: the network was trained on these examples, on which clients are easier to
# distinguish than on new queries. A router that seems too cautious here is too sure there.
TEMPERATURES = (1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 8.0)
# A refit is better only if its loss is lower by this many standard errors. Chance, and examples
# that the network was trained on, flatter refits: by two on 643 patients where they were worse.
CLEARLY = 3.0

Fit = Callable[[Part, float], ClientHead]


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


def before(folds: Sequence[Fold], each: Each) -> HeldOut | None:
    """The figures of the router before the refit, on the same held-out examples."""
    sums = [s for sent in each(lambda fold: fold.held_out.held_out_sums(()), folds) for s in sent]
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
    fit: Fit, strengths: Sequence[float], temperatures: Sequence[float], folds: Sequence[Fold],
    each: Each,
) -> Chosen:  # fmt: skip
    """The candidate of least held-out loss, the first of equals.

    fit makes a head of a part of all clients' examples and a strength. A strength whose fit does
    not converge for some fold is left out; raises its TrainingError if none converges.
    """

    def attempt(candidate: tuple[float, Fold]) -> Sequence[HeldOutSums] | TrainingError:
        strength, fold = candidate
        try:
            head = fit(fold.fit, strength)
        except TrainingError as e:
            return e
        heads = [tempered(head, fold.fit.sizes, t) for t in temperatures]
        return fold.held_out.held_out_sums(heads)

    sent = iter(each(attempt, [(strength, fold) for strength in strengths for fold in folds]))
    candidates, failed = list[Chosen](), list[TrainingError]()
    for strength in strengths:
        of_folds = list(islice(sent, len(folds)))
        errors = [one for one in of_folds if isinstance(one, TrainingError)]
        if errors:
            failed.append(errors[0])
            continue
        sums = [s for one in of_folds if not isinstance(one, TrainingError) for s in one]
        pairs = zip(temperatures, figures(sums), strict=True)
        candidates += [Chosen(strength, t, f) for t, f in pairs]
    if not candidates:
        raise failed[-1]
    # NaN compares as neither less nor more: count it as the worst.
    return min(
        candidates, key=lambda c: c.figures.loss if math.isfinite(c.figures.loss) else math.inf
    )


def _log_shares(sizes: Tensor) -> Tensor:
    """log n/N [N]; 0 for clients without examples, whose logits are minus infinity anyway."""
    n = sizes.double()
    return torch.where(n > 0, n / n.sum(), 1.0).log()
