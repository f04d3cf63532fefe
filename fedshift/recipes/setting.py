"""What every recipe builds on."""

from __future__ import annotations

from dataclasses import dataclass

from fedshift.client.local import Local
from fedshift.model import Model
from fedshift.server.optimizers import ServerOptimizer, Sgd


@dataclass(frozen=True)
class Setting:
    """The network, the target T [K], local SGD and the server's optimiser.

    head     name prefixes of the parameters that make the classifier; all others are the body
    rounds   rounds of the whole run, for methods whose last rounds differ
    clients  number of clients N, for methods that tell clients apart
    """

    model: Model
    target: tuple[float, ...]
    local: Local = Local()
    server: ServerOptimizer = Sgd()
    head: tuple[str, ...] = ("head.",)
    rounds: int | None = None
    clients: int | None = None
