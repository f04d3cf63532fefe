"""Report which clients are missing while a server waits for them to connect."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any

Tell = Callable[[dict[str, Any]], None]
# Seconds until a wait is reported, and at least between two reports of changes.
LONG, SOON = 10.0, 1.0


def waiting_event(what: str, done: int, of: int, missing: Sequence[str]) -> dict[str, Any]:
    """An event: `done` of the `of` clients are ready; missing: names of the others."""
    return {"event": "waiting", "what": what, "done": done, "of": of, "missing": list(missing)}


class Attendance:
    """Report which clients are connected: on each change, and once after `LONG` seconds.

    Nothing is reported if all are connected at the first call of `see`.
    """

    def __init__(self, of: int, tell: Tell) -> None:
        self.of, self.tell, self.due = of, tell, time.monotonic() + LONG
        self.latest: frozenset[Hashable] | None = None
        self.begun = False

    def see(self, present: Collection[Hashable], missing: Callable[[], Sequence[str]]) -> None:
        """Compare with the clients present before; missing: a function that names the others."""
        now, complete = time.monotonic(), len(present) >= self.of
        if self.latest is None:
            self.latest = frozenset(present)
        changed = self.latest != frozenset(present)
        # Many changes within a second are one report, but the last client is always reported.
        if self.begun and changed and not complete and now < self.due - LONG + SOON:
            return
        self.latest = frozenset(present)
        if (changed or (now >= self.due and not self.begun)) and (self.begun or not complete):
            self.begun, self.due = True, now + LONG
            self.tell(waiting_event("are connected", len(present), self.of, missing()))
