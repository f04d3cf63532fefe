"""Checks before a run trains, and who listens to its events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fedshift.algorithms.base import Algorithm
from fedshift.data import Task
from fedshift.engine.preflight.method import check_company
from fedshift.engine.round import open_round
from fedshift.engine.run import Federation, draw_cohort, first_state, start
from fedshift.errors import InputError
from fedshift.experiments.config.schema import Training
from fedshift.experiments.measures.served import whole

Listener = Callable[[dict[str, Any]], None]


def listeners(*all_: Listener) -> Listener:
    """One listener that passes events to all of these."""

    def tell(event: dict[str, Any]) -> None:
        for listen in all_:
            listen(event)

    return tell


def silent(event: dict[str, Any]) -> None:
    """A listener that ignores events."""


def check_first_round(
    algorithm: Algorithm, federation: Federation, training: Training, task: Task
) -> None:
    """Raise errors of the weights before anything is written or trained."""
    size = len(federation.clients) if training.cohort is None else training.cohort
    try:
        ids = draw_cohort(len(federation.clients), size, 1, federation.seeds.cohort)
        check_company(algorithm, len(federation.clients), size)
    except InputError as e:
        raise InputError(f"training.cohort = {size}: {e}") from None
    if training.min_clients > size:
        raise InputError(
            f"training.min_clients = {training.min_clients}, and a round has {size} clients, so "
            f"that all would be skipped; give at most {size}"
        )
    server = start(algorithm, federation).server
    # For its errors: weights that do not exist under this cap or ESS.
    open_round(algorithm, server, ids, 1, federation.gate.max_weight)
    if not task.tests and not whole(server, federation):
        raise InputError(
            "this method leaves every client with a model of its own, and there is none for a "
            'target elsewhere. Set shift.target = "clients" (or data.target, for data of your own) '
            "to test on the clients' own data"
        )


def check_own_models(name: str, algorithm: Algorithm, federation: Federation) -> None:
    """Raise InputError for a method whose clients' models need what only the server has."""
    server, ids = start(algorithm, federation).server, torch.arange(len(federation.clients))
    stage = algorithm.at(1)
    context = server | {"cohort": {"id": ids, "weight": stage.weigh(server, ids)}}
    shared = {part: server.get(part, {}) for part in ("params", "buffers")}
    try:
        stage.model_for(shared | stage.broadcast(context, 0), first_state(algorithm, federation, 0))
    except KeyError as e:
        raise InputError(
            f'method.name = "{name}": the model that a client serves needs {e} of the server, '
            "which clients are not sent; none can test its own. Simulate it "
            "(--engine flower-sim), or take a target of the server's"
        ) from None
