"""An experiment that is ready to run: its task, first model, seeds and checksums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedshift.client.importance import two_values
from fedshift.data import ClientData, Examples, Task, register
from fedshift.datasets import Dataset
from fedshift.engine.checks.gate import Gate
from fedshift.engine.run import Federation
from fedshift.experiments.config.custom import Custom
from fedshift.model import Model
from fedshift.recipes import Setting
from fedshift.seeds import Seeds

Indices = NDArray[np.int64]
Look = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Prepared:
    """A task, its first model, where its data came from, and the checksum of the split.

    pool             training rows that the oracle may draw from: none that validate
    announced        the target that the server is given: T, unless shift.target_noise is set
    server_inputs    [n, ...] the server's own examples without labels, if it has any
    looks            how images of the oracle's clients change, None for no change
    gate             which of the clients' replies are let through
    custom           what the user's program adds
    log_ratios       log p(x) - log q_i(x) [n_i] of each client's examples, if densities are known
    server_examples  the server's own labelled examples ([server] validation)
    at_sites         whether the rows stay at the clients' sites
    """

    task: Task
    model: Model
    seeds: Seeds
    data: Dataset
    pool: Indices
    split_sha256: str
    announced: tuple[float, ...]
    server_inputs: Tensor | None = None
    looks: tuple[Look | None, ...] = ()
    gate: Gate = Gate()
    custom: Custom = Custom()
    log_ratios: tuple[Tensor, ...] | None = None
    server_examples: Examples | None = None
    at_sites: bool = False

    def federation(self, clients: Sequence[ClientData] | None = None) -> Federation:
        """The federation of the task's clients (or of others in their place)."""
        chosen = self.task.clients if clients is None else tuple(clients)
        if (importance := self.custom.class_weights) is not None:
            chosen = tuple(c._replace(w=c.w * importance.to(c.w)[c.y]) for c in chosen)
        params, buffers = self.model.init()
        table = register(chosen, len(self.task.classes))
        return Federation(chosen, params, buffers, table, self.seeds, self.gate)


def with_densities(base: Setting, prepared: Prepared) -> Setting:
    """The setting with what methods that fit densities need to know about the inputs."""
    # At a site a client sees only its own inputs. By these, clients could choose different kinds of
    # density, so two-valued inputs are not looked for there.
    pair = None if prepared.at_sites else two_values(prepared.task.clients)
    return replace(base, two_values=pair, log_ratios=prepared.log_ratios)
