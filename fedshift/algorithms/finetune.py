"""Fine-tuning: a federated method first, then every client trains alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedshift.algorithms.method import Method, Wrapper, numbered
from fedshift.arguments import check_fields
from fedshift.client.local import Local, train_locally
from fedshift.client.objectives import CrossEntropy, Term
from fedshift.client.origin import check_personal
from fedshift.data import ClientData, Plan
from fedshift.errors import InputError
from fedshift.tree import Params, Parts, map_


@dataclass(frozen=True)
class FineTune(Wrapper):
    """`inner` in rounds 1, ..., `after`; in later ones v_i <- local SGD on F_i from v_i.

    v_i starts at the model that `inner` would serve on client i after round `after`. When a client
    is drawn for the first time in a tuning round, it receives `inner`'s message; later messages are
    empty. In tuning rounds a client sends only its report. A client that is not drawn keeps serving
    `inner`'s model. Schedules continue: rounds are counted over the whole run.

    tune       one phase of plain SGD, or several in turn (the head first, then all)
    objective  the loss of the tuning rounds. A term with a memory reads what `inner` stores for it,
               as of the last round of `inner`

    `inner.model_for` must need no more from the server than `inner.broadcast` sends. Raises
    InputError unless `after` is 0 or more, and for private label sets. after = 0 takes the same
    steps as `LocalOnly`.
    """

    inner: Method
    after: int
    tune: Local | tuple[Local, ...] = Local()
    objective: Term = CrossEntropy()

    def __post_init__(self) -> None:
        check_fields(self)
        if self.after < 0:
            raise InputError(f"fine-tuning after round {self.after}; give 0 or more rounds")
        check_personal(self.objective)
        rules = self.inner.label_rules()
        if rules is not None and rules["mode"] == "private":
            raise InputError(
                "fine-tuning starts at the model that a client would serve, and with private label "
                'sets the server alone can put it together; give LabelSets mode="holders" or '
                '"public"'
            )

    def init(self, params: Params, buffers: Params, table: Params) -> Parts:
        none = torch.zeros(len(table["n"]), dtype=torch.bool)
        return self.inner.init(params, buffers, table) | {"tuned": {"client": none}}

    def init_client(self, params: Params, buffers: Params, data: ClientData) -> Parts:
        # Copy: `inner` may store the same tensors, and safetensors refuses shared memory.
        return self.inner.init_client(params, buffers, data) | {
            "personal": map_(torch.clone, params),
            "personal_buffers": map_(torch.clone, buffers),
            "tuned": {"done": torch.zeros((), dtype=torch.bool)},
        }

    def phases(self) -> Mapping[str, Local]:
        return numbered(self.tune, "personal")

    def weigh(self, server: Parts, ids: Tensor) -> Tensor:
        return self._last_stage().weigh(server, ids)

    def trains(self, weights: Tensor) -> Tensor:
        return torch.ones_like(weights, dtype=torch.bool)

    def broadcast(self, server: Parts, client: int) -> Parts:
        has_started = bool(server["tuned"]["client"][client])
        # A client that has begun tuning continues from its own model.
        return {} if has_started else self._last_stage().broadcast(server, client)

    def client_update(
        self, message: Parts, state: Parts, data: ClientData, plans: Mapping[str, Plan]
    ) -> tuple[Parts, Parts]:
        personal = state["personal"], state["personal_buffers"]
        # The message is empty if this client has begun tuning: then go on from its own model.
        start, buffers = self._last_stage().model_for(message, state) if message else personal
        end, end_buffers, loss = train_locally(
            self.model, self.objective, self.phases(), start, buffers, state, data, plans
        )
        return {"report": {"id": data.id, "loss": loss}}, {
            "personal": end,
            "personal_buffers": end_buffers,
            "tuned": {"done": torch.ones((), dtype=torch.bool)},
        }

    def server_update(self, server: Parts, updates: Parts, seed: int) -> Parts:
        tuned = server["tuned"]["client"].clone()  # a method never writes to its arguments
        tuned[updates["cohort"]["id"]] = True
        return {"tuned": {"client": tuned}}

    def model_for(self, server: Parts, state: Parts) -> tuple[Params, Params]:
        if bool(state["tuned"]["done"]):
            return state["personal"], state["personal_buffers"]
        return self._last_stage().model_for(server, state)

    def reveals(self) -> Mapping[str, str]:
        always, inner = ("report", "evaluation", "register"), self.inner.reveals()
        until = ", until tuning begins"
        # With after = 0 there are no rounds of `inner`, and its parts are never sent.
        early = {k: v + until for k, v in inner.items() if k not in always and self.after}
        return early | {k: inner[k] for k in always if k in inner}

    def sums(self, server: Parts, cohort: Params) -> Mapping[str, Tensor]:
        """None: clients send only reports."""
        return {}

    def trains_router(self) -> bool:
        """Whether the inner method does, before tuning begins."""
        return self.after > 0 and self.inner.trains_router()

    def moves_server(self) -> bool:
        """False: clients tune models of their own."""
        return False

    def at(self, t: int) -> Method:
        return self if t > self.after else self.inner.at(t)

    def _last_stage(self) -> Method:
        """The stage of `inner` whose model is tuned."""
        stage = self.inner.at(max(self.after, 1))
        # FedDisk's first rounds, for example, train only a density: then tune `inner`'s own model.
        return stage if stage.moves_server() else self.inner
