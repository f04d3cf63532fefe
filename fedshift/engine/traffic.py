"""How many bytes are sent to clients and come back, counted on the messages themselves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import NamedTuple

from fedshift.engine.backends import Backend, Job, Reply, Stage
from fedshift.engine.profile import AGGREGATION, COMPUTE, PLANNING, Clock, Idle
from fedshift.tree import size_in_bytes


class Traffic(NamedTuple):
    """Bytes of tensors in one round: sent to all of its clients together, and sent by them."""

    clients: int = 0
    down: int = 0
    up: int = 0

    def each(self) -> tuple[float, float]:
        """(down, up) per client, on average; 0 for a round without clients."""
        return self.down / max(self.clients, 1), self.up / max(self.clients, 1)


class Meter:
    """Counts the bytes of a run's messages, and measures its time.

    last    the traffic of the last round
    clock   measures planning (making the jobs), the clients' work, and the rest of the round
    waited  seconds until the clients had joined, before round 1
    """

    def __init__(self, clock: Clock = Idle()) -> None:
        self.clock, self.last, self.waited = clock, Traffic(), 0.0

    def listen(self, backend: Backend, stage: Stage, jobs: Iterable[Job]) -> Iterator[Reply]:
        """The backend's replies to a round's jobs, counted on the way."""
        self.last = Traffic()
        self.clock.turn(AGGREGATION)
        sent = self.clock.each(PLANNING, map(self._sent, jobs))
        # map() keeps no reply, so that its memory is free while the next client trains.
        return map(self._received, self.clock.each(COMPUTE, backend(stage, sent)))

    def _sent(self, job: Job) -> Job:
        self.last = self.last._replace(down=self.last.down + size_in_bytes(job.message))
        return job

    def _received(self, reply: Reply) -> Reply:
        up = self.last.up + size_in_bytes(reply.update)
        self.last = self.last._replace(clients=self.last.clients + 1, up=up)
        return reply


def metered(meter: Meter | None, backend: Backend) -> Backend:
    """The backend, counted if there is a meter."""
    return backend if meter is None else partial(meter.listen, backend)
