"""What `summary.json` and a page show of runs that draw a cohort in each round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

Number = Annotated[int, Field(ge=1)]


@dataclass(frozen=True)
class Cohorts:
    """The number of clients drawn per round, and of rounds over which weights are averaged."""

    clients: Number
    rounds: Number
