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

from fedshift.engine.backends import Backend, Job, Reply, Stage, loop
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
    least   seconds per client of the fastest round so far, by backend
    calls   rounds so far, by backend
    chosen  the backend for all other rounds, once that is decided

    Workers are not tried if the rounds that are left are short.
    """

    hire: Callable[[], AbstractContextManager[Backend]]
    count: int
    rounds: int
    least: dict[str, float] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    chosen: str | None = None
    _team: Backend = loop
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack, repr=False)

    def during(self, rounds: Iterator[T]) -> Iterator[T]:
        """The rounds that this backend trains; workers are ended after the last one."""
        with self._stack:
            yield from rounds

    def __call__(self, stage: Stage, jobs: Iterable[Job]) -> Iterator[Reply]:
        """Train a round by the backend whose turn it is, and measure it until one is chosen."""
        name = self.chosen or ("workers" if "workers" in self.calls else "loop")
        if self.chosen is not None:
            yield from (self._team if name == "workers" else loop)(stage, jobs)
            return
        todo, finished, began = list(jobs), set[int](), time.perf_counter()
        try:
            for reply in (self._team if name == "workers" else loop)(stage, todo):
                finished.add(reply.client)
                yield reply
        except (TrainingError, OSError):
            if name == "loop":
                raise
            # A worker failed, for lack of memory, say: the loop goes on.
            self._leave()
            yield from loop(stage, [job for job in todo if job.client not in finished])
            return
        seconds = time.perf_counter() - began
        self.calls[name] = self.calls.get(name, 0) + 1
        each = seconds / max(len(todo), 1)
        self.least[name] = min(self.least.get(name, each), each)
        if seconds < LONG and self.calls[name] < 2:
            return  # a first call is slow: measure another one
        if name == "loop":
            self._hire_if_worth(seconds * (self.rounds - stage.t))
        elif self.least["loop"] <= self.least["workers"]:
            self._leave()
        else:
            self.chosen = "workers"

    def _hire_if_worth(self, seconds: float) -> None:
        """Try workers next, if the loop needs so many seconds for the rounds that are left."""
        self.chosen = "loop"
        if seconds * (1 - 1 / self.count) >= WORTH:
            with contextlib.suppress(InputError, OSError):  # no process could be forked
                self._team = self._stack.enter_context(self.hire())
                self.calls["workers"], self.chosen = 0, None

    def _leave(self) -> None:
        """Choose the loop for all other rounds, and end the workers."""
        self.chosen, self._team = "loop", loop
        self._stack.close()
