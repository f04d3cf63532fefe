"""FedPAC: features aligned to the cohort's class means, heads combined for each client."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from fedshift.algorithms.fedavg import Extra, FedAvg, Training
from fedshift.arguments import NotNegative
from fedshift.client.local import Local, Trained
from fedshift.client.prototypes import (
    Moments,
    ToPrototypes,
    check_features,
    class_moments,
    head_shape,
    statistics,
)
from fedshift.client.sharing import Share
from fedshift.data import ClientData
from fedshift.errors import InputError
from fedshift.model import Model
from fedshift.server.cap import cap_of
from fedshift.server.heads import head_weights, pooled_prototypes
from fedshift.tree import Params, Parts, map_, weighted_sum

# How features are averaged: in large batches, because no gradients are stored.
WHOLE = Local(epochs=1, batch=256)


@dataclass(frozen=True)
class FedPac(Extra):
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

    The host's `local` has the paper's two phases, `Local(only=head)` and `Local(frozen=head)`. With
    lam = 0 and collaborate = False this is FedRep. Raises InputError for lam < 0, for parts that
    clients keep, and before any training for a model without "features".
    """

    head: tuple[str, ...] = ("head.",)
    lam: NotNegative = 1.0
    collaborate: bool = True

    def check(self, host: FedAvg) -> None:
        if host.share.private:
            raise InputError("FedPAC's heads travel, and are mixed; leave share out")

    def server(self, host: FedAvg, params: Params, buffers: Params, state: Parts) -> Parts:
        Share(self.head).check(params)  # the head must exist, and leave a body
        head, n = self._head_of(host.model, params), len(state["table"]["n"])
        shape, like = head_shape(host.model, self.head), next(iter(params.values()))
        body = {k: v for k, v in params.items() if k not in head}
        return {
            "params": body,
            "optimizer": host.server.init(host.model.trainable(body)),
            # A row per client; all start with the same head.
            "heads": map_(lambda v: torch.stack([v] * n), head),
            "prototypes": {"mean": like.new_zeros(shape), "count": like.new_zeros(shape[0])},
        }

    def client(self, host: FedAvg, params: Params, buffers: Params, data: ClientData) -> Parts:
        check_features(host.model, self.head, params, buffers, data)
        return {"client": {"id": data.id}}

    def phases(self, host: FedAvg) -> Mapping[str, Local]:
        return {"statistics": WHOLE}

    def trains_all(self, host: FedAvg) -> bool:
        """True: a head must be trained even if the client has weight 0 in the body."""
        return True

    def send(self, host: FedAvg, server: Parts, client: int) -> Parts:
        head = map_(lambda v: v[client], server["heads"])
        return {"prototypes": server["prototypes"], "head": head}

    def before(self, host: FedAvg, training: Training) -> Training:
        prototypes, buffers = training.message["prototypes"], training.received[1]
        start = training.received[0] | training.message["head"], buffers
        # V_i and H_i are computed with the received body, because heads are compared on it.
        moments = self._moments(host, start, training)
        variance, means = statistics(moments)
        means = means.to(prototypes["mean"].dtype)
        pulled = training.objective + ToPrototypes(self.lam) if self.lam else training.objective
        return replace(
            training, received=start, start=start, objective=pulled,
            memory=training.memory | {"prototypes": _goals(prototypes, moments)},
            sent={**training.sent, "statistics": {"variance": variance, "means": means}},
        )  # fmt: skip

    def after(self, host: FedAvg, training: Training, end: Trained) -> tuple[Parts, Parts]:
        # The prototypes to send are those of the trained body.
        moments = self._moments(host, (end.params, end.buffers), training)
        kind = training.message["prototypes"]["mean"].dtype
        head = self._head_of(host.model, end.params)
        prototypes = {"mean": moments.mean.to(kind), "count": moments.n.to(kind)}
        return {"head": head, "prototypes": prototypes}, {}

    def fold(
        self, host: FedAvg, server: Parts, updates: Parts, delta: Params
    ) -> tuple[Params, Parts]:
        ids, new, cap = updates["cohort"]["id"], updates["head"], cap_of(updates["cohort"])
        if self.collaborate:
            reported, active = updates["statistics"], server["table"]["n"][ids] > 0
            mix = head_weights(reported["variance"], reported["means"], active, cap)
            # `weighted_sum` leaves heads of weight 0 out exactly.
            mixed = [weighted_sum(row, new) for row in mix]
            new = {k: torch.stack([head[k] for head in mixed]) for k in new}
        return delta, {
            "heads": map_(lambda old, v: old.index_copy(0, ids, v), server["heads"], new),
            "prototypes": pooled_prototypes(updates["prototypes"], cap),
        }

    def model_for(self, host: FedAvg, server: Parts, state: Parts) -> tuple[Params, Params]:
        # `server` may be a client's message, which has its own head only, instead of "heads".
        received = server.get("head")
        head = received or map_(lambda v: v[state["client"]["id"]], server["heads"])
        return server["params"] | head, server["buffers"]

    def reveals(self, host: FedAvg) -> Mapping[str, str]:
        return {
            "head": "its own head after training, before it is mixed with others",
            "prototypes": "the mean of its features in each class, and how many examples each has",
            "statistics": "the variance of its features in one number, and their class means "
            "times the classes' shares, by the model received",
        }

    def needs_classes(self, host: FedAvg) -> bool:
        """True: it compares means of features by class."""
        return True

    def _moments(self, host: FedAvg, at: tuple[Params, Params], training: Training) -> Moments:
        """The class means of the features of a model."""
        shape, plan = head_shape(host.model, self.head), training.plans["statistics"]
        return class_moments(host.model, *at, training.data, plan, shape)

    def _head_of(self, model: Model, params: Params) -> Params:
        """The head without its fixed parameters, which are the same for all clients."""
        return model.trainable(Share(self.head).kept(params))


def _goals(prototypes: Params, local: Moments) -> Params:
    """c_k if the last cohort had class k, else the client's own mean; held = 0 in round 1."""
    count = prototypes["count"]
    mean = torch.where((count > 0)[:, None], prototypes["mean"], local.mean.to(count.dtype))
    return {"mean": mean, "held": (count.sum() > 0).to(count.dtype).expand(len(count))}
