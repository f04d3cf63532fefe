"""The same run twice: in this process, and through Flower's messages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from flwr.app import Message

from fedshift.algorithms.method import Method
from fedshift.engine.run import Federation, Round, run
from fedshift.flower import AlgorithmStrategy, LocalGrid, Site, client_app, play
from fedshift.tree import flatten
from support.federations import CLASSES
from support.rounds import everything


def sites(algorithm: Method, federation: Federation) -> Any:
    """The site of each client of a federation."""
    first = (federation.params, federation.buffers)
    return lambda i: Site(algorithm, federation.clients[i], federation.seeds.batch, first=first)


def strategy_of(algorithm: Method, federation: Federation, **given: Any) -> AlgorithmStrategy:
    defaults = {
        "clients": len(federation.clients),
        "classes": CLASSES,
        "seeds": federation.seeds,
        "first": (federation.params, federation.buffers),
        "patience": 0.1,
    }
    return AlgorithmStrategy(algorithm, **(defaults | given))


def on_flower(
    algorithm: Method,
    federation: Federation,
    rounds: int,
    *,
    site: Any = None,
    cohort: int | None = None,
) -> Round:
    """The last round of a run through an in-memory grid, with the clients' states."""
    app = client_app(site or sites(algorithm, federation), open_states=True)
    grid = LocalGrid(app, len(federation.clients))
    strategy = strategy_of(algorithm, federation, cohort=cohort)
    return list(play(strategy, grid, rounds, states=lambda t: t == rounds))[-1]


def in_process(
    algorithm: Method, federation: Federation, rounds: int, cohort: int | None = None
) -> Round:
    return list(run(algorithm, federation, rounds, cohort=cohort))[-1]


class Answering(LocalGrid):
    """A grid on which client 2's answers of one kind are changed; None: it does not answer."""

    def __init__(self, app: Any, clients: int, kind: str, change: Any) -> None:
        super().__init__(app, clients)
        self.kind, self.change = kind, change

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        for reply in super().send_and_receive(messages, timeout=timeout):
            if (reply.metadata.message_type, reply.metadata.src_node_id) == (self.kind, 1014):
                if self.change is None:
                    continue
                self.change(reply.content)
            yield reply


def differing_tensors(a: Round, b: Round) -> list[str]:
    """The names of all tensors in which two rounds differ, in type, shape or any bit."""
    x, y = flatten(everything(a)), flatten(everything(b))
    both = x.keys() & y.keys()
    odd = [k for k in both if x[k].dtype != y[k].dtype or not torch.equal(x[k], y[k])]
    return sorted([*(x.keys() ^ y.keys()), *odd])
