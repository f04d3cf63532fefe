"""How many bytes go to clients and come back, counted on the messages themselves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, cast

from fedshift.engine.backends import Backend, Block, ClientUpdate, Job, Reply, Summer, loop
from fedshift.engine.profile import AGGREGATION, COMPUTE, PLANNING, Clock, Idle
from fedshift.engine.sums.partial import Books, summing
from fedshift.tree import Parts, size_in_bytes


class Traffic(NamedTuple):
    """Bytes of the tensors of one round: to all of its clients together, and from them."""

    clients: int = 0
    down: int = 0
    up: int = 0

    def each(self) -> tuple[float, float]:
        """(down, up), the mean over the clients; 0 for a round without any."""
        return self.down / max(self.clients, 1), self.up / max(self.clients, 1)


class Meter:
    """A backend that runs clients as `backend` does; `last` is the traffic of the last round.

    clock: told when jobs are made, clients work, and the rest of the round begins.
    """

    def __init__(self, backend: Backend = loop, clock: Clock = Idle()) -> None:
        self.backend, self.clock, self.last = backend, clock, Traffic()

    def __call__(self, update: ClientUpdate, jobs: Iterable[Job]) -> Iterator[Reply]:
        return cast(Iterator[Reply], self._counted(self.backend, update, jobs, {}))

    def summing(self, books: Books) -> Summer:
        """The same where the backend's processes sum updates, which are counted as if they came."""
        backend, elsewhere = summing(self.backend, books), books.fold.elsewhere
        return lambda update, jobs: self._counted(backend, update, jobs, elsewhere)

    def _counted(
        self, backend: Summer, update: ClientUpdate, jobs: Iterable[Job],
        elsewhere: Mapping[int, Parts],
    ) -> Iterator[Reply | Block]:  # fmt: skip
        self.last = Traffic()
        self.clock.turn(AGGREGATION)
        planned = self.clock.each(PLANNING, self._sent(jobs))
        for came in self.clock.each(COMPUTE, backend(update, planned)):
            clients = came.clients if isinstance(came, Block) else (came.client,)
            summed = elsewhere.get(clients[0], {})  # of a block as many bytes for each
            up = size_in_bytes(came[1]) + len(clients) * size_in_bytes(summed)
            count = self.last.clients + len(clients)
            self.last = self.last._replace(clients=count, up=self.last.up + up)
            yield came
            del came  # while the next one is trained

    def _sent(self, jobs: Iterable[Job]) -> Iterator[Job]:
        for job in jobs:
            self.last = self.last._replace(down=self.last.down + size_in_bytes(job.message))
            yield job
