"""FedPAC: features aligned to the cohort's class means, heads combined for each client."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedshift.algorithms.base import numbered, rows
from fedshift.algorithms.defaults import SharedModel
from fedshift.algorithms.steps import averaged, fold, heard, revealed, server_state, update_of
from fedshift.arguments import check_fields, check_not_negative
from fedshift.client.local import Local, train_locally
from fedshift.client.objectives import CrossEntropy, Term
from fedshift.client.prototypes import (
    Moments,
    ToPrototypes,
    check_features,
    class_moments,
    head_shape,
    statistics,
)
from fedshift.client.sharing import Share
from fedshift.data import ClientData, Plan
from fedshift.errors import InputError
from fedshift.model import Model
from fedshift.server.cap import cap_of
from fedshift.server.combine import Combine, Mean, combined
from fedshift.server.heads import head_weights, pooled_prototypes
from fedshift.server.optimizers import ServerOptimizer, Sgd
from fedshift.tree import Params, Parts, map_, weighted_sum

# How features are averaged: in large batches, because no gradients are stored.
WHOLE = Local(epochs=1, batch=256)


@dataclass(frozen=True)
class FedPac(SharedModel):
    """A shared body theta and, for each client, the best convex mixture of all heads.

        client  phi_i by SGD on CE, body frozen; then theta_i by SGD on CE + (lam/d) ||f - c_y||^2
        server  theta <- server(theta, sum_i a_i (theta_i - theta)),  phi_i <- sum_j alpha_ij phi_j,
                c_k <- sum_i n_ik mu_ik / sum_i n_ik

    Xu, Tong and Huang 2023, "Personalized federated learning with feature alignment and classifier
    collaboration" (FedPAC), arXiv 2306.11867, Algorithm 1. f [d] are the "features" that the head
    takes. alpha_i is that of `server.heads.head_weights`, whose V_i and H_i are computed with the
    received body, before training; the class means mu_ik are computed after training; both in
    evaluation mode.

    The pull begins in the second round. If the last cohort had no example of a class, the class is
    pulled to the client's own mean before training. Heads are stored on the server, one row per
    client: row i is sent to client i, served by it, and replaced when it takes part. The prototypes
    are those of the last cohort. Clients without examples take no part in mixtures.

    head         name prefixes of the head's parameters; running statistics are never mixed
    lam          strength of the pull; 0 leaves it out
    collaborate  False lets every client keep its own head
    fit, local   the phase of the head and that of the body

    With lam = 0 and collaborate = False this is FedRep. Raises InputError for lam < 0 and phases
    that choose parameters themselves, and before any training for a model without "features".
    """

    model: Model
    head: tuple[str, ...] = ("head.",)
    lam: float = 1.0
    collaborate: bool = True
    objective: Term = CrossEntropy()
    fit: Local = Local()
    local: Local = Local()
    combine: Combine = Mean()
    server: ServerOptimizer = Sgd()

    def __post_init__(self) -> None:
        check_fields(self)
        check_not_negative("FedPAC lam", self.lam)
        for phase in (self.fit, self.local):
            if phase.only or phase.frozen:
                raise InputError(
                    "FedPAC decides which parameters move in its two phases; leave out "
                    f"only={phase.only} and frozen={phase.frozen}"
                )

    def init(self, params: Params, buffers: Params, table: Params) -> Parts:
        Share(self.head).check(params)  # the head must exist, and leave a body
        shared, n = self._body_of(params), table["n"]
        shape, like = head_shape(self.model, self.head), next(iter(params.values()))
        state = server_state(self.model, self.server, shared, buffers, table, self.combine.needs)
        return state | {
            # A row per client; all start with the same head.
            "heads": map_(lambda v: torch.stack([v] * len(n)), self._head_of(params)),
            "prototypes": {"mean": like.new_zeros(shape), "count": like.new_zeros(shape[0])},
        }

    def init_client(self, params: Params, buffers: Params, data: ClientData) -> Parts:
        check_features(self.model, self.head, params, buffers, data)
        return {"client": {"id": data.id}, **self.objective.remember(params, buffers, data)}

    def phases(self) -> Mapping[str, Local]:
        return {**self._train(), "statistics": WHOLE}

    def weigh(self, server: Parts, ids: Tensor) -> Tensor:
        return self.combine.weigh(rows(server, ids))

    def trains(self, weights: Tensor) -> Tensor:
        # A head must be trained even if the client has weight 0 in the body.
        return torch.ones_like(weights, dtype=torch.bool)

    def broadcast(self, server: Parts, client: int) -> Parts:
        message = {k: server[k] for k in ("params", "buffers", "prototypes")}
        head = {"head": map_(lambda v: v[client], server["heads"])}
        return message | head | self.objective.hear(server)

    def client_update(
        self, message: Parts, state: Parts, data: ClientData, plans: Mapping[str, Plan]
    ) -> tuple[Parts, Parts]:
        start, buffers = message["params"] | message["head"], message["buffers"]
        shape, leaf = head_shape(self.model, self.head), message["prototypes"]["mean"]
        # V_i and H_i are computed with the received body, because heads are compared on it.
        before = class_moments(self.model, start, buffers, data, plans["statistics"], shape)
        memory = heard(message, state) | {"prototypes": _goals(message["prototypes"], before)}
        objective = self.objective + ToPrototypes(self.lam) if self.lam else self.objective
        end, end_buffers, loss = train_locally(
            self.model, objective, self._train(), start, buffers, memory, data, plans
        )
        # The prototypes to send are those of the trained body.
        moments = class_moments(self.model, end, end_buffers, data, plans["statistics"], shape)
        variance, means = statistics(before)
        ends = self._body_of(start), self._body_of(end)
        return update_of(self.model, *ends, end_buffers, loss, data) | {
            "head": self._head_of(end),
            "prototypes": {"mean": moments.mean.to(leaf.dtype), "count": moments.n.to(leaf.dtype)},
            "statistics": {"variance": variance, "means": means.to(leaf.dtype)},
        }, self.objective.remember(end, end_buffers, data)

    def needs_classes(self) -> bool:
        """True: it compares means of features by class."""
        return True

    def sums(self, server: Parts, cohort: Params) -> Mapping[str, Tensor]:
        """Changes and buffers, unless `combine` needs each client's; heads are never summed."""
        return averaged(cohort) if isinstance(self.combine, Mean) else {}

    def server_update(self, server: Parts, updates: Parts, seed: int) -> Parts:
        delta = combined(self.combine, updates, seed)
        ids, new = updates["cohort"]["id"], updates["head"]
        if self.collaborate:
            reported, active = updates["statistics"], server["table"]["n"][ids] > 0
            cap = cap_of(updates["cohort"])
            mix = head_weights(reported["variance"], reported["means"], active, cap)
            # `weighted_sum` leaves heads of weight 0 out exactly.
            mixed = [weighted_sum(row, new) for row in mix]
            new = {k: torch.stack([head[k] for head in mixed]) for k in new}
        return fold(server, updates, delta, self.server) | {
            "heads": map_(lambda old, v: old.index_copy(0, ids, v), server["heads"], new),
            "prototypes": pooled_prototypes(updates["prototypes"], cap_of(updates["cohort"])),
        }

    def model_for(self, server: Parts, state: Parts) -> tuple[Params, Params]:
        # `server` may be a client's message, which has its own head only, instead of "heads".
        received = server.get("head")
        head = received or map_(lambda v: v[state["client"]["id"]], server["heads"])
        return server["params"] | head, server["buffers"]

    def reveals(self) -> Mapping[str, str]:
        return revealed(self.combine.needs) | {
            "head": "its own head after training, before it is mixed with others",
            "prototypes": "the mean of its features in each class, and how many examples each has",
            "statistics": "the variance of its features in one number, and their class means "
            "times the classes' shares, by the model received",
        }

    def _head_of(self, params: Params) -> Params:
        """The head without its fixed parameters, which are the same for all clients."""
        return self.model.trainable(Share(self.head).kept(params))

    def _body_of(self, params: Params) -> Params:
        head = self._head_of(params)
        return {k: v for k, v in params.items() if k not in head}

    def _train(self) -> dict[str, Local]:
        fit = replace(self.fit, only=self.head)
        return numbered((fit, replace(self.local, frozen=self.head)))


def _goals(prototypes: Params, local: Moments) -> Params:
    """c_k if the last cohort had class k, else the client's own mean; held = 0 in round 1."""
    count = prototypes["count"]
    mean = torch.where((count > 0)[:, None], prototypes["mean"], local.mean.to(count.dtype))
    return {"mean": mean, "held": (count.sum() > 0).to(count.dtype).expand(len(count))}
