"""FedAvg and the methods that its fields describe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedshift.algorithms.base import numbered, rows
from fedshift.algorithms.steps import averaged, fold, heard, revealed, update_of
from fedshift.arguments import check_fields
from fedshift.client.local import Local, train_locally
from fedshift.client.objectives import CrossEntropy, Term
from fedshift.client.sharing import Share
from fedshift.data import ClientData, Plan
from fedshift.model import Model
from fedshift.server.combine import Combine, Mean, combined
from fedshift.server.optimizers import ServerOptimizer, Sgd
from fedshift.tree import Params, Parts


@dataclass(frozen=True)
class FedAvg:
    """theta <- server(theta, sum_i a_i (theta_i - theta)), where theta_i is client i's local model.

    McMahan et al. 2017, Algorithm 1, with a_i = n_i / n over the cohort by default. Its fields are
    the axes along which most published methods differ from it:

    objective  local loss; `CrossEntropy() + Proximal(mu)` is FedProx
    local      one phase of local SGD, or several in turn
    share      which parameters stay on the client
    combine    how changes are combined, by which weights; `Mean(Pals(T, ess=0.5))` is FedPALS
    server     the server's optimiser

    >>> import torch
    >>> from fedshift.client.objectives import CrossEntropy, Proximal
    >>> model = fs.Model(torch.nn.Linear(4, 3))
    >>> fedprox = fs.FedAvg(model, CrossEntropy() + Proximal(0.1), fs.Local(lr=0.05, epochs=2))

    Floating buffers are averaged with the same weights, as values, not as changes (so that
    variances stay non-negative). Counters take the largest value among clients of positive weight;
    published codes average them as floats.
    """

    model: Model
    objective: Term = CrossEntropy()
    local: Local | tuple[Local, ...] = Local()
    share: Share = Share()
    combine: Combine = Mean()
    server: ServerOptimizer = Sgd()

    def __post_init__(self) -> None:
        check_fields(self)

    def init(self, params: Params, buffers: Params, table: Params) -> Parts:
        # Check before round 1: a misspelt prefix would silently share everything.
        self.share.check([*params, *buffers])
        shared = self.share.shared(params)
        return {
            "params": shared,
            "buffers": self.share.shared(buffers),
            "optimizer": self.server.init(self.model.trainable(shared)),
            # Only the columns that the weights need: the server stores no more than it uses.
            "table": {k: table[k] for k in ("n", *self.combine.needs)},
        }

    def init_client(self, params: Params, buffers: Params, data: ClientData) -> Parts:
        return {
            "private": self.share.kept(params),
            "private_buffers": self.share.kept(buffers),
            **self.objective.remember(params, buffers, data),
        }

    def phases(self) -> Mapping[str, Local]:
        return numbered(self.local)

    def weigh(self, server: Parts, ids: Tensor) -> Tensor:
        return self.combine.weigh(rows(server, ids))

    def trains(self, weights: Tensor) -> Tensor:
        # A private part must be trained even if the client has weight 0 in the shared part.
        return torch.ones_like(weights, dtype=torch.bool) if self.share.private else weights > 0

    def broadcast(self, server: Parts, client: int) -> Parts:
        model = {"params": server["params"], "buffers": server["buffers"]}
        return model | self.objective.hear(server)

    def client_update(
        self, message: Parts, state: Parts, data: ClientData, plans: Mapping[str, Plan]
    ) -> tuple[Parts, Parts]:
        start = message["params"] | state["private"]
        buffers = message["buffers"] | state["private_buffers"]
        context = heard(message, state)
        end, after, loss = train_locally(
            self.model, self.objective, self.phases(), start, buffers, context, data, plans
        )
        # Only the shared part goes into the update; nothing private may leave the client.
        shared, private = self.share.shared, self.share.kept
        return update_of(self.model, shared(start), shared(end), shared(after), loss, data), {
            "private": private(end),
            "private_buffers": private(after),
            **self.objective.remember(end, after, data),
        }

    def is_elementwise(self) -> bool:
        return True

    def sums(self, server: Parts, cohort: Params) -> Mapping[str, Tensor]:
        """Changes and buffers, unless `combine` needs each client's, as a median does."""
        return averaged(cohort) if isinstance(self.combine, Mean) else {}

    def server_update(self, server: Parts, updates: Parts, seed: int) -> Parts:
        delta = combined(self.combine, updates, seed)
        return fold(server, updates, delta, self.server)

    def model_for(self, server: Parts, state: Parts) -> tuple[Params, Params]:
        return server["params"] | state["private"], server["buffers"] | state["private_buffers"]

    def reveals(self) -> Mapping[str, str]:
        return revealed(self.combine.needs)

    def trains_router(self) -> bool:
        """Whether the objective does."""
        return self.objective.trains_router()

    def at(self, t: int) -> FedAvg:
        return self
