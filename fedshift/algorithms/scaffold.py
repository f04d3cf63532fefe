"""SCAFFOLD: local steps corrected by the difference of the global and the client's gradient."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from fedshift.algorithms.base import numbered, rows
from fedshift.algorithms.defaults import SharedModel
from fedshift.algorithms.steps import averaged, fold, heard, revealed, server_state, update_of
from fedshift.arguments import check_fields
from fedshift.client.gradients import pass_gradient, travelled_gradient
from fedshift.client.local import Local, context_of, train_locally
from fedshift.client.objectives import CrossEntropy, Term
from fedshift.client.oracles import Shift
from fedshift.data import ClientData, Plan
from fedshift.errors import InputError, check_name
from fedshift.model import Model
from fedshift.server.cap import cap_of, capped
from fedshift.server.combine import Mean, total
from fedshift.server.optimizers import ServerOptimizer, Sgd
from fedshift.server.weights import Uniform
from fedshift.tree import Params, Parts, add, sub, zeros

Option = Literal["I", "II"]


@dataclass(frozen=True)
class Scaffold(SharedModel):
    """y <- y - eta (g_i(y) - c_i + c), Q times; theta <- server(theta, sum_i a_i (y_i - theta)).

    Karimireddy et al. 2020, arXiv 1910.06378, Algorithm 1. Controls have the shapes of the
    parameters that train; buffers have none.

    option I   c_i <- grad F_i(theta), by one more pass over the client's data
    option II  c_i <- c_i - c + (theta - y_i) / (eta Q), Q steps and not epochs
    server     c <- c + sum over the clients trained of p_i (new c_i - old c_i)

    a [C] are the cohort's weights, p [N] those that `combine` gives to the whole population before
    round 1, under the cap of rounds. The paper's (and our default) are 1/C and 1/N. Other weights
    are our extension: c = sum_i p_i c_i holds whichever clients take part, because a client that is
    not drawn, or skipped for a_i = 0, keeps c_i. (Controls weighted by 1/N would lead to the
    minimiser of the *uniform* risk, whatever a is.) Public codes differ, see
    docs/methods/scaffold.md. With Adam, which option I allows, g_i(y) - c_i + c is Adam's gradient.
    Raises InputError for several local phases, for a `combine` that is no weighted mean, and for
    momentum or Adam with option II.
    """

    model: Model
    option: Option = "II"
    objective: Term = CrossEntropy()
    local: Local = Local()
    combine: Mean = Mean(Uniform())
    server: ServerOptimizer = Sgd()

    def __post_init__(self) -> None:
        check_name("SCAFFOLD option", self.option, ("I", "II"))
        if not isinstance(self.local, Local):
            raise InputError("a SCAFFOLD control belongs to one local phase; give one Local")
        if not isinstance(self.combine, Mean):
            raise InputError(f"SCAFFOLD's c is a weighted mean; give a Mean, not {self.combine}")
        check_fields(self)
        momentum = f"momentum {self.local.momentum}" if self.local.momentum else ""
        other = "Adam" if self.local.optimizer == "adam" else momentum
        if self.option == "II" and other:
            cure = 'Local(optimizer="sgd")' if other == "Adam" else "Local(momentum=0)"
            raise InputError(
                "SCAFFOLD option II takes (theta - y) / (lr * steps) for the mean gradient, wrong "
                f'with {other}; give {cure}, or use option="I"'
            )

    def init(self, params: Params, buffers: Params, table: Params) -> Parts:
        needs = self.combine.needs
        state = server_state(self.model, self.server, params, buffers, table, needs)
        # Weigh all clients once: c must remain a mean with the same weights in all rounds.
        population = {"weight": self.combine.weigh(state["table"])}
        control = zeros(self.model.trainable(params))
        return state | {"control": control, "population": population}

    def init_client(self, params: Params, buffers: Params, data: ClientData) -> Parts:
        control = zeros(self.model.trainable(params))
        return {"control": control, **self.objective.remember(params, buffers, data)}

    def phases(self) -> Mapping[str, Local]:
        one_pass = {"pass": replace(self.local, epochs=1, steps=None)}
        return numbered(self.local) | (one_pass if self.option == "I" else {})

    def mixes_counts(self) -> bool:
        """True if c is no plain mean: its weights then depend on the counts of all clients."""
        return not isinstance(self.combine.weights, Uniform)

    def weigh(self, server: Parts, ids: Tensor) -> Tensor:
        return self.combine.weigh(rows(server, ids))

    def broadcast(self, server: Parts, client: int) -> Parts:
        message = {k: server[k] for k in ("params", "buffers", "control")}
        return message | self.objective.hear(server)

    def client_update(
        self, message: Parts, state: Parts, data: ClientData, plans: Mapping[str, Plan]
    ) -> tuple[Parts, Parts]:
        start, buffers, old = message["params"], message["buffers"], state["control"]
        # c - c_i is constant during the phase, so compute it once.
        shift, phases = sub(message["control"], old), numbered(self.local)
        memory, trainable = heard(message, state), self.model.trainable
        end, end_buffers, loss = train_locally(
            self.model, self.objective, phases, start, buffers, memory, data, plans, Shift(shift)
        )
        # Option I takes one more pass over the data; option II uses how far training moved.
        if self.option == "I":
            frame = (start, buffers, context_of(start, buffers, memory, data), data, plans["pass"])
            new = trainable(pass_gradient(self.local, self.model, self.objective, *frame))
        else:
            new = travelled_gradient(trainable(start), trainable(end), shift, plans["train0"])
        update = update_of(self.model, start, end, end_buffers, loss, data) | {
            "control": sub(new, old)
        }
        return update, {"control": new, **self.objective.remember(end, end_buffers, data)}

    def sums(self, server: Parts, cohort: Params) -> Mapping[str, Tensor]:
        """Changes and buffers by the cohort's weights, controls by the population's."""
        return averaged(cohort) | {"control": _population(server, cohort)}

    def server_update(self, server: Parts, updates: Parts, seed: int) -> Parts:
        cohort = updates["cohort"]
        delta = total(updates, "delta", cohort["weight"])
        # Use the population's weights: with the cohort's, c would drift from sum_i p_i c_i.
        moved = total(updates, "control", _population(server, cohort))
        control = add(server["control"], moved)
        return fold(server, updates, delta, self.server) | {"control": control}

    def reveals(self) -> Mapping[str, str]:
        control = "the change of its control, an estimate of the gradient of all its data"
        return revealed(self.combine.needs) | {"control": control}


def _population(server: Parts, cohort: Params) -> Tensor:
    """p_i of the cohort's clients [C], at most the cap, because counts are only claims."""
    p = server["population"]["weight"]
    return capped(p, cap_of(cohort), p > 0)[cohort["id"]]
