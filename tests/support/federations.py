"""Tiny federations and models that the tests share."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedshift.algorithms.method import Method
from fedshift.client.local import plan_all
from fedshift.data import ClientData, Plan, client_data, register
from fedshift.engine.run import Federation
from fedshift.model import Model
from fedshift.seeds import Seeds, generator
from fedshift.tree import Parts

CLASSES, FEATURES = 5, 8
SIZES = (9, 23, 16, 40, 7, 30)
TARGET = (0.4, 0.3, 0.2, 0.1, 0.0)


class Normed(nn.Module):
    """A small network with BatchNorm, for everything that concerns buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, 12), nn.BatchNorm1d(12), nn.ReLU())
        self.head = nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        z = self.body(x)
        return {"features": z, "logits": self.head(z)}


def hears_ctrl_c() -> None:
    """For a new process: Ctrl-C as on a terminal, also where the tests run in the background."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def make_clients(seed: int = 0, sizes: tuple[int, ...] = SIZES) -> tuple[ClientData, ...]:
    """Gaussian classes; client i holds labels i, i+1 and i+2 (mod K)."""
    source = generator(seed, "test clients")
    centres = 2 * torch.randn(CLASSES, FEATURES, generator=source)
    clients = []
    for i, n in enumerate(sizes):
        y = (i + torch.randint(3, (n,), generator=source)) % CLASSES
        x = centres[y] + torch.randn(n, FEATURES, generator=source)
        clients.append(client_data(x, y, i))
    return tuple(clients)


def make_federation(
    model: Model, clients: tuple[ClientData, ...] | None = None, seed: int = 0
) -> Federation:
    """A federation over the clients with the model's first weights."""
    chosen = make_clients() if clients is None else clients
    return Federation(chosen, *model.init(), register(chosen, CLASSES), Seeds.of(seed))


def double(federation: Federation) -> Federation:
    """The federation in float64."""
    clients = tuple(c._replace(x=c.x.double(), w=c.w.double()) for c in federation.clients)
    params = {k: v.double() for k, v in federation.params.items()}
    return Federation(clients, params, federation.buffers, federation.table, federation.seeds)


class Given(NamedTuple):
    """What a client's update is given."""

    client: int
    message: Parts
    state: Parts
    data: ClientData
    plans: Mapping[str, Plan]


def one_job(algorithm: Method, federation: Federation, client: int = 1) -> Given:
    """What `client` is given in round 1."""
    data = federation.clients[client]
    server = algorithm.init(federation.params, federation.buffers, federation.table)
    state = algorithm.init_client(federation.params, federation.buffers, data)
    stage = algorithm.at(1)
    plans = plan_all(stage.phases(), data, 1, 0, client)
    everyone = torch.arange(len(federation.clients))
    cohort = {"id": everyone, "weight": stage.weigh(server, everyone)}
    message = stage.broadcast(server | {"cohort": cohort}, client)
    return Given(client, message, state, data, plans)
