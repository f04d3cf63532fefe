"""FedAvg and all that its fields can say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedshift.algorithms.base import numbered, rows
from fedshift.client.local import Local
from fedshift.client.objectives import CrossEntropy, Term
from fedshift.client.sharing import Share
from fedshift.data import ClientData, Plan
from fedshift.model import Model, split_buffers
from fedshift.server.combine import Combine, Mean, combine_counters
from fedshift.server.optimizers import ServerOptimizer, Sgd
from fedshift.tree import Params, Parts, sub, weighted_sum

REVEALED = {
    "delta": "the change of the shared parameters",
    "buffers": "running statistics of normalisation layers, where the model has them",
    "counters": "how many batches those statistics have seen, where the model has them",
    "report": "the client's id and its mean training loss (for monitoring only)",
}
REGISTERED = {"n": "number of training examples, once", "labels": "examples per label, once"}


@dataclass(frozen=True)
class FedAvg:
    """theta <- server(theta, sum_i a_i (theta_i - theta)), theta_i being client i's local model.

    McMahan et al. 2017, Algorithm 1, with a_i = n_i / n over the cohort by default. Its fields are
    the axes along which most published methods differ from it:

    objective  local loss; `CrossEntropy() + Proximal(mu)` is FedProx
    local      one phase of local SGD, or several in turn
    share      which parameters stay on the client
    combine    how changes are combined, by which weights; `Mean(Pals(T, ess=0.5))` is FedPALS
    server     the server's optimiser

    Floating buffers are combined with the same weights, as values (so that variances stay
    non-negative under the convex weights); counters take the largest value of the clients that
    count. Published codes average counters as floats; we do not.
    """

    model: Model
    objective: Term = CrossEntropy()
    local: Local | tuple[Local, ...] = Local()
    share: Share = Share()
    combine: Combine = Mean()
    server: ServerOptimizer = Sgd()

    def init(self, params: Params, buffers: Params, table: Params) -> Parts:
        self.share.check([*params, *buffers])
        shared = self.share.shared(params)
        return {
            "params": shared,
            "buffers": self.share.shared(buffers),
            "optimizer": self.server.init(shared),
            "table": {k: table[k] for k in ("n", *self.combine.needs)},
        }

    def init_client(self, params: Params, buffers: Params, data: ClientData) -> Parts:
        return {
            "private": self.share.kept(params),
            "private_buffers": self.share.kept(buffers),
            **self.objective.remember(params),
        }

    def phases(self) -> Mapping[str, Local]:
        return numbered(self.local)

    def weigh(self, server: Parts, ids: Tensor) -> Tensor:
        return self.combine.weigh(rows(server, ids))

    def trains(self, weights: Tensor) -> Tensor:
        # A private part must be trained even where the client weighs nothing in the shared one.
        return torch.ones_like(weights, dtype=torch.bool) if self.share.private else weights > 0

    def broadcast(self, server: Parts, client: int) -> Parts:
        return {"params": server["params"], "buffers": server["buffers"]}

    def client_update(
        self, message: Parts, state: Parts, data: ClientData, plans: Mapping[str, Plan]
    ) -> tuple[Parts, Parts]:
        start = message["params"] | state["private"]
        begun = message["buffers"] | state["private_buffers"]
        context = {**state, "anchor": start, "anchor_buffers": begun, "client": {"id": data.id}}
        end, after, losses = start, begun, []
        for name, phase in self.phases().items():
            trained = phase(self.model, self.objective, end, after, context, data, plans[name])
            end, after = trained.params, trained.buffers
            losses.append(trained.loss)
        floats, counters = split_buffers(self.share.shared(after))
        update = {
            "delta": self.share.shared(sub(end, start)),
            "buffers": floats,
            "counters": counters,
            "report": {"id": data.id, "loss": torch.stack(losses).mean()},
        }
        return update, {
            "private": self.share.kept(end),
            "private_buffers": self.share.kept(after),
            **self.objective.remember(end),
        }

    def server_update(self, server: Parts, updates: Parts, seed: int) -> Parts:
        weights = updates["cohort"]["weight"]
        delta = self.combine(weights, updates["delta"], seed)
        params, optimizer = self.server(server["params"], delta, server["optimizer"])
        buffers = weighted_sum(weights, updates["buffers"])
        counters = combine_counters(weights, updates["counters"])
        return {"params": params, "optimizer": optimizer, "buffers": buffers | counters}

    def model_for(self, server: Parts, state: Parts) -> tuple[Params, Params]:
        return server["params"] | state["private"], server["buffers"] | state["private_buffers"]

    def reveals(self) -> Mapping[str, str]:
        held = dict.fromkeys(("n", *self.combine.needs))
        return REVEALED | {"register": "; ".join(REGISTERED[k] for k in held)}

    def at(self, t: int) -> FedAvg:
        return self
