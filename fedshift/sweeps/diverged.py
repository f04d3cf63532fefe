"""diverged.json: how training diverged, and which round early stopping would have kept."""

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
    """A run that diverged.

    error          the message of the error
    rounds         the last round that was evaluated before
    best           the metrics of the evaluated round of lowest validation loss, or None
    hull_distance  from T to the nearest mixture of the clients
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
        """The text of the file."""
        return json.dumps(self.model_dump(), indent=1) + "\n"

    @property
    def summary(self) -> dict[str, Any]:
        """The part that a table reads, in the form of a complete run's summary."""
        return self.model_dump(include={"best", "hull_distance"})


def diverged(error: str, measured: Sequence[Metrics], hull_distance: float | None) -> Diverged:
    """The record of a run that diverged after the rounds in `measured`."""
    best = best_of(measured)
    return Diverged(
        error=error,
        rounds=measured[-1].round if measured else 0,
        best=None if best is None else clean(best.numbers()),
        hull_distance=hull_distance,
    )


def parsed(text: str) -> Diverged:
    """The inverse of `Diverged.text`. Raises ValueError, in one line, for any other text."""
    try:
        return Diverged.model_validate_json(text)
    except ValidationError as e:
        raise ValueError(first_error(e)) from None
