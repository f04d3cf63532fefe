"""FedALA: clients learn, weight by weight, how much of the global model to start from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from fedshift.algorithms.fedavg import Extra, FedAvg, Training, whole_pass
from fedshift.client.local import Local, Trained, context_of
from fedshift.client.mixing import Mix, leading, mixed, top
from fedshift.data import ClientData
from fedshift.errors import InputError
from fedshift.tree import Params, Parts


@dataclass(frozen=True)
class FedAla(Extra):
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
    keeps serving v_i. Raises InputError for a host whose clients keep parts, and
    (before round 1) for more layers than the model has.
    """

    mix: Mix | None = Mix()
    head: tuple[str, ...] = ("head.",)

    def check(self, host: FedAvg) -> None:
        if host.share.private:
            raise InputError("FedALA's clients mix whole models; leave share out")

    def server(self, host: FedAvg, params: Params, buffers: Params, state: Parts) -> Parts:
        self._top(host)  # raises for more layers than the model has
        return {}

    def client(self, host: FedAvg, params: Params, buffers: Params, data: ClientData) -> Parts:
        return {
            "personal": params,
            "personal_buffers": buffers,
            "mixing": {k: torch.ones_like(params[k]) for k in self._top(host)},
            "history": {"mixed": torch.zeros((), dtype=torch.bool)},
        }

    def phases(self, host: FedAvg) -> Mapping[str, Local]:
        return {} if self.mix is None else {"mix": whole_pass(host)}

    def trains_all(self, host: FedAvg) -> bool:
        """True: v_i must be trained even if the client has weight 0 in theta."""
        return True

    def before(self, host: FedAvg, training: Training) -> Training:
        """Start from theta^_i, and learn W_i."""
        (received, buffers), state = training.received, training.state
        personal, mixing = state["personal"], state["mixing"]
        # Equal models give W_i no gradient. In round 1 all are equal, and the many epochs of the
        # first fit would be wasted.
        if self.mix is None or all(torch.equal(personal[k], v) for k, v in received.items()):
            return training
        has_mixed = bool(state["history"]["mixed"])
        old, new = ({k: model[k] for k in mixing} for model in (personal, received))
        lower = {k: v for k, v in received.items() if k not in mixing}
        context = context_of(received, buffers, training.memory, training.data)
        # The plan is drawn anew each round, so its leading rows are a random part of the data.
        plan = leading(training.plans["mix"], self.mix.share)
        mixing = self.mix(
            host.model, training.objective, old, new, lower, mixing, buffers, context,
            training.data, plan, 1 if has_mixed else self.mix.cap,
        )  # fmt: skip
        learned = {"mixing": mixing, "history": {"mixed": torch.ones((), dtype=torch.bool)}}
        start = received | mixed(old, new, mixing), buffers
        return replace(training, start=start, kept={**training.kept, **learned})

    def after(self, host: FedAvg, training: Training, end: Trained) -> tuple[Parts, Parts]:
        return {}, {"personal": end.params, "personal_buffers": end.buffers}

    def model_for(self, host: FedAvg, server: Parts, state: Parts) -> tuple[Params, Params]:
        return state["personal"], state["personal_buffers"]

    def _top(self, host: FedAvg) -> tuple[str, ...]:
        return () if self.mix is None else top(host.model, self.mix.layers, self.head)
