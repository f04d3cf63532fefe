"""Clients that dropped out of a round, in files and in words. Loads little, for the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from fedshift.errors import visible

# The kinds of a `dropped` event, as reports say them.
KINDS = {
    "timeout": "no answer in time",
    "error": "it failed",
    "lost": "not connected",
    "reply": "its answer cannot be used",
    "late": "an answer to another round",
}


class Drop(NamedTuple):
    """A client that dropped out of a round; kind: "" in files of earlier versions."""

    client: int
    kind: str
    reason: str


def drop_text(event: Mapping[str, Any]) -> str:
    """Who drops out of a round, and why, of a `dropped` event; its reason comes from elsewhere."""
    where = f"round {event['round']}: client {event['client']}"
    return visible(f"{where} dropped out ({event['kind']}): {event['reason']}")
