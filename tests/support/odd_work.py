"""Clients whose work is changed, and the jobs of a round, for tests of backends and checks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fedshift.algorithms.method import Method, Wrapper
from fedshift.data import ClientData
from fedshift.engine.backends import Job, Stage
from fedshift.engine.round import open_round
from fedshift.engine.run import Federation, first_state, start
from fedshift.tree import Parts


@dataclass(frozen=True)
class Meddling(Wrapper):
    """A method of one's own that changes what it was given, or what it gives.

    client: whose work is changed; None: everyone's
    """

    before: Any = None
    after: Any = None
    client: int | None = None

    def client_update(self, message: Parts, state: Parts, data: ClientData, plans: Any) -> Any:
        mine = self.client is None or int(data.id) == self.client
        if mine and self.before is not None:
            self.before(message, data)
        done = self.inner.client_update(message, state, data, plans)
        return self.after(done) if mine and self.after is not None else done


def round_of(
    algorithm: Method, federation: Federation, t: int = 1, *, drops: bool = False
) -> tuple[Stage, list[Job]]:
    """What trains round t, and its jobs, as in a first round of all clients."""
    server, clients = start(algorithm, federation).server, federation.clients
    opened = open_round(algorithm, server, torch.arange(len(clients)), t)
    jobs = [
        Job(i, t, opened.message(i), first_state(algorithm, federation, i))
        for i in opened.clients()
    ]
    return Stage(algorithm, t, clients, federation.seeds.batch, drops), jobs


def changed(kind: str, sent: Parts, new_state: Parts) -> tuple[Parts, Parts]:
    """A client's update and state with one thing changed."""
    delta, report = sent["delta"], sent["report"]
    name = next(iter(delta))
    changes: dict[str, Callable[[], Parts]] = {
        "nan": lambda: {"delta": delta | {name: delta[name] * float("nan")}},
        "inf": lambda: {"delta": delta | {name: delta[name] + float("inf")}},
        "large": lambda: {"delta": delta | {name: delta[name] + 1e6}},
        "form": lambda: {"delta": delta | {name: delta[name].flatten()}},
        "type": lambda: {"delta": delta | {name: delta[name].double()}},
        "names": lambda: {"delta": {"other": delta[name]}},
        "another's": lambda: {"report": report | {"id": report["id"] - 1}},
        "more": lambda: {"extra": {"w": torch.zeros(2)}},
        "history": lambda: {"delta": delta | {name: delta[name].clone().requires_grad_()}},
        "kept": dict,
    }
    state = {"kept": {"w": torch.tensor([float("inf")])}} if kind == "kept" else {}
    return sent | changes[kind](), {**new_state, **state}
