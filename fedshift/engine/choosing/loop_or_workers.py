"""The default backend: `loop` at first, then workers on trial, then the faster of the two.

Both give the same numbers, bit for bit, so the choice decides nothing but the time of a run.
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
from fedshift.engine.processes.pipe import can_send
from fedshift.errors import InputError, TrainingError

T = TypeVar("T")
# Workers are tried only if they can save this many seconds in the rounds that are left.
WORTH = 0.5
# A first call that takes more seconds than this is not measured again.
LONG = 1.0


def forks_safely() -> bool:
    """Whether processes can be forked here that then train as this one does.

    Not on a Mac, where system libraries do not survive a fork. Not where torch sees a GPU, whose
    state cannot be forked. Not in a daemonic process, which may have no children. And not outside
    of the main thread: a fork copies one thread alone, and locks that others hold stay locked.
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
    """A backend that trains first rounds by the loop, the next by workers, the rest by the faster.

    hire    makes the workers, when they are first needed
    count   how many workers that are
    rounds  rounds of the whole run
    least   seconds per step of the fastest round so far, by backend
    calls   rounds so far, by backend
    chosen  the backend for all other rounds, once that is decided

    Workers are not tried if the rounds that are left are short, or if the method cannot be sent.
    """

    hire: Callable[[], AbstractContextManager[Backend]]
    count: int
    rounds: int
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
        """The rounds that this backend trains; workers are ended after the last one."""
        with self:
            yield from rounds

    def __call__(self, update: ClientUpdate, jobs: Iterable[Job]) -> Iterator[Reply]:
        """Train a round by the backend whose turn it is, and measure it until one is chosen."""
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
        """Train with workers. If a worker fails (for lack of memory, say), the loop goes on."""
        finished: set[int] = set()
        try:
            for reply in team(update, jobs):
                finished.add(reply.client)
                yield reply
        except (TrainingError, OSError):
            self._leave()
            yield from loop(update, [job for job in jobs if job.client not in finished])

    def _leave(self) -> None:
        """Choose the loop for all other rounds, and end the workers."""
        self.chosen = "loop"
        self._stack.close()
        self._team = None

    def _choose(self, name: str, update: ClientUpdate, seconds: float, left: int) -> None:
        """Choose after a round by `name` that took so many seconds; left: rounds to come."""
        if seconds < LONG and self.calls[name] < 2:
            return  # a first call is slow: measure another one
        if name == "workers":
            self.chosen = min(self.least, key=lambda one: self.least[one])
            if self.chosen == "loop":
                self._leave()
        elif left * seconds * (1 - 1 / self.count) < WORTH or not can_send(update):
            self.chosen = "loop"
        else:
            try:
                self._team = self._stack.enter_context(self.hire())
                self.calls["workers"] = 0
            except (InputError, OSError):  # no process could be forked
                self.chosen = "loop"
