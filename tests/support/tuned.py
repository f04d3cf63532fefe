"""A centrally tuned method, clients with few labels each, and the round before tuning."""

from __future__ import annotations

from typing import Any

import torch

from fedshift.algorithms.method import Method
from fedshift.algorithms.tuning import CentralTuning
from fedshift.data import client_data
from fedshift.engine.backends import loop
from fedshift.engine.run import Federation, Round, play_round, start
from fedshift.model import Model
from fedshift.tree import Parts
from support.federations import FEATURES, make_clients, make_federation
from support.normals import drawn


def tuned(inner: Any, **options: Any) -> CentralTuning:
    given = {"steps": 3, "batch": 16, "lr": 0.01} | options
    return CentralTuning(inner, drawn(40, FEATURES, seed=5), **given)


def uneven(model: Model) -> Federation:
    """Clients of 12, 20 and 28 examples with labels 1-2, 1-3 and 2-3; no client has 0 or 4."""
    sets = ([1, 2], [1, 2, 3], [2, 3])
    clients = tuple(
        client_data(c.x, torch.tensor(labels)[torch.arange(len(c.y)) % len(labels)], i)
        for i, (c, labels) in enumerate(zip(make_clients(sizes=(12, 20, 28)), sets, strict=True))
    )
    return make_federation(model, clients)


def first_round(plain: Method, federation: Federation) -> tuple[Round, list[Parts]]:
    """The round without tuning, and the clients' messages in it."""
    replies: list[Parts] = []

    def listening(update: Any, jobs: Any) -> Any:
        for reply in loop(update, jobs):
            replies.append(reply.update)
            yield reply

    server, everyone = start(plain, federation).server, torch.arange(len(federation.clients))
    return play_round(plain, federation, server, {}, everyone, 1, listening), replies
