"""Backends: how the clients of one cohort are run. All give the same result."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from fedshift.data import ClientData, Plan
from fedshift.errors import TrainingError
from fedshift.tree import Parts

ClientUpdate = Callable[[Parts, Parts, ClientData, Mapping[str, Plan]], tuple[Parts, Parts]]


class Job(NamedTuple):
    """One client's work in one round."""

    client: int
    message: Parts
    state: Parts
    data: ClientData
    plans: Mapping[str, Plan]


class Reply(NamedTuple):
    """What came of a job: the update that leaves the client and its changed state."""

    client: int
    update: Parts
    changed: Parts


Backend = Callable[[ClientUpdate, Iterable[Job]], Iterator[Reply]]


def loop(update: ClientUpdate, jobs: Iterable[Job]) -> Iterator[Reply]:
    """One client after the other in this process. A failure is raised with the client's id."""
    for job in jobs:
        yield work(update, job)


def work(update: ClientUpdate, job: Job) -> Reply:
    """One client's work. Raises TrainingError, with the client's id, where torch refuses it."""
    try:
        result = update(job.message, job.state, job.data, job.plans)
    except (RuntimeError, ValueError, IndexError) as e:
        raise TrainingError(f"client {job.client} failed: {e}") from e
    return Reply(job.client, *result)
