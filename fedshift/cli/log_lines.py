"""Lines of a JSON log, one object each.

Imports only the standard library, because the command line needs it before anything else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any


def log_line(event: str, level: str = "info", *, at: float | None = None, **fields: Any) -> str:
    """One object: `time` (UTC, RFC 3339), `level`, `event`, and the fields.

    at: seconds since 1970; now if left out.
    """
    when = datetime.now(UTC) if at is None else datetime.fromtimestamp(at, UTC)
    stamp = when.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return json.dumps({"time": stamp, "level": level, "event": event, **fields})


def line_of(event: Mapping[str, Any]) -> str:
    """The line of one event of a run (docs/files.md), with the event's time."""
    fields = {k: v for k, v in event.items() if k not in ("event", "time")}
    # Warnings are what an operator should look at: rounds that lack a client or have changed
    # nothing, and clients that are suspected of false claims.
    missing = event["event"] in ("dropped", "unscored", "refused")
    odd = missing or {"skipped", "dropped"} & event.keys()
    level = "warning" if odd or event.get("suspicions") else "info"
    return log_line(event["event"], level, at=event.get("time"), **fields)
