"""FedAS: align the received body with old features; weigh clients by Fisher information."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from fedshift.algorithms.base import numbered, rows
from fedshift.algorithms.defaults import SharedModel
from fedshift.algorithms.steps import fold, heard, revealed, server_state, update_of
from fedshift.arguments import check_fields
from fedshift.client.gradients import gradient_trace
from fedshift.client.local import Local, context_of, train_locally
from fedshift.client.objectives import CrossEntropy, Term
from fedshift.client.prototypes import (
    ToClassMeans,
    ToPrevious,
    check_features,
    class_moments,
    head_shape,
)
from fedshift.client.sharing import Share
from fedshift.data import ClientData, Plan
from fedshift.errors import InputError, check_name
from fedshift.model import Model
from fedshift.server.cap import cap_of, capped
from fedshift.server.combine import Combine, Mean
from fedshift.server.optimizers import ServerOptimizer, Sgd
from fedshift.tree import Params, Parts, map_

Match = Literal["classes", "examples"]


@dataclass(frozen=True)
class FedAs(SharedModel):
    """FedAvg on the body with weights F_i instead of n_i, local heads, and aligned features.

        align   theta' by SGD from theta on sum_k ||f_theta'(x) - p_ik||^2 / d, p_ik the class means
                of the features by the client's last body
        train   (theta_i, phi_i) by SGD on CE from (theta', phi_i)
        server  theta <- server(theta, sum_i F_i (theta_i - theta) / sum_i F_i)

    Yang, Huang and Ye 2024, "FedAS: bridging inconsistency in personalized federated learning",
    CVPR, pp. 11986-11995. The alignment loss is `prototypes.ToClassMeans`, F_i is
    `gradients.gradient_trace` after training, in the batches of `local`. n_i is used only if all
    F_i are 0, and in the reported mean loss. In the authors' code all clients align the same model
    object, one after the other; here, as in PFLlib, each has its own copy.

    A client aligns from its second participation on (our choice), because its first old body is the
    common first model, which has learned nothing. (The steps are also taken in the first round, but
    their result is not used.) In the authors' code, and in that of FedDRM, it aligns from its first
    participation on: `first`.

    head   name prefixes of the head's parameters
    align  the alignment phase, of the body alone; None leaves it out
    match  "classes" as above; "examples" matches every example's features to those of the client's
           whole last model (`prototypes.ToPrevious`), as the FedDRM authors' code does
    first  True aligns from a client's first participation on, to the features of the first model.
           In round 1 that is the received model: "examples" then do not pull, and only the weight
           decay of `align` moves the body; "classes" pull features to their own class means
    fisher False takes the weights of `combine` instead of F_i; then no more is sent than by FedPer
    combine  any rule if fisher is False; else a `Mean`, whose weights are used if all F_i are 0

    Raises InputError for an `align` that chooses parameters itself, unknown `match` and a `combine`
    that does not fit `fisher`, and before any training for a model without "features".
    """

    model: Model
    head: tuple[str, ...] = ("head.",)
    align: Local | None = Local(lr=0.01, epochs=1, batch=16)
    match: Match = "classes"
    fisher: bool = True
    first: bool = False
    objective: Term = CrossEntropy()
    local: Local = Local()
    combine: Combine = Mean()
    server: ServerOptimizer = Sgd()

    def __post_init__(self) -> None:
        check_fields(self)
        check_name("match of FedAS", self.match, ("classes", "examples"))
        if self.align is not None and (self.align.only or self.align.frozen):
            raise InputError(
                "FedAS aligns the body alone; leave out "
                f"only={self.align.only} and frozen={self.align.frozen}"
            )
        if self.fisher and not isinstance(self.combine, Mean):
            raise InputError(
                "FedAS puts Fisher traces in the place of the weights of a mean, and combine="
                f"{self.combine} is no Mean; give fisher=False with it, or combine=Mean()"
            )

    def init(self, params: Params, buffers: Params, table: Params) -> Parts:
        self._share.check([*params, *buffers])
        shared = self._share.shared(params), self._share.shared(buffers)
        return server_state(self.model, self.server, *shared, table, self.combine.needs)

    def init_client(self, params: Params, buffers: Params, data: ClientData) -> Parts:
        if self.align is not None:
            check_features(self.model, self.head, params, buffers, data)
        return {
            **self._memory(params, buffers, data),
            "history": {"trained": torch.zeros((), dtype=torch.bool)},
        }

    def phases(self) -> Mapping[str, Local]:
        # The pass for the trace uses the batch size of training, on which the trace depends.
        passes = {"pass": replace(self.local, epochs=1, steps=None)}
        return {**numbered(self.local), **self._align_phase(), **passes}

    def weigh(self, server: Parts, ids: Tensor) -> Tensor:
        return self.combine.weigh(rows(server, ids))

    def trains(self, weights: Tensor) -> Tensor:
        # All must train: the weights depend on Fisher traces, which are computed after training.
        return torch.ones_like(weights, dtype=torch.bool)

    def client_update(
        self, message: Parts, state: Parts, data: ClientData, plans: Mapping[str, Plan]
    ) -> tuple[Parts, Parts]:
        received = message["params"] | state["private"]
        buffers = message["buffers"] | state["private_buffers"]
        start, start_buffers = self._start_aligned(received, buffers, state, data, plans)
        phases, memory = numbered(self.local), heard(message, state)
        end, end_buffers, loss = train_locally(
            self.model, self.objective, phases, start, start_buffers, memory, data, plans
        )
        shared = self._share.shared
        update = update_of(
            self.model, shared(received), shared(end), shared(end_buffers), loss, data
        )
        if self.fisher:
            context = context_of(end, end_buffers, state, data)
            frame = (end, end_buffers, context, data, plans["pass"])
            # Fisher information is defined for the likelihood, so without regularising terms.
            trace = gradient_trace(self.model, CrossEntropy(), *frame)
            update["fisher"] = {"trace": trace}
        done = {"history": {"trained": torch.ones((), dtype=torch.bool)}}
        return update, self._memory(end, end_buffers, data) | done

    def needs_classes(self) -> bool:
        """True with Fisher traces, which need a classifier's likelihood, and with alignment."""
        return self.fisher or self.align is not None

    def server_update(self, server: Parts, updates: Parts, seed: int) -> Parts:
        cohort = updates["cohort"]
        if self.fisher:
            # clamp: traces are only claims, and a negative one would give a negative weight.
            traces = updates["fisher"]["trace"].double().clamp(min=0)
            # If all traces are 0, use the weights of `combine`.
            weight = traces / traces.sum() if bool(traces.any()) else cohort["weight"]
            weight = capped(weight, cap_of(cohort))
            updates = updates | {"cohort": {**cohort, "weight": weight}}
        delta = self.combine(updates["cohort"]["weight"], updates["delta"], seed)
        return fold(server, updates, delta, self.server)

    def model_for(self, server: Parts, state: Parts) -> tuple[Params, Params]:
        return server["params"] | state["private"], server["buffers"] | state["private_buffers"]

    def reveals(self) -> Mapping[str, str]:
        trace = "the sum of its squared batch gradients after training, in one number"
        return revealed(self.combine.needs) | ({"fisher": trace} if self.fisher else {})

    @property
    def _share(self) -> Share:
        return Share(self.head)

    def _memory(self, params: Params, buffers: Params, data: ClientData) -> Parts:
        """The head, the body that it was trained with, and what the objective remembers."""
        return {
            "private": self._share.kept(params),
            "private_buffers": self._share.kept(buffers),
            "body": self._share.shared(params),
            "body_buffers": self._share.shared(buffers),
            **self.objective.remember(params, buffers, data),
        }

    def _align_phase(self) -> dict[str, Local]:
        return {} if self.align is None else {"align": replace(self.align, frozen=self.head)}

    def _start_aligned(
        self,
        received: Params,
        buffers: Params,
        state: Parts,
        data: ClientData,
        plans: Mapping[str, Plan],
    ) -> tuple[Params, Params]:
        """(parameters, buffers) to train from: aligned if there is an old body to align to."""
        if self.align is None:
            return received, buffers
        shape = head_shape(self.model, self.head)
        last = state["body"] | state["private"]
        buffers_then = state["body_buffers"] | state["private_buffers"]
        moments = class_moments(self.model, last, buffers_then, data, plans["pass"], shape)
        # Moments are float64; the loss is computed in the parameters' type.
        leaf = next(iter(received.values()))
        goal = {"mean": moments.mean.to(leaf.dtype), "held": (moments.n > 0).to(leaf.dtype)}
        targets = {"prototypes": goal, "previous": last, "previous_buffers": buffers_then}
        context = context_of(received, buffers, state, data) | targets
        term = ToClassMeans() if self.match == "classes" else ToPrevious()
        phase = self._align_phase()["align"]
        done = phase(self.model, term, received, buffers, context, data, plans["align"])
        if self.first:
            return done.params, done.buffers
        has_trained = state["history"]["trained"]

        # Select by a tensor, not by `if`: `client_update` must not branch on tensor values.
        def chosen(new: Tensor, old: Tensor) -> Tensor:
            return torch.where(has_trained, new, old)

        return map_(chosen, done.params, received), map_(chosen, done.buffers, buffers)
