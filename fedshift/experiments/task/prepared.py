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

    `pool` are the training rows that the oracle may draw from: none that is used for validation.
    `announced` is the target that the server gets: T itself unless shift.target_noise is set.
    `server_inputs` [n, ...] are the server's own examples without labels, where it has any;
    `server_examples` its labelled ones ([server] validation). `at_sites`: the rows stay there.
    `looks`: the change of each client's images where it follows the target, None for no change.
    `log_ratios`: log p(x) - log q_i(x) [n_i] of each client's examples where densities are known.
    `gate`: which of the clients' replies are let through. `custom`: what a user adds.
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
        """The task's clients (or others in their place) with the first model and the seeds."""
        chosen = self.task.clients if clients is None else tuple(clients)
        if (importance := self.custom.class_weights) is not None:
            chosen = tuple(c._replace(w=c.w * importance.to(c.w)[c.y]) for c in chosen)
        params, buffers = self.model.init()
        table = register(chosen, len(self.task.classes))
        return Federation(chosen, params, buffers, table, self.seeds, self.gate)


def with_densities(base: Setting, prepared: Prepared) -> Setting:
    """The setting with what methods that fit densities of inputs need to know of the inputs."""
    # At its own site a client sees only its own inputs. If each decided by these which kind of
    # density to fit, the clients could disagree, so there the automatic choice is left out.
    pair = None if prepared.at_sites else two_values(prepared.task.clients)
    return replace(base, two_values=pair, log_ratios=prepared.log_ratios)
