"""Faster ways to train one client, for any backend that takes clients one by one.

Each is a mark on the plans of a job, or on a client's work, which travels with it to other
processes. Without the mark nothing of it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from fedshift.client.winograd import KINDS, Winograd, least
from fedshift.data import ClientData, Plan
from fedshift.engine.backends import FAILED, Backend, ClientUpdate, Job, Reply
from fedshift.engine.inputs import check_backend
from fedshift.errors import UnfitError
from fedshift.tree import Parts


def dense(backend: Backend) -> Backend:
    """Phases are trained by `fedshift.client.dense`; UnfitError for what it cannot train."""
    return _marked(backend, lambda plan: plan._replace(dense=True))


def channels_last(backend: Backend) -> Backend:
    """Batches of images lie in memory as `fedshift.kernels.layout.channels_last` has them."""
    return _marked(backend, lambda plan: plan._replace(channels_last=True))


def winograd(backend: Backend) -> Backend:
    """Convolutions 3 x 3 and 5 x 5 are computed as `fedshift.client.winograd` does."""

    check_backend(backend)

    def marked(update: ClientUpdate, jobs: Iterable[Job]) -> Iterator[Reply]:
        return backend(_ByWinograd(update), jobs)

    return marked


@dataclass(frozen=True)
class _ByWinograd:
    """A client's work. UnfitError where its network has layers, and none of that kind."""

    update: ClientUpdate

    def __call__(
        self, message: Parts, state: Parts, data: ClientData, plans: Mapping[str, Plan]
    ) -> tuple[Parts, Parts]:
        with Winograd() as mode:
            done = self.update(message, state, data, plans)
        if mode.left and not mode.computed and FAILED not in done[0]:
            sizes = " or ".join(
                f"{r} x {r} with {inputs} channels or more in and {outputs} out"
                for r, (inputs, outputs) in ((r, least(r)) for r in KINDS)
            )
            raise UnfitError(
                "winograd is for convolutions of step 1 and certain sizes, and this training has "
                f"none. On this processor they are {sizes}, have the same border all around, and "
                "give images whose height and width are multiples of 4, in float32 or float64. "
                "Use channels-last or loop"
            )
        return done


def _marked(backend: Backend, mark: Callable[[Plan], Plan]) -> Backend:
    check_backend(backend)

    def marked(update: ClientUpdate, jobs: Iterable[Job]) -> Iterator[Reply]:
        return backend(update, (_with(job, mark) for job in jobs))

    return marked


def _with(job: Job, mark: Callable[[Plan], Plan]) -> Job:
    return job._replace(plans={name: mark(plan) for name, plan in job.plans.items()})
