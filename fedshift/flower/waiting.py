"""Tell who is missing, while a server waits for clients to connect."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any

Tell = Callable[[dict[str, Any]], None]
# Seconds until a wait is worth a line, and between two lines.
LONG, SOON = 10.0, 1.0


def waiting_event(what: str, done: int, of: int, missing: Sequence[str]) -> dict[str, Any]:
    """So many of the clients have done what the server waits for; missing: names of the others."""
    return {"event": "waiting", "what": what, "done": done, "of": of, "missing": list(missing)}


class Attendance:
    """Who of the clients is connected: a line on each change, and once after `LONG` seconds.

    There is none of clients that are all there at the first look.
    """

    def __init__(self, of: int, tell: Tell) -> None:
        self.of, self.tell, self.due = of, tell, time.monotonic() + LONG
        self.latest: frozenset[Hashable] | None = None
        self.begun = False

    def see(self, present: Collection[Hashable], missing: Callable[[], Sequence[str]]) -> None:
        """A look at who is present; missing: gives the names of the others."""
        now, complete = time.monotonic(), len(present) >= self.of
        if self.latest is None:
            self.latest = frozenset(present)
        changed = self.latest != frozenset(present)
        # Fifty clients that come at once are one line, and the last of them is one more.
        if self.begun and changed and not complete and now < self.due - LONG + SOON:
            return
        self.latest = frozenset(present)
        if (changed or (now >= self.due and not self.begun)) and (self.begun or not complete):
            self.begun, self.due = True, now + LONG
            self.tell(waiting_event("are connected", len(present), self.of, missing()))
