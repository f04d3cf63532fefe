"""Events of clients that are missing, late or drop out, in words. Loads little, for terminals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from fedshift.errors import visible

# How kinds begin of clients that trained, and gave no scores.
UNSCORED = "no scores: "
# Names of missing clients in one line.
MOST = 10
# The kinds of a `dropped` event, as reports say them.
KINDS = {
    "timeout": "no answer in time",
    "error": "it failed",
    "lost": "not connected",
    "reply": "its answer cannot be used",
    "late": "an answer to another round",
}


class Drop(NamedTuple):
    """A client that dropped out of a round, or gave no scores; kind: "" in files of before."""

    client: int
    kind: str
    reason: str


def drop_text(event: Mapping[str, Any]) -> str:
    """Who drops out of a round, and why, of a `dropped` event; its reason comes from elsewhere."""
    where = f"round {event['round']}: {_called(event)}"
    return visible(f"{where} dropped out ({event['kind']}): {event['reason']}")


def news_text(event: Mapping[str, Any]) -> str:
    """What an event tells of clients that are missing or late; "" for events of other things."""
    kind, text = event["event"], ""
    if kind == "dropped":
        text = drop_text(event)
    elif kind == "waiting":
        text = _waiting(event)
    elif kind == "unscored":
        where = f"round {event['round']}: no scores of {_called(event)}"
        text = f"{where} ({event['kind']}): {event['reason']}"
    elif kind == "joined":
        text = f"{_called(event)} has joined, and takes part from round {event['round']}"
    elif kind == "refused":
        text = f"{event['node']} has joined late, and cannot take part: {event['reason']}"
    return visible(text)


def _called(event: Mapping[str, Any]) -> str:
    """A client by its name where the event has one, as of sites, else by its number."""
    return str(event.get("name", f"client {event['client']}"))


def _waiting(event: Mapping[str, Any]) -> str:
    text, missing = f"{event['done']} of {event['of']} clients {event['what']}", event["missing"]
    if not missing:
        return text
    more = f" and {len(missing) - MOST} more" if len(missing) > MOST else ""
    return f"{text}; waiting for {', '.join(missing[:MOST])}{more}"
