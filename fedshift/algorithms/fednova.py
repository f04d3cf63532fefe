"""FedNova: clients that take more local steps do not get more influence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from fedshift.algorithms.base import numbered, rows
from fedshift.algorithms.steps import fold, heard, revealed, update_of
from fedshift.arguments import check_fields
from fedshift.client.gradients import steps_taken
from fedshift.client.local import Local, train_locally
from fedshift.client.objectives import CrossEntropy, Term
from fedshift.data import ClientData, Plan
from fedshift.errors import InputError
from fedshift.model import Model
from fedshift.server.combine import Combine, Mean
from fedshift.server.optimizers import ServerOptimizer, Sgd
from fedshift.tree import Params, Parts, map_


def normaliser(steps: Tensor, momentum: float) -> Tensor:
    """||a||_1 of `steps` local steps: how far unit gradients would carry a client, over eta; [].

    tau for plain SGD; (tau - rho (1 - rho^tau) / (1 - rho)) / (1 - rho) with momentum rho, because
    the gradient of step s is applied 1 + rho + ... + rho^(tau - s) times. Wang et al. 2020,
    Section 4.
    """
    if not momentum:
        return steps
    rest = 1.0 - momentum
    return (steps - momentum * (1.0 - momentum**steps) / rest) / rest


@dataclass(frozen=True)
class FedNova:
    """theta <- server(theta, tau_eff sum_i p_i (theta_i - theta) / ||a_i||_1).

    Wang et al. 2020, arXiv 2007.07481, Section 5, with tau_eff = sum_i p_i ||a_i||_1 over the
    cohort and ||a_i||_1 as in `normaliser`; p [C] are the weights of `combine`, n_i/n by default.
    FedAvg's fixed points are those of sum_i p_i ||a_i||_1 F_i instead of sum_i p_i F_i.

    As in the authors' code, weight decay is a part of the gradient, local momentum starts at zero
    in each round, and the server's momentum (`server`) acts on the combined step. Unlike there, a
    proximal term is a part of the gradient too; their a_i for it mixes with momentum's. Raises
    InputError for several local phases, whose steps differ in learning rate, and for Adam, whose
    steps are no sum of gradients, so that no ||a_i||_1 belongs to them.
    """

    model: Model
    objective: Term = CrossEntropy()
    local: Local = Local()
    combine: Combine = Mean()
    server: ServerOptimizer = Sgd()

    def __post_init__(self) -> None:
        if not isinstance(self.local, Local):
            raise InputError("FedNova counts the steps of one local phase; give one Local")
        check_fields(self)
        if self.local.optimizer != "sgd":
            raise InputError(
                "FedNova divides by how far unit gradients carry a client, which is known for SGD "
                f'and not for {self.local.optimizer}; give Local(optimizer="sgd")'
            )

    def init(self, params: Params, buffers: Params, table: Params) -> Parts:
        return {
            "params": params,
            "buffers": buffers,
            "optimizer": self.server.init(self.model.trainable(params)),
            "table": {k: table[k] for k in ("n", *self.combine.needs)},
        }

    def init_client(self, params: Params, buffers: Params, data: ClientData) -> Parts:
        return self.objective.remember(params, buffers, data)

    def phases(self) -> Mapping[str, Local]:
        return numbered(self.local)

    def weigh(self, server: Parts, ids: Tensor) -> Tensor:
        return self.combine.weigh(rows(server, ids))

    def trains(self, weights: Tensor) -> Tensor:
        return weights > 0

    def broadcast(self, server: Parts, client: int) -> Parts:
        model = {"params": server["params"], "buffers": server["buffers"]}
        return model | self.objective.hear(server)

    def client_update(
        self, message: Parts, state: Parts, data: ClientData, plans: Mapping[str, Plan]
    ) -> tuple[Parts, Parts]:
        start, buffers = message["params"], message["buffers"]
        memory = heard(message, state)
        end, end_buffers, loss = train_locally(
            self.model, self.objective, self.phases(), start, buffers, memory, data, plans
        )
        norm = normaliser(steps_taken(plans["train0"]), self.local.momentum)
        update = update_of(self.model, start, end, end_buffers, loss, data) | {
            "normaliser": {"a": norm}
        }
        return update, self.objective.remember(end, end_buffers, data)

    def server_update(self, server: Parts, updates: Parts, seed: int) -> Parts:
        weights = updates["cohort"]["weight"]
        # The client reports this number; below 0 it would reverse the others' changes.
        norm = updates["normaliser"]["a"].clamp(min=0)
        # A client that took no step has a change of 0; divide it by 1, not by 0.
        scale = (weights @ norm) / norm.where(norm > 0, 1.0)

        def scaled(v: Tensor) -> Tensor:
            return v * scale.to(v.dtype).view(-1, *[1] * (v.dim() - 1))

        delta = self.combine(weights, map_(scaled, updates["delta"]), seed)
        return fold(server, updates, delta, self.server)

    def model_for(self, server: Parts, state: Parts) -> tuple[Params, Params]:
        return server["params"], server["buffers"]

    def reveals(self) -> Mapping[str, str]:
        return revealed(self.combine.needs) | {"normaliser": "how many steps it took, weighted"}

    def trains_router(self) -> bool:
        """Whether the objective does."""
        return self.objective.trains_router()

    def at(self, t: int) -> FedNova:
        return self
