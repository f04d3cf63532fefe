"""Functions that get the events of a run while it goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Listener = Callable[[dict[str, Any]], None]


def join_listeners(*listeners: Listener) -> Listener:
    """One listener that passes each event to all of these, in this order."""

    def tell(event: dict[str, Any]) -> None:
        for listen in listeners:
            listen(event)

    return tell


def ignore_event(event: dict[str, Any]) -> None:
    """Do nothing: the listener of runs that report nowhere."""
