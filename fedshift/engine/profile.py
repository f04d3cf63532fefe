"""Where the time of a run goes; measured only on request (`fedshift run --profile`)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

T = TypeVar("T")

COMPUTE, PLANNING, AGGREGATION = "client compute", "planning", "aggregation"
EVALUATION, CHECKPOINTING, OTHER = "evaluation", "checkpointing", "other"
PHASES = (COMPUTE, PLANNING, AGGREGATION, EVALUATION, CHECKPOINTING, OTHER)


class Clock(Protocol):
    """Measures time by the name of the work. Of nested work, only the innermost is counted."""

    def of(self, name: str) -> AbstractContextManager[None]:
        """Count the block as work of this name."""

    def each(self, name: str, items: Iterable[T]) -> Iterator[T]:
        """The items; making each of them counts as work of this name, using them does not."""

    def turn(self, name: str) -> None:
        """Count the rest of the innermost block as work of this name."""


class Idle:
    """A clock that measures nothing, for runs without a profile."""

    def of(self, name: str) -> AbstractContextManager[None]:
        """Does nothing."""
        return contextlib.nullcontext()

    def each(self, name: str, items: Iterable[T]) -> Iterator[T]:
        """The items as they are."""
        return iter(items)

    def turn(self, name: str) -> None:
        """Does nothing."""


class Stopwatch:
    """Measures seconds by name; every second counts once, for the innermost open block."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._now, self._since = now, now()
        self._open: list[str] = []

    @contextlib.contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Count the block as work of this name."""
        self._count()
        self._open.append(name)
        try:
            yield
        finally:
            self._count()
            self._open.pop()

    def each(self, name: str, items: Iterable[T]) -> Iterator[T]:
        """The items; making each of them counts as work of this name."""
        source = iter(items)
        # Marks the end. Not None, which may be an item.
        nothing = object()
        while True:
            with self.of(name):
                item: Any = next(source, nothing)
            if item is nothing:
                return
            yield item
            del item  # so that its memory is free while the next one is made

    def turn(self, name: str) -> None:
        """Count the rest of the innermost block as work of this name."""
        self._count()
        if self._open:
            self._open[-1] = name

    def profile(self) -> dict[str, dict[str, float]]:
        """Seconds by name, and their shares of the sum; no shares if nothing was measured."""
        total = sum(self.seconds.values())
        shares = {k: v / total for k, v in self.seconds.items()} if total else {}
        return {"seconds": dict(self.seconds), "shares": shares}

    def _count(self) -> None:
        now = self._now()
        if self._open:
            name = self._open[-1]
            self.seconds[name] = self.seconds.get(name, 0.0) + now - self._since
        self._since = now
