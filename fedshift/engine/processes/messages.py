"""Jobs as they travel to workers, which have the clients' examples already."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fedshift.client.local import Local
from fedshift.client.plans import PlansOfClient, PlansOfGroup
from fedshift.data import ClientData, Surveyed
from fedshift.engine.backends import Job
from fedshift.errors import InputError
from fedshift.tree import Parts, size_in_bytes

Jobs = tuple[Job, ...]
# The fields of a job from this one on are no dictionaries; the first of them is the round.
REST = Job._fields.index("t")


class PackedJobs(NamedTuple):
    """Jobs that differ in nothing but their client; without examples, which every process has.

    names  the parts of their message
    new    those of them that the receiver does not have yet
    plans  as in a job, or (phases, seed), from which the receiver draws them
    rest   a job's other fields
    """

    clients: list[int]
    names: tuple[str, ...]
    new: Parts
    state: Parts
    plans: Any
    rest: tuple[Any, ...]

    def take(self, other: PackedJobs) -> bool:
        """Add jobs that are the same for other clients; False if they are not the same."""
        # Drawn plans are tensors, and differ by client: only those still to be drawn may be equal.
        same = isinstance(self.plans, tuple) and isinstance(other.plans, tuple) and not other.new
        same = same and not any(self.state.values()) and not any(other.state.values())
        same = same and (self.names, self.plans, self.rest, [*self.state]) == (
            other.names, other.plans, other.rest, [*other.state]
        )  # fmt: skip
        if same:
            self.clients.extend(other.clients)
        return same


# Bytes that the answers to one share may take, about.
ROOM = 1 << 28


def cut_jobs(jobs: Jobs, count: int) -> Iterator[Jobs]:
    """Cut jobs into `count` equal shares; into more if a share's answers would exceed `ROOM`."""
    sizes: dict[int, int] = {}  # by identity: most of a message is one object for all clients

    def size(parts: Parts) -> int:
        total = 0
        for tree in filter(None, parts.values()):  # a client without a state has empty parts
            if id(tree) not in sizes:
                sizes[id(tree)] = size_in_bytes({"": tree})
            total += sizes[id(tree)]
        return total

    # An estimate: for each client, about as many bytes come back as were sent.
    sent = max((size(job.message) + size(job.state) for job in jobs), default=1)
    each = max(1, min(-(-len(jobs) // count), ROOM // max(1, sent)))
    return (jobs[i : i + each] for i in range(0, len(jobs), each))


def check_clients(clients: Sequence[ClientData], jobs: Jobs) -> None:
    """InputError if jobs have other examples than those that the workers were forked with."""
    if isinstance(clients, Surveyed):  # made on demand: a comparison would make every client
        return
    for job in jobs:
        if job.client >= len(clients) or not _same(clients[job.client], job.data):
            raise InputError(
                f"client {job.client} has other examples than the one that these workers were made "
                "for; make them with the clients of the federation that runs"
            )


def _same(one: ClientData, other: ClientData) -> bool:
    if one is other:
        return True
    return all(a is b or torch.equal(a, b) for a, b in zip(one, other, strict=True))


def in_words(jobs: Jobs) -> str:
    """The clients of these jobs in words, for an error: the first five."""
    ids = ", ".join([*(str(job.client) for job in jobs[:5]), *(["..."] if len(jobs) > 5 else [])])
    return f"clients {ids}" if len(jobs) > 1 else f"client {ids}"


def with_separate_plans(jobs: Jobs) -> Jobs:
    """The jobs, with plans drawn for these clients alone.

    Plans are drawn for a group of clients at a time; here, others of the group train elsewhere.
    """
    groups = dict[tuple[int, int, int], PlansOfGroup]()
    separate: list[Job] = []
    for job in jobs:
        plans = job.plans
        if isinstance(plans, PlansOfClient):
            old = plans.group
            drawn = _together(groups, (old.phases, old.t, old.seed), job.client, job.data)
            job = job._replace(plans=drawn)
        separate.append(job)
    return tuple(separate)


def _together(
    groups: dict[tuple[int, int, int], PlansOfGroup], how: tuple[Mapping[str, Local], int, int],
    client: int, data: ClientData,
) -> PlansOfClient:  # fmt: skip
    """A client's plans, to be drawn together with those of other clients with the same `how`.

    how: (phases, round, seed). groups: those made so far; the client is added to its group.
    """
    phases, t, seed = how
    shared = groups.get((id(phases), t, seed))
    if shared is None:
        shared = groups[id(phases), t, seed] = PlansOfGroup(phases, t, seed, {})
    shared.clients[client] = data
    return PlansOfClient(shared, client)


def pack(jobs: Jobs, message: Parts) -> list[PackedJobs]:
    """Pack jobs for a pipe, without parts that were already sent with the previous message.

    message: the parts that the receiver has before the first job. Plans that are not drawn yet
    travel as (phases, seed), and are drawn there.
    """
    pack: list[PackedJobs] = []
    for job in jobs:
        new = {k: v for k, v in job.message.items() if message.get(k) is not v}
        plans = job.plans
        how = (plans.group.phases, plans.group.seed) if isinstance(plans, PlansOfClient) else plans
        one = PackedJobs([job.client], (*job.message,), new, job.state, how, job[REST:])
        if not pack or not pack[-1].take(one):
            pack.append(one)
        message = job.message
    return pack


def unpack(pack: Sequence[PackedJobs], message: Parts, clients: Sequence[ClientData]) -> Jobs:
    """The jobs that `pack` packed; message: what the receiver had before the first of them."""
    jobs, groups = [], dict[tuple[int, int, int], PlansOfGroup]()
    for several, names, new, state, how, rest in pack:
        complete = message | new
        message = {name: complete[name] for name in names}
        for client in several:
            data, plans = clients[client], how
            if isinstance(how, tuple):
                plans = _together(groups, (how[0], rest[0], how[1]), client, data)
            # New dictionaries for each client: what one changes must not reach the next.
            kept = {part: dict(tree) for part, tree in state.items()}
            jobs.append(Job(client, dict(message), kept, data, plans, *rest))
    return tuple(jobs)
