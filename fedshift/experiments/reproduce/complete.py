"""What tables read of a complete run's summary.json, checked before they do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, PositiveInt, ValidationError


class _Scores(BaseModel):
    """What was measured at a round that counts."""

    model_config = ConfigDict(strict=True)

    round: PositiveInt
    rounds: PositiveInt = 1
    validation_accuracy: float | None = None
    validation_loss: float | None = None


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
    best: _Scores | None = None
    last: _Scores | None = None
    why: list[str] = []


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
