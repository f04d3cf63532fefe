"""What trains a phase: the loop of `client.local.Local`, or what the job names instead."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from fedshift.client.objectives import Term
from fedshift.client.slopes import Oracle
from fedshift.data import ClientData, Plan
from fedshift.model import Model
from fedshift.sketch import sketched
from fedshift.tree import Params, Parts


@sketched
class Trained(NamedTuple):
    """What a phase leaves: parameters, buffers, and the mean loss over its steps []."""

    params: Params
    buffers: Params
    loss: Tensor


class Trainer(Protocol):
    """Trains a phase as `Local.__call__` does, by other means: the same result but for rounding."""

    def __call__(
        self, phase: Any, model: Model, objective: Term, params: Params, buffers: Params,
        context: Parts, data: ClientData, plan: Plan, *extra: Oracle,
    ) -> Trained: ...  # fmt: skip


_TRAINER: ContextVar[Trainer | None] = ContextVar("trainer", default=None)


@contextmanager
def trained_by(trainer: Trainer | None) -> Iterator[None]:
    """Within the block phases of this thread are trained by `trainer`; None is `Local`'s loop.

    Not an argument: every method would have to pass it on, and none of them needs to know of it.
    """
    token = _TRAINER.set(trainer)
    try:
        yield
    finally:
        _TRAINER.reset(token)


def trainer() -> Trainer | None:
    """What trains phases here; None is `Local`'s loop."""
    return _TRAINER.get()
