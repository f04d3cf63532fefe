"""FedDyn: a linear and a proximal term move the clients' minima to the global one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedshift.algorithms.base import rows
from fedshift.algorithms.defaults import SharedModel
from fedshift.algorithms.steps import averaged, fold, heard, revealed, server_state, update_of
from fedshift.arguments import check_fields, check_positive
from fedshift.client.local import Local, train_locally
from fedshift.client.objectives import CrossEntropy, Proximal, Term
from fedshift.client.oracles import Shift
from fedshift.data import ClientData, Plan
from fedshift.model import Model
from fedshift.server.combine import total
from fedshift.server.optimizers import ServerOptimizer, Sgd
from fedshift.server.weights import Uniform
from fedshift.tree import Params, Parts, add, map_, sub, zeros


@dataclass(frozen=True)
class FedDyn(SharedModel):
    """theta_i ~ argmin F_i(y) - <m_i, y> + (alpha/2) ||y - theta||^2, by local SGD from theta.

    Acar et al. 2021, arXiv 2111.04263, Algorithm 1. With P the cohort, C of N clients, and
    memories m_i (client) and h (server) of the parameters' shapes that start at zero,

    client  m_i <- m_i - alpha (theta_i - theta)
    server  h <- h - (alpha/N) sum_{i in P} (theta_i - theta)
            theta <- (1/C) sum_{i in P} theta_i - h / alpha

    so that always h = (1/N) sum_i m_i. If the clients agree, m_i = grad F_i and h = 0: theta then
    minimises (1/N) sum_i F_i, however inexact local training is. This holds for SGD and Adam,
    because both stop where the local objective's gradient is 0. The step to the new theta goes
    through `server`, whose default Sgd(1) is the paper's. The authors' code divides alpha by n_i
    over the mean size, clips gradients at norm 10 and reports the mean of the clients' models; we
    follow the paper and serve theta. Raises InputError unless alpha > 0 (alpha -> 0 is not FedAvg).
    """

    model: Model
    alpha: float = 0.1
    objective: Term = CrossEntropy()
    local: Local | tuple[Local, ...] = Local()
    server: ServerOptimizer = Sgd()

    def __post_init__(self) -> None:
        check_fields(self)
        check_positive("FedDyn alpha", self.alpha)

    def init(self, params: Params, buffers: Params, table: Params) -> Parts:
        state = server_state(self.model, self.server, params, buffers, table)
        return state | {"memory": zeros(self.model.trainable(params))}

    def init_client(self, params: Params, buffers: Params, data: ClientData) -> Parts:
        memory = zeros(self.model.trainable(params))
        return {"memory": memory, **self.objective.remember(params, buffers, data)}

    def weigh(self, server: Parts, ids: Tensor) -> Tensor:
        return Uniform()(rows(server, ids))

    def client_update(
        self, message: Parts, state: Parts, data: ClientData, plans: Mapping[str, Plan]
    ) -> tuple[Parts, Parts]:
        start, buffers = message["params"], message["buffers"]
        objective = self.objective + Proximal(self.alpha)
        # A constant shift of the gradient instead of a loss term: -<m_i, y> has gradient -m_i at
        # every y.
        pull = Shift(map_(torch.neg, state["memory"]))
        memory_terms = heard(message, state)
        end, end_buffers, loss = train_locally(
            self.model, objective, self.phases(), start, buffers, memory_terms, data, plans, pull
        )
        update = update_of(self.model, start, end, end_buffers, loss, data)
        ends, starts = self.model.trainable(end), self.model.trainable(start)
        memory = add(state["memory"], sub(ends, starts), -self.alpha)
        return update, {"memory": memory, **self.objective.remember(end, end_buffers, data)}

    def sums(self, server: Parts, cohort: Params) -> Mapping[str, Tensor]:
        """Changes and buffers."""
        return averaged(cohort)

    def server_update(self, server: Parts, updates: Parts, seed: int) -> Parts:
        weights = updates["cohort"]["weight"]
        mean = total(updates, "delta", weights)
        # `mean` divides by C, but h needs a division by N.
        share = len(weights) / len(server["table"]["n"])
        memory = add(server["memory"], mean, -self.alpha * share)
        # Express the new theta as a change, so that the server's optimiser can be applied.
        step = add(mean, memory, -1.0 / self.alpha)
        return fold(server, updates, step, self.server) | {"memory": memory}

    def reveals(self) -> Mapping[str, str]:
        return revealed(("n",))
