"""What most methods do alike, so that each method's file has only what it does differently.

`SharedModel` is for methods of one model, `Around` for methods that wrap another.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

from torch import Tensor

from fedshift.algorithms.base import Algorithm, Capabilities, LabelRules, ask, numbered
from fedshift.client.local import Local
from fedshift.client.objectives import Term
from fedshift.data import ClientData, Plan
from fedshift.model import Model
from fedshift.tree import Params, Parts


class SharedModel(ABC):
    """Defaults for methods whose clients all receive the server's whole model and train it.

    `FedAvg` does not inherit them: it is the method to read first, and complete in one file.
    """

    objective: Term
    local: Local | tuple[Local, ...]

    def init_client(self, params: Params, buffers: Params, data: ClientData) -> Parts:
        return self.objective.remember(params, buffers, data)

    def phases(self) -> Mapping[str, Local]:
        return numbered(self.local)

    def trains(self, weights: Tensor) -> Tensor:
        return weights > 0

    def broadcast(self, server: Parts, client: int) -> Parts:
        model = {"params": server["params"], "buffers": server["buffers"]}
        return model | self.objective.hear(server)

    def model_for(self, server: Parts, state: Parts) -> tuple[Params, Params]:
        return server["params"], server["buffers"]

    def trains_router(self) -> bool:
        """Whether the objective does."""
        return self.objective.trains_router()

    def at(self, t: int) -> Self:
        return self


@dataclass(frozen=True)
class Around(ABC):
    """A method that wraps another: everything that it does not define is `inner`'s.

    Capabilities are passed on here, in one place. A wrapper that forgot one would hide, for
    example, that its inner method trains a router.
    """

    inner: Algorithm

    @property
    def model(self) -> Model:
        """The network of `inner`."""
        return self.inner.model

    def init(self, params: Params, buffers: Params, table: Params) -> Parts:
        return self.inner.init(params, buffers, table)

    def init_client(self, params: Params, buffers: Params, data: ClientData) -> Parts:
        return self.inner.init_client(params, buffers, data)

    def phases(self) -> Mapping[str, Local]:
        return self.inner.phases()

    def weigh(self, server: Parts, ids: Tensor) -> Tensor:
        return self.inner.weigh(server, ids)

    def trains(self, weights: Tensor) -> Tensor:
        return self.inner.trains(weights)

    def broadcast(self, server: Parts, client: int) -> Parts:
        return self.inner.broadcast(server, client)

    def client_update(
        self, message: Parts, state: Parts, data: ClientData, plans: Mapping[str, Plan]
    ) -> tuple[Parts, Parts]:
        return self.inner.client_update(message, state, data, plans)

    def server_update(self, server: Parts, updates: Parts, seed: int) -> Parts:
        return self.inner.server_update(server, updates, seed)

    def model_for(self, server: Parts, state: Parts) -> tuple[Params, Params]:
        return self.inner.model_for(server, state)

    def reveals(self) -> Mapping[str, str]:
        return self.inner.reveals()

    def at(self, t: int) -> Algorithm:
        stage = self.inner.at(t)
        if not ask(stage, Capabilities.moves_server):
            return stage  # in this round `inner` trains no model that could be wrapped
        return self if stage is self.inner else replace(self, inner=stage)

    # `is_elementwise` is not passed on: it describes the `client_update` of the wrapper.

    def sums(self, server: Parts, cohort: Params) -> Mapping[str, Tensor]:
        """Those of `inner`."""
        return ask(self.inner, Capabilities.sums, server, cohort)

    def trains_router(self) -> bool:
        """Whether `inner` does."""
        return ask(self.inner, Capabilities.trains_router)

    def needs_classes(self) -> bool:
        """Whether `inner` does."""
        return ask(self.inner, Capabilities.needs_classes)

    def mixes_counts(self) -> bool:
        """Whether `inner` does."""
        return ask(self.inner, Capabilities.mixes_counts)

    def moves_server(self) -> bool:
        """Whether `inner` does."""
        return ask(self.inner, Capabilities.moves_server)

    def trained_model(self) -> Model | None:
        """That of `inner`."""
        return ask(self.inner, Capabilities.trained_model)

    def label_weights(self, server: Parts, ids: Tensor, weights: Tensor) -> Tensor | None:
        """Those of `inner`."""
        return ask(self.inner, Capabilities.label_weights, server, ids, weights)

    def most_sent(self, params: Params) -> int:
        """That of `inner`."""
        return ask(self.inner, Capabilities.most_sent, params)

    def label_rules(self) -> LabelRules | None:
        """Those of `inner`."""
        return ask(self.inner, Capabilities.label_rules)
