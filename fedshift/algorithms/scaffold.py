"""SCAFFOLD: local steps corrected by the difference of the global and the client's gradient."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from fedshift.algorithms.fedavg import Extra, FedAvg, Training, one_phase, whole_pass
from fedshift.client.gradients import pass_gradient, travelled_gradient
from fedshift.client.local import Local, Trained, context_of
from fedshift.client.oracles import Shift
from fedshift.data import ClientData
from fedshift.errors import InputError
from fedshift.server.cap import cap_of, capped
from fedshift.server.combine import Mean, total
from fedshift.server.weights import Uniform
from fedshift.tree import Params, Parts, add, sub, zeros

Option = Literal["I", "II"]


@dataclass(frozen=True)
class Scaffold(Extra):
    """y <- y - eta (g_i(y) - c_i + c), Q times; theta <- server(theta, sum_i a_i (y_i - theta)).

    Karimireddy et al. 2020, arXiv 1910.06378, Algorithm 1. Controls have the shapes of the
    parameters that train; buffers have none.

    option I   c_i <- grad F_i(theta), by one more pass over the client's data
    option II  c_i <- c_i - c + (theta - y_i) / (eta Q), Q steps and not epochs
    server     c <- c + sum over the clients trained of p_i (new c_i - old c_i)

    a [C] are the cohort's weights, p [N] those that `combine` gives to the whole population before
    round 1, under the cap of rounds. The paper's are 1/C and 1/N, `combine=Mean(Uniform())`. Other
    weights are our extension: c = sum_i p_i c_i holds whichever clients take part, because a client
    that is not drawn, or skipped for a_i = 0, keeps c_i. (Controls weighted by 1/N would lead to
    the minimiser of the *uniform* risk, whatever a is.) Public codes differ, see
    docs/methods/scaffold.md. With Adam, which option I allows, g_i(y) - c_i + c is Adam's gradient.
    Raises InputError for several local phases, for a `combine` that is no weighted mean, for parts
    that clients keep, and for momentum or Adam with option II.

    >>> import torch
    >>> from fedshift.algorithms.scaffold import Scaffold
    >>> from fedshift.server.combine import Mean
    >>> from fedshift.server.weights import Uniform
    >>> model = fs.Model(torch.nn.Linear(4, 3))
    >>> scaffold = fs.FedAvg(model, combine=Mean(Uniform()), extras=(Scaffold(),))
    """

    option: Option = "II"

    def check(self, host: FedAvg) -> None:
        local = one_phase(host, "a SCAFFOLD control belongs to one local phase")
        if not isinstance(host.combine, Mean):
            raise InputError(f"SCAFFOLD's c is a weighted mean; give a Mean, not {host.combine}")
        if host.share.private:
            raise InputError(
                "SCAFFOLD's controls travel whole, so clients keep no part; leave share out"
            )
        momentum = f"momentum {local.momentum}" if local.momentum else ""
        other = "Adam" if local.optimizer == "adam" else momentum
        if self.option == "II" and other:
            cure = 'Local(optimizer="sgd")' if other == "Adam" else "Local(momentum=0)"
            raise InputError(
                "SCAFFOLD option II takes (theta - y) / (lr * steps) for the mean gradient, wrong "
                f'with {other}; give {cure}, or use option="I"'
            )

    def server(self, host: FedAvg, params: Params, buffers: Params, state: Parts) -> Parts:
        # Weigh all clients once: c must remain a mean with the same weights in all rounds.
        population = {"weight": host.combine.weigh(state["table"])}
        return {"control": zeros(host.model.trainable(params)), "population": population}

    def client(self, host: FedAvg, params: Params, buffers: Params, data: ClientData) -> Parts:
        return {"control": zeros(host.model.trainable(params))}

    def phases(self, host: FedAvg) -> Mapping[str, Local]:
        return {"pass": whole_pass(host)} if self.option == "I" else {}

    def send(self, host: FedAvg, server: Parts, client: int) -> Parts:
        return {"control": server["control"]}

    def before(self, host: FedAvg, training: Training) -> Training:
        # c - c_i is constant during the phase, so compute it once.
        shift = Shift(sub(training.message["control"], training.state["control"]))
        return replace(training, oracles=(*training.oracles, shift))

    def after(self, host: FedAvg, training: Training, end: Trained) -> tuple[Parts, Parts]:
        model, trainable = host.model, host.model.trainable
        (start, buffers), old, plans = training.start, training.state["control"], training.plans
        # Option I takes one more pass over the data; option II uses how far training moved.
        if self.option == "I":
            context = context_of(start, buffers, training.memory, training.data)
            frame = (start, buffers, context, training.data, plans["pass"])
            new = trainable(pass_gradient(whole_pass(host), model, training.objective, *frame))
        else:
            shift = sub(training.message["control"], old)
            ends = trainable(start), trainable(end.params)
            new = travelled_gradient(*ends, shift, plans["train0"])
        return {"control": sub(new, old)}, {"control": new}

    def sums(self, host: FedAvg, server: Parts, cohort: Params) -> Mapping[str, Tensor]:
        """Controls by the population's weights."""
        return {"control": _population(server, cohort)}

    def fold(
        self, host: FedAvg, server: Parts, updates: Parts, delta: Params
    ) -> tuple[Params, Parts]:
        # Use the population's weights: with the cohort's, c would drift from sum_i p_i c_i.
        moved = total(updates, "control", _population(server, updates["cohort"]))
        return delta, {"control": add(server["control"], moved)}

    def reveals(self, host: FedAvg) -> Mapping[str, str]:
        return {"control": "the change of its control, an estimate of the gradient of all its data"}

    def mixes_counts(self, host: FedAvg) -> bool:
        """True if c is no plain mean: its weights then depend on the counts of all clients."""
        return not (isinstance(host.combine, Mean) and isinstance(host.combine.weights, Uniform))


def _population(server: Parts, cohort: Params) -> Tensor:
    """p_i of the cohort's clients [C], at most the cap, because counts are only claims."""
    p = server["population"]["weight"]
    return capped(p, cap_of(cohort), p > 0)[cohort["id"]]
