"""The choices that options offer. Nothing here loads torch, so that --help is fast."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from click import Choice

from fedshift.engine.backend_names import GONE


class Format(StrEnum):
    """How a command prints its result."""

    table = "table"
    json = "json"


class LogFormat(StrEnum):
    """How a long-running process reports what happens."""

    text = "text"
    json = "json"


class Where(StrEnum):
    """Where clients run."""

    in_process = "in-process"
    flower_sim = "flower-sim"


class BackendChoice(Choice[str]):
    """The names of backends. Those of earlier versions pass, too, but are not listed.

    They are refused later, with a message that says what to use instead.
    """

    def convert(self, value: Any, param: Any, ctx: Any) -> str:
        """The name of a backend. Raises a usage error for any other text."""
        return str(value) if value in GONE else super().convert(value, param, ctx)


Out = Annotated[Path | None, typer.Option("--out", help="Folder for the results (new or empty).")]
Resume = Annotated[Path | None, typer.Option("--resume", help="Go on with this interrupted run.")]
FormatOption = Annotated[
    Format, typer.Option("--format", help="Print a table, or one JSON document.")
]
LogOption = Annotated[
    LogFormat, typer.Option("--log-format", help="Tell what happens in text, or in JSON lines.")
]
Overrides = Annotated[
    list[str],
    typer.Option("-c", "--config", metavar="SECTION.KEY=VALUE", help="Set one key of the file."),
]
