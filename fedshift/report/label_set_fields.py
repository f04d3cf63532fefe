"""What `summary.json` says of methods with label sets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

Whole = Annotated[int, Field(ge=0)]
Loss = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Mass = Annotated[float, Field(ge=0, le=1 + 1e-6, allow_inf_nan=False)]


@dataclass(frozen=True)
class SetRow:
    """One evaluated round: how many labels nobody of the cohort held; tuning before and after."""

    round: Whole
    absent: Whole
    loss_before: Loss | None
    loss_after: Loss | None
    outside_before: Mass | None
    outside_after: Mass | None


@dataclass(frozen=True)
class LabelSets:
    """`summary.json`: clients that hold each label, rounds in which it was absent, both [K]."""

    holders: tuple[Whole, ...]
    absent_rounds: tuple[Whole, ...]
    rounds: tuple[SetRow, ...]
