"""How well calibrated a router is, and which of several fits to choose, from sums over clients.

Clients hold out some examples from a fit. For every candidate each client sends sums of held-out
losses and calibration gaps, which add up over clients. Shapes: N clients, n examples of one client,
C candidates, G bins.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedshift.router.parts import HeldOutSums
from fedshift.router.score import ClientHead

# None is below 1. The network was trained on these examples, so clients are easier to distinguish
# on them than on new queries: a router that is too cautious here may be overconfident there.
TEMPERATURES = (1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 8.0)
# A refit must reduce the loss by this many standard errors to count as better. Chance, and examples
# that the network was trained on, favour refits: on 643 patients by two, although they were worse.
CLEARLY = 3.0


class HeldOut(NamedTuple):
    """Measures on held-out examples, over all clients together.

    examples  their number
    loss      mean loss for the true client, in nats
    error     ECE, as in `quality.calibration_error`
    square    mean square of the change of an example's loss
    """

    examples: int
    loss: float
    error: float
    square: float = 0.0


@dataclass(frozen=True)
class Calibration:
    """Held-out measures of the router before the refit, and of the refit that was chosen.

    before       None if the router had no logits for these clients
    after        those of the refit
    strength     the refit's penalty or loading
    temperature  by which its log density ratios were divided
    """

    before: HeldOut | None
    after: HeldOut
    strength: float
    temperature: float

    @property
    def better(self) -> bool:
        """Whether the refit is recommended: clearly less loss, and no larger calibration error.

        "Clearly" means by more than `CLEARLY` standard errors of the mean change.
        """
        before, after = self.before, self.after
        if before is None:
            return True
        gain = before.loss - after.loss
        # Take the standard error of the mean change per example. Treating the two means as
        # independent would give far too much, since both are over the same examples.
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


def tempered(head: ClientHead, sizes: Tensor, temperature: float) -> ClientHead:
    """z -> (z - log n/N) / T + log n/N: divides log density ratios by T; the same head at T = 1."""
    if temperature == 1.0:
        return head
    # Do not divide the prior: only the evidence of the features is to be tempered.
    log_shares = _log_shares(sizes)
    return ClientHead((head.gamma - log_shares) / temperature + log_shares, head.xi / temperature)


def figures(sums: Sequence[HeldOutSums]) -> list[HeldOut]:
    """The measures of each candidate over all clients, from their sums."""
    n, loss, gaps, square = (torch.stack(part).sum(0) for part in zip(*sums, strict=True))
    error = gaps.abs().sum(1) / n
    rows = zip((loss / n).tolist(), error.tolist(), (square / n).tolist(), strict=True)
    return [HeldOut(int(n), *row) for row in rows]


def _log_shares(sizes: Tensor) -> Tensor:
    """log n/N [N]; 0 for clients without examples, whose logits are minus infinity anyway."""
    n = sizes.double()
    return torch.where(n > 0, n / n.sum(), 1.0).log()
