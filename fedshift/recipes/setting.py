"""What every recipe builds on."""

from __future__ import annotations

from dataclasses import dataclass

from fedshift.client.local import Local
from fedshift.model import Model
from fedshift.server.optimizers import ServerOptimizer, Sgd


@dataclass(frozen=True)
class Setting:
    """The network, the target T [K], local SGD, the server's optimiser, and where the head is.

    head: name prefixes of the parameters that make the classifier; all others are the body.
    """

    model: Model
    target: tuple[float, ...]
    local: Local = Local()
    server: ServerOptimizer = Sgd()
    head: tuple[str, ...] = ("head.",)
