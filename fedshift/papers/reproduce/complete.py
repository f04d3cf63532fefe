"""What tables read of a complete run's summary.json, checked before they do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, PositiveInt, ValidationError, model_validator

# As `fedshift.files.clean` writes it: a finite model's loss may be infinite, and is null for NaN.
Number = float | Literal["inf", "-inf"] | None


class _Scores(BaseModel):
    """What was measured at a round that counts."""

    model_config = ConfigDict(strict=True)

    round: PositiveInt
    rounds: PositiveInt = 1
    validation_accuracy: Number = None
    validation_loss: Number = None


class _Tuned(_Scores):
    """Early stopping and tuning choose by these."""

    validation_accuracy: Number
    validation_loss: Number


class _Summary(BaseModel):
    """What must be there and of which kind; a summary holds more."""

    model_config = ConfigDict(strict=True)

    classes: list[str]
    target: list[float]
    label_counts: list[list[int]]
    ess: float | None = None
    ess_fraction: float | None = None
    hull_distance: float | None = None
    final: _Scores
    best: _Tuned | None = None
    last: _Scores | None = None
    why: list[str] = []

    @model_validator(mode="after")
    def _of_these_classes(self) -> Self:
        rows = {len(self.target), *(len(row) for row in self.label_counts)}
        if rows != {len(self.classes)} or not self.label_counts:
            raise ValueError("target and label_counts are not those of the classes")
        return self


def check_summary(found: Mapping[str, Any]) -> None:
    """Raise ValueError, in one line, for what no complete run writes."""
    try:
        _Summary.model_validate(found)
    except ValidationError as e:
        raise ValueError(first_error(e)) from None


def first_error(error: ValidationError) -> str:
    """The first thing that is wrong, and where."""
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"]))
    return f"{where}: {first['msg']}" if where else str(first["msg"])
