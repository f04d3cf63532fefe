"""What `summary.json` says of methods with label sets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

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
    """`summary.json`: clients that hold each label, rounds in which it was absent, both [K].

    mode, tune, tune_over are the method's; None in folders of versions that did not say them.
    """

    holders: tuple[Whole, ...]
    absent_rounds: tuple[Whole, ...]
    rounds: tuple[SetRow, ...]
    mode: str | None = None
    tune: str | None = None
    tune_over: Literal["all", "union"] | None = None

    @property
    def rows_move(self) -> bool | None:
        """Whether the rows of an absent label change in its round; None where nobody knows."""
        if self.mode is None or self.tune is None:
            return None
        return self.mode == "public" or self.tune_over == "all"
