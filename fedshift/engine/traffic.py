"""How many bytes go to clients and come back, counted on the messages themselves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

from fedshift.engine.backends import Block, ClientUpdate, Job, Reply, Summer
from fedshift.engine.profile import AGGREGATION, COMPUTE, PLANNING, Clock, Idle
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
    """Listens to a run's messages: `last` is the traffic of its last round.

    clock: measures planning (making the jobs), the clients' work, and the rest of the round.
    """

    def __init__(self, clock: Clock = Idle()) -> None:
        self.clock, self.last = clock, Traffic()

    def listen(
        self, backend: Summer, update: ClientUpdate, jobs: Iterable[Job],
        elsewhere: Mapping[int, Parts],
    ) -> Iterator[Reply | Block]:  # fmt: skip
        """The backend's answers to a round's jobs, counted on the way.

        elsewhere: by client, the form of the parts that are summed where they were trained. They do
        not travel, but count as if they did: traffic does not depend on the backend.
        """
        self.last = Traffic()
        self.clock.turn(AGGREGATION)
        sent = self.clock.each(PLANNING, map(self._sent, jobs))
        trained = self.clock.each(COMPUTE, backend(update, sent))
        # map() keeps no reply, so that its memory is free while the next client trains.
        return map(partial(self._received, elsewhere), trained)

    def _sent(self, job: Job) -> Job:
        self.last = self.last._replace(down=self.last.down + size_in_bytes(job.message))
        return job

    def _received(self, elsewhere: Mapping[int, Parts], answer: Reply | Block) -> Reply | Block:
        clients = answer.clients if isinstance(answer, Block) else (answer.client,)
        summed = elsewhere.get(clients[0], {})  # the same form for each client of a block
        up = size_in_bytes(answer[1]) + len(clients) * size_in_bytes(summed)
        count = self.last.clients + len(clients)
        self.last = self.last._replace(clients=count, up=self.last.up + up)
        return answer


def metered(
    meter: Meter | None, backend: Summer, update: ClientUpdate, jobs: Iterable[Job],
    elsewhere: Mapping[int, Parts] = {},
) -> Iterator[Reply | Block]:  # fmt: skip
    """The backend's answers to a round's jobs; a meter listens, if there is one."""
    if meter is None:
        return backend(update, jobs)
    return meter.listen(backend, update, jobs, elsewhere)
