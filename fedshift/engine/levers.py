"""Faster ways to train one client, for any backend that takes clients one by one.

Each is a mark on the plans of a job, which travels with it to other processes. Without the mark
nothing of it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from fedshift.data import Plan
from fedshift.engine.backends import Backend, ClientUpdate, Job, Reply


def dense(backend: Backend) -> Backend:
    """Phases are trained by `fedshift.client.dense`; UnfitError for what it cannot train."""
    return _marked(backend, lambda plan: plan._replace(dense=True))


def channels_last(backend: Backend) -> Backend:
    """Batches of images lie in memory as `fedshift.layout.channels_last` has them."""
    return _marked(backend, lambda plan: plan._replace(channels_last=True))


def _marked(backend: Backend, mark: Callable[[Plan], Plan]) -> Backend:
    def marked(update: ClientUpdate, jobs: Iterable[Job]) -> Iterator[Reply]:
        return backend(update, (_with(job, mark) for job in jobs))

    return marked


def _with(job: Job, mark: Callable[[Plan], Plan]) -> Job:
    return job._replace(plans={name: mark(plan) for name, plan in job.plans.items()})
