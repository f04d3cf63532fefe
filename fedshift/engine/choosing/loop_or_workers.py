"""The backend of runs that name none: `loop`, or `workers` where these prove faster.

Both give the same numbers bit for bit, so that only the time of a run depends on the choice.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from fedshift.engine.backends import Backend, ClientUpdate, Job, Reply, loop
from fedshift.engine.processes.pipe import sendable
from fedshift.errors import InputError, TrainingError

T = TypeVar("T")
# Seconds that all other rounds must take at least for processes to be tried, and of a first call
# that is long enough not to be measured again.
WORTH, LONG = 0.5, 1.0


def forks_safely() -> bool:
    """Whether processes can be forked here that train as this one does.

    Not on a Mac, whose libraries do not survive it; not where torch sees a GPU; not in a daemonic
    process, which may have no children; and not in a thread, whose process has others at work.
    """
    return (
        sys.platform.startswith("linux")
        and "fork" in multiprocessing.get_all_start_methods()
        and not torch.cuda.is_available()
        and not multiprocessing.current_process().daemon
        and threading.current_thread() is threading.main_thread()
    )


@dataclass(eq=False)
class Quicker:
    """A backend that plays the first rounds by the loop, the next by workers, and then by the
    faster of both.

    hire    makes the workers, when they are first needed
    count   how many they are
    rounds  of the whole run

    Workers are not tried where the rounds that are left are short, or the method cannot be sent.
    """

    hire: Callable[[], AbstractContextManager[Backend]]
    count: int
    rounds: int
    # The least seconds for a step by each, and calls so far.
    least: dict[str, float] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    chosen: str | None = None
    _team: Backend | None = None
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack, repr=False)

    def __enter__(self) -> Quicker:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def during(self, rounds: Iterator[T]) -> Iterator[T]:
        """The rounds that this backend trains; workers end with them."""
        with self:
            yield from rounds

    def __call__(self, update: ClientUpdate, jobs: Iterable[Job]) -> Iterator[Reply]:
        """The replies, by whichever is due."""
        name = self.chosen or ("loop" if "workers" not in self.calls else "workers")
        steps, t, began = 0, 0, time.perf_counter()

        def counted() -> Iterator[Job]:
            nonlocal steps, t
            for job in jobs:
                steps, t = steps + sum(plan.steps for plan in job.plans.values()), job.t
                yield job

        team = self._team if name == "workers" else None
        if team is None:
            yield from loop(update, counted())
        elif self.chosen is None:
            yield from self._tried(team, update, list(counted()))
        else:
            yield from team(update, counted())
        if self.chosen is None:
            seconds = time.perf_counter() - began
            self.calls[name] = self.calls.get(name, 0) + 1
            self.least[name] = min(self.least.get(name, seconds), seconds / max(steps, 1))
            self._choose(name, update, seconds, self.rounds - t)

    def _tried(self, team: Backend, update: ClientUpdate, jobs: list[Job]) -> Iterator[Reply]:
        """Train with workers. If one fails (out of memory, say), the loop trains the others."""
        over: set[int] = set()
        try:
            for reply in team(update, jobs):
                over.add(reply.client)
                yield reply
        except (TrainingError, OSError):
            self._leave()
            yield from loop(update, [job for job in jobs if job.client not in over])

    def _leave(self) -> None:
        """The loop plays all that is left."""
        self.chosen = "loop"
        self._stack.close()
        self._team = None

    def _choose(self, name: str, update: ClientUpdate, seconds: float, left: int) -> None:
        """After a round by `name` that took so long, with so many rounds left."""
        if seconds < LONG and self.calls[name] < 2:
            return  # a first call is slow
        if name == "workers":
            self.chosen = min(self.least, key=lambda one: self.least[one])
            if self.chosen == "loop":
                self._leave()
        elif left * seconds * (1 - 1 / self.count) < WORTH or not sendable(update):
            self.chosen = "loop"
        else:
            try:
                self._team = self._stack.enter_context(self.hire())
                self.calls["workers"] = 0
            except (InputError, OSError):  # no process could be forked
                self.chosen = "loop"
