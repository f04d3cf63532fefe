"""diverged.json: how a run's training ended, and what early stopping would have kept of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError, field_validator

from fedshift.experiments.folder.outcome import best_of
from fedshift.files import clean
from fedshift.record.rounds import Metrics
from fedshift.record.summary import Number, first_error


class Diverged(BaseModel):
    """How it ended, the last round evaluated before, and of those rounds the one that counts.

    best           the metrics of the round of lowest validation loss; None where there is none
    hull_distance  of T from what the clients can mix
    """

    model_config = ConfigDict(frozen=True, strict=True)

    error: str
    rounds: NonNegativeInt = 0
    best: dict[str, Number | None] | None = None
    hull_distance: float | None = None

    @field_validator("best")
    @classmethod
    def _has_a_round(cls, best: dict[str, Number | None] | None) -> dict[str, Number | None] | None:
        if best is not None and not best.get("round"):
            raise ValueError("it has no round")
        return best

    @property
    def text(self) -> str:
        """The file."""
        return json.dumps(self.model_dump(), indent=1) + "\n"

    @property
    def summary(self) -> dict[str, Any]:
        """What a table reads of a run."""
        return self.model_dump(include={"best", "hull_distance"})


def diverged(error: str, measured: Sequence[Metrics], hull_distance: float | None) -> Diverged:
    """What is kept of a run that was measured so far and then diverged."""
    best = best_of(measured)
    return Diverged(
        error=error,
        rounds=measured[-1].round if measured else 0,
        best=None if best is None else clean(best.numbers()),
        hull_distance=hull_distance,
    )


def parsed(text: str) -> Diverged:
    """The inverse of `Diverged.text`. Raises ValueError, in one line, for what is no such file."""
    try:
        return Diverged.model_validate_json(text)
    except ValidationError as e:
        raise ValueError(first_error(e)) from None
