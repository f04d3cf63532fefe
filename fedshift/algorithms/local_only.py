"""Every client trains alone: the baseline that a personalised method has to beat."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedshift.algorithms.method import Method, numbered, rows
from fedshift.algorithms.steps import REGISTERED, REVEALED
from fedshift.arguments import check_fields
from fedshift.client.local import Local, train_locally
from fedshift.client.objectives import CrossEntropy, Term
from fedshift.client.origin import check_personal
from fedshift.data import ClientData, Plan
from fedshift.model import Model
from fedshift.server.weights import BySize
from fedshift.tree import Params, Parts


@dataclass(frozen=True)
class LocalOnly(Method):
    """v_i <- local SGD on F_i from v_i, in every round that draws client i; no model is sent.

    All v_i start at the common first model. Velocity is reset in each round, so that any method
    with the same phases takes the same steps. The server has no model, so its "params" are empty,
    and the weights n_i / n only average the reported losses.
    """

    model: Model
    objective: Term = CrossEntropy()
    local: Local | tuple[Local, ...] = Local()

    def __post_init__(self) -> None:
        check_fields(self)
        # A router cannot learn here: a client's model is trained on this client's examples only.
        check_personal(self.objective)

    def init(self, params: Params, buffers: Params, table: Params) -> Parts:
        # Empty parts, because other code looks them up by name.
        return {"params": {}, "buffers": {}, "table": {"n": table["n"]}}

    def init_client(self, params: Params, buffers: Params, data: ClientData) -> Parts:
        personal = {"personal": params, "personal_buffers": buffers}
        return personal | self.objective.remember(params, buffers, data)

    def phases(self) -> Mapping[str, Local]:
        return numbered(self.local, "personal")

    def weigh(self, server: Parts, ids: Tensor) -> Tensor:
        return BySize()(rows(server, ids))

    def trains(self, weights: Tensor) -> Tensor:
        # Weights only average the reported losses; a client of weight 0 must still train its model.
        return torch.ones_like(weights, dtype=torch.bool)

    def broadcast(self, server: Parts, client: int) -> Parts:
        return {}

    def client_update(
        self, message: Parts, state: Parts, data: ClientData, plans: Mapping[str, Plan]
    ) -> tuple[Parts, Parts]:
        personal = state["personal"], state["personal_buffers"]
        end, end_buffers, loss = train_locally(
            self.model, self.objective, self.phases(), *personal, state, data, plans
        )
        trained = {"personal": end, "personal_buffers": end_buffers}
        report = {"report": {"id": data.id, "loss": loss}}
        return report, trained | self.objective.remember(end, end_buffers, data)

    def server_update(self, server: Parts, updates: Parts, seed: int) -> Parts:
        return {}

    def model_for(self, server: Parts, state: Parts) -> tuple[Params, Params]:
        return state["personal"], state["personal_buffers"]

    def reveals(self) -> Mapping[str, str]:
        sent = {k: REVEALED[k] for k in ("report", "evaluation")}
        return sent | {"register": REGISTERED["n"]}

    def moves_server(self) -> bool:
        """False: the server has no model."""
        return False
