"""How many bytes go to clients and come back, counted on the messages themselves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod
from typing import NamedTuple

from fedshift.engine.backends import Block, ClientUpdate, Job
from fedshift.engine.profile import AGGREGATION, COMPUTE, PLANNING, Clock, Idle
from fedshift.engine.sums.summing import Stream
from fedshift.tree import size_in_bytes


class Traffic(NamedTuple):
    """Bytes of the tensors of one round: to all of its clients together, and from them."""

    clients: int = 0
    down: int = 0
    up: int = 0

    def each(self) -> tuple[float, float]:
        """(down, up), the mean over the clients; 0 for a round without any."""
        return self.down / max(self.clients, 1), self.up / max(self.clients, 1)


class Meter:
    """Listens to a run's messages: `last` is the traffic of its last round.

    waited: seconds that clients took to come, before the rounds. clock: measures planning (making
    the jobs), the clients' work, and the rest of the round.
    """

    def __init__(self, clock: Clock = Idle()) -> None:
        self.clock, self.last, self.waited = clock, Traffic(), 0.0

    def listen(self, backend: Stream, update: ClientUpdate, jobs: Iterable[Job]) -> Iterator[Block]:
        """What the backend makes of a round's jobs, counted on the way.

        What was summed where it was trained, and does not travel, counts as if it had.
        """
        self.last = Traffic()
        self.clock.turn(AGGREGATION)
        sent = self.clock.each(PLANNING, map(self._sent, jobs))
        trained = self.clock.each(COMPUTE, backend(update, sent))
        # map() keeps no reply, so that its memory is free while the next client trains.
        return map(self._came, trained)

    def _sent(self, job: Job) -> Job:
        self.last = self.last._replace(down=self.last.down + size_in_bytes(job.message))
        return job

    def _came(self, came: Block) -> Block:
        summed = [tree for part, tree in came.look.items() if part not in came.updates]
        leaves = (leaf for tree in summed for leaf in tree.values())
        each = sum(prod(shape) * kind.itemsize for shape, kind in leaves)
        up = size_in_bytes(came.updates) + len(came.clients) * each
        count = self.last.clients + len(came.clients)
        self.last = self.last._replace(clients=count, up=self.last.up + up)
        return came


def metered(
    meter: Meter | None, backend: Stream, update: ClientUpdate, jobs: Iterable[Job]
) -> Iterator[Block]:
    """What the backend makes of a round's jobs; a meter listens, if there is one."""
    return backend(update, jobs) if meter is None else meter.listen(backend, update, jobs)
