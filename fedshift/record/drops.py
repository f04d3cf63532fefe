"""Events of clients that are missing, late or drop out, in words. It loads fast, for terminals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from fedshift.errors import visible

# The beginning of a drop's kind if the client trained, but sent no scores.
UNSCORED = "no scores: "
# The most names of missing clients in one line.
MOST = 10
# The kinds of a `dropped` event, in the words of reports.
KINDS = {
    "timeout": "no answer in time",
    "error": "it failed",
    "lost": "not connected",
    "reply": "its answer cannot be used",
    "late": "an answer to another round",
}


class Drop(NamedTuple):
    """A client that dropped out of a round, or sent no scores; early versions wrote no kind."""

    client: int
    kind: str
    reason: str


def drop_text(event: Mapping[str, Any]) -> str:
    """A `dropped` event in words; its reason may come from another machine, so it is cleaned."""
    where = f"round {event['round']}: {_called(event)}"
    return visible(f"{where} dropped out ({event['kind']}): {event['reason']}")


def news_text(event: Mapping[str, Any]) -> str:
    """An event of clients that are missing or late in words; "" for other events."""
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
    """A client's name if the event has one, as for sites; else its number."""
    return str(event.get("name", f"client {event['client']}"))


def _waiting(event: Mapping[str, Any]) -> str:
    text, missing = f"{event['done']} of {event['of']} clients {event['what']}", event["missing"]
    if not missing:
        return text
    more = f" and {len(missing) - MOST} more" if len(missing) > MOST else ""
    return f"{text}; waiting for {', '.join(missing[:MOST])}{more}"
