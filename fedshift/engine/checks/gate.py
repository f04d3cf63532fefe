"""The gate: limits of what a round lets through, the same on every engine."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from fedshift.arguments import check_fields
from fedshift.errors import InputError, unknown
from fedshift.server.cap import check_cap
from fedshift.tree import Params

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
