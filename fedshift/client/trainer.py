"""What trains a phase: the loop of `client.local.Local`, or the trainer that the job names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from fedshift.client.objectives import Term
from fedshift.client.oracles import Oracle
from fedshift.data import ClientData, Plan
from fedshift.model import Model
from fedshift.sketch import sketched
from fedshift.tree import Params, Parts


@sketched
class Trained(NamedTuple):
    """The result of a phase: parameters, buffers, and the mean loss [] over its steps."""

    params: Params
    buffers: Params
    loss: Tensor


class Trainer(Protocol):
    """Another way to do what `Local.__call__` does, with the same result but for rounding."""

    def __call__(
        self, phase: Any, model: Model, objective: Term, params: Params, buffers: Params,
        context: Parts, data: ClientData, plan: Plan, *extra: Oracle,
    ) -> Trained: ...  # fmt: skip


_TRAINER: ContextVar[Trainer | None] = ContextVar("trainer", default=None)


@contextmanager
def trained_by(trainer: Trainer | None) -> Iterator[None]:
    """In this block and thread, `trainer` trains all phases; None means `Local`'s own loop.

    A context variable, not an argument: every method would have to pass the argument on, and none
    of them should know about it.
    """
    token = _TRAINER.set(trainer)
    try:
        yield
    finally:
        _TRAINER.reset(token)


def trainer() -> Trainer | None:
    """The trainer in force here; None means `Local`'s own loop."""
    return _TRAINER.get()
