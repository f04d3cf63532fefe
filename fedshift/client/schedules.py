"""Learning rates that change from round to round."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fedshift.arguments import Counted, Positive, check_fields
from fedshift.errors import InputError


@dataclass(frozen=True)
class Cosine:
    """eta_t = (lr / 2) (1 + cos(pi (t - 1) / T)) for rounds t = 1, ..., T; for `Local(lr=...)`.

    lr is the rate of round 1. T = `rounds` is the number of rounds of the whole run, fine-tuning
    included. The last rate is small and positive. Loshchilov and Hutter 2017 (SGDR), arXiv
    1608.03983, Equation 5 without restarts, one step per round. Raises InputError unless lr > 0 and
    T >= 1, and for a round outside 1, ..., T.
    """

    lr: Positive
    rounds: Counted

    def __post_init__(self) -> None:
        check_fields(self)

    def __call__(self, t: int) -> float:
        if not 1 <= t <= self.rounds:
            raise InputError(
                f"the cosine schedule has no rate for round {t}: it was made for rounds 1 to "
                f"{self.rounds}; give Cosine(rounds=...) the rounds of the whole run"
            )
        # t - 1, so that round 1 has the full rate and the last round still trains.
        return self.lr / 2 * (1 + math.cos(math.pi * (t - 1) / self.rounds))
