"""Checks of a method and its federation before a run writes or trains anything."""

from __future__ import annotations

import torch

from fedshift.algorithms.method import Method
from fedshift.data import Task
from fedshift.engine.preflight.method import check_company
from fedshift.engine.preflight.network import check_rows
from fedshift.engine.round import open_round
from fedshift.engine.run import Federation, draw_cohort, first_state, start
from fedshift.errors import InputError
from fedshift.experiments.config.schema import Training
from fedshift.experiments.measures.served import whole


def check_first_round(
    algorithm: Method, federation: Federation, training: Training, task: Task
) -> None:
    """Raise InputError for a round 1 that cannot be opened, before anything is written or trained.

    Reasons are a cohort that does not suit the method, weights that do not exist under the cap or
    ESS, and a target that no model could serve.
    """
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
    if len(task.test.x):
        check_rows(algorithm.model, federation, task.test.x, "the target's test examples")
    server = start(algorithm, federation).server
    # Its result is not needed: it raises for weights that do not exist under this cap or ESS.
    open_round(algorithm, server, ids, 1, federation.gate.max_weight)
    if not task.tests and not whole(server, federation):
        raise InputError(
            "this method leaves every client with a model of its own, and there is none for a "
            'target elsewhere. Set shift.target = "clients" (or data.target, for data of your own) '
            "to test on the clients' own data"
        )


def check_own_models(name: str, algorithm: Method, federation: Federation) -> None:
    """Raise InputError for a method whose clients cannot test their own models.

    They cannot where the model that a client serves needs a part of the server's state that is
    sent to no client. Whether it does shows when the model is asked for: the part is missing then.
    """
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
