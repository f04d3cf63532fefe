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
        self.of, self.tell, self.report_at = of, tell, time.monotonic() + LONG
        self.last_present: frozenset[Hashable] | None = None
        self.has_reported = False

    def see(self, present: Collection[Hashable], missing: Callable[[], Sequence[str]]) -> None:
        """Compare with the clients present before; missing: a function that names the others."""
        now, complete = time.monotonic(), len(present) >= self.of
        if self.last_present is None:
            self.last_present = frozenset(present)
        changed = self.last_present != frozenset(present)
        # Many changes within a second are one report, but the last client is always reported.
        if self.has_reported and changed and not complete and now < self.report_at - LONG + SOON:
            return
        self.last_present = frozenset(present)
        if (changed or (now >= self.report_at and not self.has_reported)) and (
            self.has_reported or not complete
        ):
            self.has_reported, self.report_at = True, now + LONG
            self.tell(waiting_event("are connected", len(present), self.of, missing()))
