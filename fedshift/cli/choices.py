"""What options choose from. Nothing here waits for torch."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer


class Format(StrEnum):
    """How a command prints its result."""

    table = "table"
    json = "json"


class Where(StrEnum):
    """Where clients run."""

    in_process = "in-process"
    flower_sim = "flower-sim"


FormatOption = Annotated[
    Format, typer.Option("--format", help="Print a table, or one JSON document.")
]
Overrides = Annotated[
    list[str],
    typer.Option("-c", "--config", metavar="SECTION.KEY=VALUE", help="Set one key of the file."),
]
