"""Runs whose rounds draw a cohort each: what `summary.json` and a page say of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

Number = Annotated[int, Field(ge=1)]


@dataclass(frozen=True)
class Cohorts:
    """How many clients a round draws, and over how many rounds the weights are means."""

    clients: Number
    rounds: Number
