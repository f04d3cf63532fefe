"""FedALA: clients learn, weight by weight, how much of the global model to start from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedshift.algorithms.base import numbered, rows
from fedshift.algorithms.defaults import SharedModel
from fedshift.algorithms.steps import averaged, fold, heard, revealed, server_state, update_of
from fedshift.arguments import check_fields
from fedshift.client.local import Local, context_of, train_locally
from fedshift.client.mixing import Mix, leading, mixed, top
from fedshift.client.objectives import CrossEntropy, Term
from fedshift.data import ClientData, Plan
from fedshift.model import Model
from fedshift.server.combine import Combine, Mean, combined
from fedshift.server.optimizers import ServerOptimizer, Sgd
from fedshift.tree import Params, Parts


@dataclass(frozen=True)
class FedAla(SharedModel):
    """FedAvg whose clients start from theta^_i = v_i + (theta - v_i) * W_i, W_i in [0, 1] learned.

        client  W_i by `Mix` on CE(theta^_i);  v_i by SGD from theta^_i
        server  theta <- server(theta, sum_i a_i (v_i - theta))

    Zhang et al. 2023, "FedALA: adaptive local aggregation for personalized federated learning",
    AAAI, arXiv 2212.01197, Algorithm 1. v_i [all parameters] and W_i [of the top layers] stay on
    the client; W_i starts at 1. A client serves v_i, its model after its own training. If the
    received model equals v_i in every entry (round 1), W_i does not change. Buffers are the
    received ones; changes by the passes that train W_i are dropped.

    mix   None takes theta^_i = theta: FedAvg with models served before they are averaged
    head  name prefixes of the classifier's parameters: the layer that `mix.layers` counts from

    The first time, the number of epochs for W_i depends on its losses, so `client_update` has a
    Python loop that ends by a tensor's value. No other method has; this one cannot be vectorised
    over clients. Unlike in the authors' code, a client that does not take part does not mix, and
    keeps serving v_i. Raises InputError (before round 1) for more layers than the model has.
    """

    model: Model
    mix: Mix | None = Mix()
    head: tuple[str, ...] = ("head.",)
    objective: Term = CrossEntropy()
    local: Local = Local()
    combine: Combine = Mean()
    server: ServerOptimizer = Sgd()

    def __post_init__(self) -> None:
        check_fields(self)

    def init(self, params: Params, buffers: Params, table: Params) -> Parts:
        self._top()  # raises for more layers than the model has
        return server_state(self.model, self.server, params, buffers, table, self.combine.needs)

    def init_client(self, params: Params, buffers: Params, data: ClientData) -> Parts:
        return {
            "personal": params,
            "personal_buffers": buffers,
            "mixing": {k: torch.ones_like(params[k]) for k in self._top()},
            "history": {"mixed": torch.zeros((), dtype=torch.bool)},
            **self.objective.remember(params, buffers, data),
        }

    def phases(self) -> Mapping[str, Local]:
        train = numbered(self.local)
        return train if self.mix is None else train | {"mix": self._pass()}

    def weigh(self, server: Parts, ids: Tensor) -> Tensor:
        return self.combine.weigh(rows(server, ids))

    def trains(self, weights: Tensor) -> Tensor:
        # v_i must be trained even if the client has weight 0 in theta.
        return torch.ones_like(weights, dtype=torch.bool)

    def client_update(
        self, message: Parts, state: Parts, data: ClientData, plans: Mapping[str, Plan]
    ) -> tuple[Parts, Parts]:
        received, buffers = message["params"], message["buffers"]
        start, learned = self._start(message, state, data, plans)
        memory = heard(message, state)
        end, end_buffers, loss = train_locally(
            self.model, self.objective, numbered(self.local), start, buffers, memory, data, plans
        )
        # The change is from the received model, not from the mixture: the server adds it to that.
        return update_of(self.model, received, end, end_buffers, loss, data), {
            "personal": end,
            "personal_buffers": end_buffers,
            **learned,
            **self.objective.remember(end, end_buffers, data),
        }

    def sums(self, server: Parts, cohort: Params) -> Mapping[str, Tensor]:
        """Changes and buffers, unless `combine` needs each client's."""
        return averaged(cohort) if isinstance(self.combine, Mean) else {}

    def server_update(self, server: Parts, updates: Parts, seed: int) -> Parts:
        delta = combined(self.combine, updates, seed)
        return fold(server, updates, delta, self.server)

    def model_for(self, server: Parts, state: Parts) -> tuple[Params, Params]:
        return state["personal"], state["personal_buffers"]

    def reveals(self) -> Mapping[str, str]:
        return revealed(self.combine.needs)

    def _pass(self) -> Local:
        return replace(self.local, epochs=1, steps=None)

    def _top(self) -> tuple[str, ...]:
        return () if self.mix is None else top(self.model, self.mix.layers, self.head)

    def _start(
        self, message: Parts, state: Parts, data: ClientData, plans: Mapping[str, Plan]
    ) -> tuple[Params, Parts]:
        """theta^_i, the model to train from, and the changed parts of the state."""
        received, buffers, personal = message["params"], message["buffers"], state["personal"]
        # Equal models give W_i no gradient. In round 1 all are equal, and the many epochs of the
        # first fit would be wasted.
        if self.mix is None or all(torch.equal(personal[k], v) for k, v in received.items()):
            return received, {}
        mixing, has_mixed = state["mixing"], bool(state["history"]["mixed"])
        old, new = ({k: model[k] for k in mixing} for model in (personal, received))
        lower = {k: v for k, v in received.items() if k not in mixing}
        context = context_of(received, buffers, heard(message, state), data)
        # The plan is drawn anew each round, so its leading rows are a random part of the data.
        plan = leading(plans["mix"], self.mix.share)
        mixing = self.mix(
            self.model, self.objective, old, new, lower, mixing, buffers, context, data, plan,
            1 if has_mixed else self.mix.cap,
        )  # fmt: skip
        learned = {"mixing": mixing, "history": {"mixed": torch.ones((), dtype=torch.bool)}}
        return received | mixed(old, new, mixing), learned
