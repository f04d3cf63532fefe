"""Ditto: a personal model beside the global one, pulled towards it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedshift.algorithms.method import Method, Wrapper, numbered
from fedshift.arguments import NotNegative, check_fields
from fedshift.client.local import Local, context_of, train_phases
from fedshift.client.objectives import CrossEntropy, Proximal, Term
from fedshift.client.origin import check_personal
from fedshift.data import ClientData, Plan
from fedshift.errors import InputError
from fedshift.tree import Params, Parts


@dataclass(frozen=True)
class Ditto(Wrapper):
    """v_i <- v_i - eta (grad F_i(v_i) + lam (v_i - w_t)), beside any method that trains w.

    Li, Hu, Beirami and Smith 2021, "Ditto: fair and robust federated learning through
    personalization", arXiv 2012.04221, Equation 2 and Method 1. w_t is the received model in all
    steps of the round. `inner` reads neither v_i nor lam, so w is trained as it would be alone. A
    client that is not drawn keeps v_i. v_i starts at the common first model and is never sent.

    inner     the method that trains w: FedAvg, or another one whose clients receive a whole model
    lam       strength of the pull, 0 or more; for 0 the term is left out
    personal  the phase of v_i, or several in turn, with batches of its own
    objective F_i in the personal phase

    The pull moves v_i to w_t in one plain step if eta lam = 1, and diverges if eta lam >= 2. In
    rounds in which `inner` does not train w (FedDisk's first ones), v_i does not change. Raises
    InputError for lam < 0, an `inner` that trains no shared model or has private label sets, and
    (before round 1) for one whose clients keep parameters private.
    """

    inner: Method
    lam: NotNegative = 1.0
    personal: Local | tuple[Local, ...] = Local()
    objective: Term = CrossEntropy()

    def __post_init__(self) -> None:
        check_fields(self)
        check_personal(self.objective)
        if not self.inner.moves_server():
            name = type(self.inner).__name__
            raise InputError(
                f"Ditto pulls towards the model that its method trains on the server, and {name} "
                "moves none; put Ditto inside, as FineTune(Ditto(...), ...)"
            )
        rules = self.inner.label_rules()
        if rules is not None and rules["mode"] == "private":
            raise InputError(
                "with private label sets the head's rows travel in an order that a client does not "
                "know, and Ditto would pull to other rows; give LabelSets(Ditto(...))"
            )

    def init(self, params: Params, buffers: Params, table: Params) -> Parts:
        server = self.inner.init(params, buffers, table)
        # Check before any client trains: the pull needs the anchor of every parameter.
        if missing := sorted(params.keys() - server["params"].keys()):
            raise InputError(
                f"Ditto pulls towards a whole model, and clients would not receive {missing[0]} "
                f"({len(missing)} parameters are kept private); share all of them"
            )
        return server

    def init_client(self, params: Params, buffers: Params, data: ClientData) -> Parts:
        personal = {"personal": params, "personal_buffers": buffers}
        return self.inner.init_client(params, buffers, data) | personal

    def phases(self) -> Mapping[str, Local]:
        return {**self.inner.phases(), **self._personal_phases()}

    def trains(self, weights: Tensor) -> Tensor:
        # v_i must be trained even if the client has weight 0 in w.
        return torch.ones_like(weights, dtype=torch.bool)

    def client_update(
        self, message: Parts, state: Parts, data: ClientData, plans: Mapping[str, Plan]
    ) -> tuple[Parts, Parts]:
        # `inner` first, from its own state: the personal model must not influence w.
        update, changed = self.inner.client_update(message, state, data, plans)
        # For lam = 0 leave the term out instead of multiplying by 0: the bits then equal those of
        # local_only.
        objective = self.objective + Proximal(self.lam) if self.lam else self.objective
        # The anchor is w as received, not as trained here: all clients are pulled to the same w_t.
        context = context_of(message["params"], message["buffers"], state, data)
        personal = state["personal"], state["personal_buffers"]
        end, end_buffers, _ = train_phases(
            self.model, objective, self._personal_phases(), *personal, context, data, plans
        )
        return update, {**changed, "personal": end, "personal_buffers": end_buffers}

    def model_for(self, server: Parts, state: Parts) -> tuple[Params, Params]:
        return state["personal"], state["personal_buffers"]

    def _personal_phases(self) -> dict[str, Local]:
        return numbered(self.personal, "personal")
