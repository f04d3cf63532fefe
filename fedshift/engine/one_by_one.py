"""Backends made of another one, with another way to train each client's phases.

The backend inside must take clients one by one, as `loop` and workers do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from fedshift.client.local import Local
from fedshift.client.objectives import Term
from fedshift.client.oracles import Oracle
from fedshift.client.trainer import Trained, Trainer, trained_by
from fedshift.data import ClientData, Plan
from fedshift.engine.backends import Backend, Job, Reply, Stage, check_backend
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

    def trained(stage: Stage, jobs: Iterable[Job]) -> Iterator[Reply]:
        return backend(replace(stage, trainer=how), jobs)

    return trained


def with_channels_last(
    phase: Local, model: Model, objective: Term, params: Params, buffers: Params, context: Parts,
    data: ClientData, plan: Plan, *extra: Oracle,
) -> Trained:  # fmt: skip
    """Train a phase as `Local` does, on batches of another memory layout."""
    with trained_by(None):
        model = replace(model, channels_last=True)
        return phase(model, objective, params, buffers, context, data, plan, *extra)
