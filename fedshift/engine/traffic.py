"""How many bytes are sent to clients and come back, counted on the messages themselves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod
from typing import NamedTuple

from fedshift.engine.backends import Block, ClientUpdate, Job
from fedshift.engine.profile import AGGREGATION, COMPUTE, PLANNING, Clock, Idle
from fedshift.engine.sums.summing import Stream
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

    def listen(self, backend: Stream, update: ClientUpdate, jobs: Iterable[Job]) -> Iterator[Block]:
        """The backend's blocks for a round's jobs, counted on the way.

        Updates that a worker has summed do not travel here, but count as if they had: on a network
        they would.
        """
        self.last = Traffic()
        self.clock.turn(AGGREGATION)
        sent = self.clock.each(PLANNING, map(self._sent, jobs))
        trained = self.clock.each(COMPUTE, backend(update, sent))
        # map() keeps no reply, so that its memory is free while the next client trains.
        return map(self._count_bytes, trained)

    def _sent(self, job: Job) -> Job:
        self.last = self.last._replace(down=self.last.down + size_in_bytes(job.message))
        return job

    def _count_bytes(self, block: Block) -> Block:
        summed = [tree for part, tree in block.look.items() if part not in block.updates]
        leaves = (leaf for tree in summed for leaf in tree.values())
        each = sum(prod(shape) * kind.itemsize for shape, kind in leaves)
        up = size_in_bytes(block.updates) + len(block.clients) * each
        count = self.last.clients + len(block.clients)
        self.last = self.last._replace(clients=count, up=self.last.up + up)
        return block


def metered(
    meter: Meter | None, backend: Stream, update: ClientUpdate, jobs: Iterable[Job]
) -> Iterator[Block]:
    """The backend's blocks for a round's jobs, counted if there is a meter."""
    return backend(update, jobs) if meter is None else meter.listen(backend, update, jobs)
