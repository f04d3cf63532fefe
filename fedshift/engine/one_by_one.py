"""Backends made of another one, with another way to train each client.

Each sets how a job is to be done (`Job.how`), which travels with the job to other processes. The
backend inside must take clients one by one, as `loop` and workers do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from fedshift.client.local import Local
from fedshift.client.objectives import Term
from fedshift.client.oracles import Oracle
from fedshift.client.trainer import Trained, Trainer, trained_by
from fedshift.data import ClientData, Plan
from fedshift.engine.backend_checks import check_backend, watched
from fedshift.engine.backends import Backend, ClientUpdate, Job, Reply
from fedshift.engine.dense import train as train_dense
from fedshift.model import Model
from fedshift.tree import Params, Parts


def dense(backend: Backend) -> Backend:
    """`backend`, training by `fedshift.engine.dense`; UnfitError for what that cannot train."""
    return _trained_by(train_dense, backend)


def channels_last(backend: Backend) -> Backend:
    """`backend`, with images in memory as `fedshift.kernels.layout.channels_last` lays them out."""
    return _trained_by(with_channels_last, backend)


def _trained_by(how: Trainer, backend: Backend) -> Backend:
    check_backend(backend)
    # A backend of a user's is watched here, since the one that goes round it is the library's.
    # Missing replies are left to the round, which knows whether clients may drop out.
    within = watched(backend, None)

    def trained(update: ClientUpdate, jobs: Iterable[Job]) -> Iterator[Reply]:
        return within(update, (job._replace(how=how) for job in jobs))

    return trained


def with_channels_last(
    phase: Local, model: Model, objective: Term, params: Params, buffers: Params, context: Parts,
    data: ClientData, plan: Plan, *extra: Oracle,
) -> Trained:  # fmt: skip
    """Train a phase as `Local` does, on batches of another memory layout."""
    with trained_by(None):
        model = replace(model, channels_last=True)
        return phase(model, objective, params, buffers, context, data, plan, *extra)
