"""The client's own id as a second label: the local half of learning a router."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fedshift.client.objectives import Term, View, batch_mean
from fedshift.errors import InputError
from fedshift.tree import Params, Parts

_UNHEARD = (
    "ClientEntropy learns which client an example comes from, and clients that train a model of "
    "their own are not sent the cohort: put it into the shared model's objective"
)


@dataclass(frozen=True)
class ClientEntropy(Term):
    """-(1/B) sum_b w_b log softmax_S(z_b)[i], z the "client_logits" [B, N], i this client's id.

    S is the cohort of the round: the softmax runs over the clients that take part. This is an exact
    likelihood: given that an example comes from a client in S, the probability of its origin is a
    softmax over S alone. A softmax over all N would only push the absent clients' logits down. Rows
    outside S have gradient 0. If all clients take part, the bits are those of a softmax over all.

    Wang et al. 2026 (FedDRM), arXiv 2509.23049, Section 2.3, where all clients take part; paper and
    authors' code are silent on smaller cohorts. At logits that are all equal the value is log |S|.
    Raises InputError for a model without "client_logits" or with a wrong number of them, and in
    phases that train no shared model.
    """

    def hear(self, server: Parts) -> Parts:
        # Only the server knows the cohort. It sends a mask over all N clients, not a list of ids,
        # so that the message has the same shape in every round.
        present = torch.zeros(len(server["table"]["n"]), dtype=torch.bool)
        present[server["cohort"]["id"]] = True
        return {"cohort": {"present": present}}

    def trains_router(self) -> bool:
        return True

    def __call__(self, view: View) -> Tensor:
        if "cohort" not in view.context:
            raise InputError(_UNHEARD)
        present = view.context["cohort"]["present"]
        logits = client_logits(view.out, len(present))
        # Minus infinity, not a large negative number, makes probability and gradient exactly 0.
        absent = ~present.to(logits.device)
        labels = view.context["client"]["id"].to(logits.device).expand(len(logits))
        loss = F.cross_entropy(logits.masked_fill(absent, -torch.inf), labels, reduction="none")
        return batch_mean(loss, view.batch)


def check_personal(objective: Term) -> None:
    """Raise InputError if an objective for the clients' personal models would train a router."""
    if objective.trains_router():
        raise InputError(_UNHEARD)


def client_logits(out: Params, clients: int) -> Tensor:
    """The router's output [B, N] among a model's outputs. Raises InputError without it."""
    if "client_logits" not in out:
        raise InputError(
            f'routing needs "client_logits", and this model returns {sorted(out)}; let its forward '
            'return {"logits": ..., "client_logits": z}, z with a column per client'
        )
    logits = out["client_logits"]
    if logits.ndim != 2 or logits.shape[1] != clients:
        raise InputError(
            f'the model gives "client_logits" {tuple(logits.shape)} and there are {clients} '
            f"clients; build the network with one column per client, {clients}"
        )
    return logits
