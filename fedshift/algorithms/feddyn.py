"""FedDyn: a linear and a proximal term move the clients' minima to the global one."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from fedshift.algorithms.fedavg import Extra, FedAvg, Training
from fedshift.arguments import Positive
from fedshift.client.local import Trained
from fedshift.client.objectives import Proximal
from fedshift.client.oracles import Shift
from fedshift.data import ClientData
from fedshift.errors import InputError
from fedshift.server.combine import Mean
from fedshift.server.weights import Uniform
from fedshift.tree import Params, Parts, add, map_, sub, zeros


@dataclass(frozen=True)
class FedDyn(Extra):
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
    follow the paper and serve theta. Raises InputError unless alpha > 0 (alpha -> 0 is not FedAvg)
    and the host has `combine=Mean(Uniform())`.
    """

    alpha: Positive = 0.1

    def check(self, host: FedAvg) -> None:
        if host.combine != Mean(Uniform()) or host.share.private:
            raise InputError(
                "FedDyn's h is a plain mean over all clients, of whole models; give "
                "combine=Mean(Uniform()), and leave share out"
            )

    def server(self, host: FedAvg, params: Params, buffers: Params, state: Parts) -> Parts:
        return {"memory": zeros(host.model.trainable(params))}

    def client(self, host: FedAvg, params: Params, buffers: Params, data: ClientData) -> Parts:
        return {"memory": zeros(host.model.trainable(params))}

    def before(self, host: FedAvg, training: Training) -> Training:
        # A constant shift of the gradient instead of a loss term: -<m_i, y> has gradient -m_i at
        # every y.
        pull = Shift(map_(torch.neg, training.state["memory"]))
        objective = training.objective + Proximal(self.alpha)
        return replace(training, objective=objective, oracles=(*training.oracles, pull))

    def after(self, host: FedAvg, training: Training, end: Trained) -> tuple[Parts, Parts]:
        trainable = host.model.trainable
        moved = sub(trainable(end.params), trainable(training.start[0]))
        return {}, {"memory": add(training.state["memory"], moved, -self.alpha)}

    def fold(
        self, host: FedAvg, server: Parts, updates: Parts, delta: Params
    ) -> tuple[Params, Parts]:
        # `delta` is a mean over the cohort's C, but h needs a division by N.
        share = len(updates["cohort"]["weight"]) / len(server["table"]["n"])
        memory = add(server["memory"], delta, -self.alpha * share)
        # Express the new theta as a change, so that the server's optimiser can be applied.
        return add(delta, memory, -1.0 / self.alpha), {"memory": memory}
