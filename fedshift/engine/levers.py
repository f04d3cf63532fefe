"""Faster ways to train one client, for any backend that takes clients one by one.

Each says how a job is to be done (`Job.how`), which travels with it to other processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from fedshift.client.dense import train as train_dense
from fedshift.client.local import Local
from fedshift.client.objectives import Term
from fedshift.client.slopes import Oracle
from fedshift.client.trainer import Trained, Trainer
from fedshift.client.winograd import KINDS, Winograd, least
from fedshift.data import ClientData, Plan, batches
from fedshift.engine.backends import FAILED, Backend, ClientUpdate, Job, Reply
from fedshift.engine.door import check_backend
from fedshift.errors import UnfitError
from fedshift.kernels.layout import channels_last as laid_out
from fedshift.model import Model
from fedshift.tree import Params, Parts


def dense(backend: Backend) -> Backend:
    """Phases are trained by `fedshift.client.dense`; UnfitError for what it cannot train."""
    return _trained_by(train_dense, backend)


def channels_last(backend: Backend) -> Backend:
    """Batches of images lie in memory as `fedshift.kernels.layout.channels_last` has them."""
    return _trained_by(with_channels_last, backend)


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


def _trained_by(how: Trainer, backend: Backend) -> Backend:
    check_backend(backend)

    def trained(update: ClientUpdate, jobs: Iterable[Job]) -> Iterator[Reply]:
        return backend(update, (job._replace(how=how) for job in jobs))

    return trained


def with_channels_last(
    phase: Local, model: Model, objective: Term, params: Params, buffers: Params, context: Parts,
    data: ClientData, plan: Plan, *extra: Oracle,
) -> Trained:  # fmt: skip
    """`Local`'s own loop, over batches of another layout."""
    laid = (batch._replace(x=laid_out(batch.x)) for batch in batches(data, plan))
    return phase.along(laid, model, objective, params, buffers, context, data, plan, *extra)
