"""Rounds before a method's own: clients fit densities, then weigh their examples by them.

The server's state has the parts "density", the global one, and "importance": the clients' sizes
n [N] and the effective sizes of their weights ess [N]. A client's state has "density", its own, and
"importance", the weights a [n].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from fedshift.algorithms.base import Algorithm, Capabilities, LabelRules, ask, numbered
from fedshift.client.importance import (
    NegativeLogDensity,
    Ratio,
    bounded,
    effective_size,
    filled,
    live,
)
from fedshift.client.local import Local, train_locally
from fedshift.data import ClientData, Plan
from fedshift.errors import TrainingError
from fedshift.model import Model
from fedshift.server.weights import BySize
from fedshift.tree import Params, Parts, add, sub, weighted_sum


class Step(Protocol):
    """What a round before a method's first does; the model stays as it is."""

    def trained_model(self) -> Model | None:
        """The network whose parameters are trained and sent; None if there is none."""

    def phases(self) -> Mapping[str, Local]:
        """The local phases, by name."""

    def tell(self, server: Parts, client: int) -> Parts:
        """The message to one client, besides the global density (its "params")."""

    def work(
        self, message: Parts, state: Parts, data: ClientData, plans: Mapping[str, Plan]
    ) -> tuple[Parts, Parts]:
        """(update, changed parts of the client's state)."""

    def fold(self, server: Parts, updates: Parts) -> Parts:
        """The changed parts of the server's state."""


@dataclass(frozen=True)
class FitDensities:
    """p <- p + sum_i a_i (p_i - p) and q_i <- local training from q_i, on the same batches.

    q_i moves by the rounded difference, as p does: a federation of equal clients, or of one, has
    p = q_i to the last bit.
    """

    density: Model
    local: Local

    def trained_model(self) -> Model:
        return self.density

    def phases(self) -> Mapping[str, Local]:
        return numbered(self.local, "density")

    def tell(self, server: Parts, client: int) -> Parts:
        return {}

    def work(
        self, message: Parts, state: Parts, data: ClientData, plans: Mapping[str, Plan]
    ) -> tuple[Parts, Parts]:
        def trained(start: Params) -> tuple[Params, Tensor]:
            phases, term = self.phases(), NegativeLogDensity()
            end = train_locally(self.density, term, phases, start, {}, {}, data, plans)
            trainable = self.density.trainable
            return sub(trainable(end.params), trainable(start)), end.loss

        old = state["density"]
        delta, loss = trained(message["params"])
        own_change, _ = trained(old)
        # Only p's change is sent; q_i stays on the client.
        update = {"delta": delta, "report": {"id": data.id, "loss": loss}}
        return update, {"density": old | add({k: old[k] for k in own_change}, own_change)}

    def fold(self, server: Parts, updates: Parts) -> Parts:
        delta = weighted_sum(updates["cohort"]["weight"], updates["delta"])
        old = server["density"]
        return {"density": old | add({k: old[k] for k in delta}, delta)}


@dataclass(frozen=True)
class WeighExamples:
    """a_i(x_j) from the two densities, computed once; the report has their effective size."""

    density: Model
    ratio: Ratio
    most: float
    least_ess: float

    def trained_model(self) -> None:
        return None

    def phases(self) -> Mapping[str, Local]:
        return self.ratio.phases()

    def tell(self, server: Parts, client: int) -> Parts:
        n = server["importance"]["n"]
        return {"share": {"least": n[client] / n.sum()}}

    def work(
        self, message: Parts, state: Parts, data: ClientData, plans: Mapping[str, Plan]
    ) -> tuple[Parts, Parts]:
        pair = message["params"], state["density"]
        whole = filled(data)
        log_ratio, loss = self.ratio(self.density, *pair, whole, plans)
        a = bounded(log_ratio, live(whole), message["share"]["least"], self.most)
        report = {"id": data.id, "loss": loss, "ess": effective_size(a)}
        return {"report": report}, {"importance": {"a": a[: len(data.x)]}}

    def fold(self, server: Parts, updates: Parts) -> Parts:
        importance, ids = server["importance"], updates["cohort"]["id"]
        ess = importance["ess"].index_copy(
            0, ids, updates["report"]["ess"].to(importance["ess"].dtype)
        )
        for i in ids.tolist():
            self._check(i, float(ess[i]), float(importance["n"][i]), float(importance["n"].sum()))
        return {"importance": importance | {"ess": ess}}

    def _check(self, client: int, ess: float, n: float, total: float) -> None:
        if ess < self.least_ess * n:
            raise TrainingError(
                f"client {client}: the importance weights of its {n:.0f} examples, each from "
                f"{n / total:.3g} to {self.most:g}, are worth {ess:.1f} ({100 * ess / n:.0f} %), "
                f"less than least_ess = {self.least_ess:g} allows. Its density may have little in "
                "common with everybody's, or be badly fitted: fit for more rounds "
                "(density_rounds), or lower least_ess if such weights are wanted; in feddisk "
                "lower temper or most, too, for weights that differ less"
            )


@dataclass(frozen=True)
class Before:
    """A round before a method's first, as an algorithm; everything else is the method's."""

    method: Algorithm
    step: Step

    @property
    def model(self) -> Model:
        """The method's network."""
        return self.method.model

    def trained_model(self) -> Model | None:
        """The step's network."""
        return ask(self.step, Capabilities.trained_model)

    def init(self, params: Params, buffers: Params, table: Params) -> Parts:
        return self.method.init(params, buffers, table)

    def init_client(self, params: Params, buffers: Params, data: ClientData) -> Parts:
        return self.method.init_client(params, buffers, data)

    def phases(self) -> Mapping[str, Local]:
        return self.step.phases()

    def weigh(self, server: Parts, ids: Tensor) -> Tensor:
        return BySize()({"n": server["importance"]["n"][ids]})

    def trains(self, weights: Tensor) -> Tensor:
        return weights > 0

    def broadcast(self, server: Parts, client: int) -> Parts:
        return {"params": server["density"], **self.step.tell(server, client)}

    def client_update(
        self, message: Parts, state: Parts, data: ClientData, plans: Mapping[str, Plan]
    ) -> tuple[Parts, Parts]:
        return self.step.work(message, state, data, plans)

    def server_update(self, server: Parts, updates: Parts, seed: int) -> Parts:
        return self.step.fold(server, updates)

    def model_for(self, server: Parts, state: Parts) -> tuple[Params, Params]:
        return self.method.model_for(server, state)

    def reveals(self) -> Mapping[str, str]:
        return self.method.reveals()

    def sums(self, server: Parts, cohort: Params) -> Mapping[str, Tensor]:
        """None: the step needs every client's reply."""
        return {}

    def trains_router(self) -> bool:
        """Whether the method does."""
        return ask(self.method, Capabilities.trains_router)

    def moves_server(self) -> bool:
        """It does not: only the density is sent."""
        return False

    def label_rules(self) -> LabelRules | None:
        """Those of the method."""
        return ask(self.method, Capabilities.label_rules)

    def at(self, t: int) -> Algorithm:
        return self.method.at(t)
