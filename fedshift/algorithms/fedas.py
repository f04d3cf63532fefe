"""FedAS: align the received body with old features; weigh clients by Fisher information."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from fedshift.algorithms.fedavg import Extra, FedAvg, Training, whole_pass
from fedshift.client.gradients import gradient_trace
from fedshift.client.local import Local, Trained, context_of
from fedshift.client.objectives import CrossEntropy
from fedshift.client.prototypes import (
    ToClassMeans,
    ToPrevious,
    check_features,
    class_moments,
    head_shape,
)
from fedshift.data import ClientData
from fedshift.errors import InputError
from fedshift.server.cap import cap_of, capped
from fedshift.server.combine import Mean
from fedshift.tree import Params, Parts, map_

Match = Literal["classes", "examples"]


@dataclass(frozen=True)
class FedAs(Extra):
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

    The head is what the host keeps on clients, `share=Share(("head.",))`.

    align  the alignment phase, of the body alone; None leaves it out
    match  "classes" as above; "examples" matches every example's features to those of the client's
           whole last model (`prototypes.ToPrevious`), as the FedDRM authors' code does
    first  True aligns from a client's first participation on, to the features of the first model.
           In round 1 that is the received model: "examples" then do not pull, and only the weight
           decay of `align` moves the body; "classes" pull features to their own class means
    fisher False takes the weights of `combine` instead of F_i; then no more is sent than by FedPer.
           With F_i `combine` is a `Mean`, whose weights are used if all F_i are 0

    Raises InputError for an `align` that chooses parameters itself, unknown `match`, a host that
    keeps no head and a `combine` that does not fit `fisher`, and before any training for a model
    without "features".
    """

    align: Local | None = Local(lr=0.01, epochs=1, batch=16)
    match: Match = "classes"
    fisher: bool = True
    first: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.align is not None and (self.align.only or self.align.frozen):
            raise InputError(
                "FedAS aligns the body alone; leave out "
                f"only={self.align.only} and frozen={self.align.frozen}"
            )

    def check(self, host: FedAvg) -> None:
        if not host.share.private:
            raise InputError('FedAS keeps heads on the clients; give share=Share(("head.",))')
        if self.fisher and not isinstance(host.combine, Mean):
            raise InputError(
                "FedAS puts Fisher traces in the place of the weights of a mean, and combine="
                f"{host.combine} is no Mean; give fisher=False with it, or combine=Mean()"
            )

    def client(self, host: FedAvg, params: Params, buffers: Params, data: ClientData) -> Parts:
        if self.align is not None:
            check_features(host.model, host.share.private, params, buffers, data)
        trained = {"history": {"trained": torch.zeros((), dtype=torch.bool)}}
        return _body(host, params, buffers) | trained

    def phases(self, host: FedAvg) -> Mapping[str, Local]:
        # The pass for the trace uses the batch size of training, on which the trace depends.
        passes = {"pass": whole_pass(host)}
        return passes if self.align is None else passes | {"align": _aligning(host, self.align)}

    def trains_all(self, host: FedAvg) -> bool:
        """True: the weights depend on Fisher traces, which are computed after training."""
        return True

    def before(self, host: FedAvg, training: Training) -> Training:
        """Start from an aligned body, if there is an old one to align to."""
        if self.align is None:
            return training
        state, data, plans = training.state, training.data, training.plans
        shape = head_shape(host.model, host.share.private)
        last = state["body"] | state["private"]
        buffers_then = state["body_buffers"] | state["private_buffers"]
        moments = class_moments(host.model, last, buffers_then, data, plans["pass"], shape)
        # Moments are float64; the loss is computed in the parameters' type.
        leaf = next(iter(training.received[0].values()))
        goal = {"mean": moments.mean.to(leaf.dtype), "held": (moments.n > 0).to(leaf.dtype)}
        targets = {"prototypes": goal, "previous": last, "previous_buffers": buffers_then}
        context = context_of(*training.received, state, data) | targets
        term = ToClassMeans() if self.match == "classes" else ToPrevious()
        phase = _aligning(host, self.align)
        done = phase(host.model, term, *training.received, context, data, plans["align"])
        if self.first:
            return replace(training, start=(done.params, done.buffers))
        has_trained = state["history"]["trained"]

        # Select by a tensor, not by `if`: `client_update` must not branch on tensor values.
        def chosen(new: Tensor, old: Tensor) -> Tensor:
            return torch.where(has_trained, new, old)

        pairs = zip((done.params, done.buffers), training.received, strict=True)
        params, buffers = (map_(chosen, new, old) for new, old in pairs)
        return replace(training, start=(params, buffers))

    def after(self, host: FedAvg, training: Training, end: Trained) -> tuple[Parts, Parts]:
        done = {"history": {"trained": torch.ones((), dtype=torch.bool)}}
        kept = _body(host, end.params, end.buffers) | done
        if not self.fisher:
            return {}, kept
        context = context_of(end.params, end.buffers, training.state, training.data)
        frame = (end.params, end.buffers, context, training.data, training.plans["pass"])
        # Fisher information is defined for the likelihood, so without regularising terms.
        return {"fisher": {"trace": gradient_trace(host.model, CrossEntropy(), *frame)}}, kept

    def sums(self, host: FedAvg, server: Parts, cohort: Params) -> Mapping[str, Tensor] | None:
        """None with Fisher traces, which are weights that no reply has on arrival."""
        return None if self.fisher else {}

    def gather(self, host: FedAvg, server: Parts, updates: Parts) -> Parts:
        if not self.fisher:
            return updates
        cohort = updates["cohort"]
        # clamp: traces are only claims, and a negative one would give a negative weight.
        traces = updates["fisher"]["trace"].double().clamp(min=0)
        # If all traces are 0, use the weights of `combine`.
        weight = traces / traces.sum() if bool(traces.any()) else cohort["weight"]
        return updates | {"cohort": {**cohort, "weight": capped(weight, cap_of(cohort))}}

    def reveals(self, host: FedAvg) -> Mapping[str, str]:
        trace = "the sum of its squared batch gradients after training, in one number"
        return {"fisher": trace} if self.fisher else {}

    def needs_classes(self, host: FedAvg) -> bool:
        """True with Fisher traces, which need a classifier's likelihood, and with alignment."""
        return self.fisher or self.align is not None


def _body(host: FedAvg, params: Params, buffers: Params) -> Parts:
    """The body that the client's head was trained with."""
    return {"body": host.share.shared(params), "body_buffers": host.share.shared(buffers)}


def _aligning(host: FedAvg, align: Local) -> Local:
    return replace(align, frozen=host.share.private)
