"""Any method, with examples weighted by their labels towards the target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedshift.algorithms.method import Wrapper, is_elementwise, rows
from fedshift.algorithms.steps import with_labels
from fedshift.arguments import check_choices, check_fields
from fedshift.data import ClientData, Plan
from fedshift.errors import InputError
from fedshift.real import described
from fedshift.server.label_weights import check_reached, node_ratios, ratios
from fedshift.server.shares import label_shares
from fedshift.tree import Params, Parts

Ratio = Literal["pooled", "node"]


@dataclass(frozen=True)
class LabelWeights(Wrapper):
    """`inner`, where an example of label y on client i counts w_iy times in the loss.

    w_iy = T_y n_i / (a_i n_y), with a_i the client's weight in the round and n_y the number of
    examples of label y on all clients of the round. Together they have the label shares of the
    target, even if no mixture of clients has them. With weights by size w_iy is T_y / p_y, where p
    are the pooled label shares.

    target  T [K]
    clip    the largest w_iy, 1 or more, or inf. If it is reached, label shares differ from T
    ratio   "node": w_iy = T_y / S_iy, so that each client has the target's label shares by itself

    The message has the part "label_weights": w [K], 0 for labels that the client lacks; so a client
    learns something about T for its own labels. A client without a label of the target trains on
    nothing: give `inner` weights that leave it out, `fedshift.server.label_weights.JointLabels`.

    Raises InputError for an invalid target, one whose number of labels differs from the clients',
    one of which no client has a label, and a clip below 1.
    """

    target: tuple[float, ...]
    clip: float = 10.0
    ratio: Ratio = "pooled"

    def __post_init__(self) -> None:
        check_fields(self)
        label_shares(self.target)
        check_choices(self)
        if not self.clip >= 1.0:
            raise InputError(
                f"clip must be 1 or more, or inf for none, as weights of examples are 1 in the "
                f"mean; got {described(self.clip)}"
            )

    def init(self, params: Params, buffers: Params, table: Params) -> Parts:
        labels, state = table["labels"], self.inner.init(params, buffers, table)
        if labels.shape[1] != len(self.target):
            raise InputError(
                f"the target has {len(self.target)} labels, and clients register "
                f"{labels.shape[1]}; give T one share per label"
            )
        # `label_weights` needs label counts, whatever columns `inner` keeps.
        return state | {"table": state["table"] | {"labels": labels}}

    def broadcast(self, server: Parts, client: int) -> Parts:
        cohort = server["cohort"]
        # Compute all rows [C, K], because they depend on sums over the cohort, and send one.
        place = int((cohort["id"] == client).nonzero()[0, 0])
        w = self.label_weights(server, cohort["id"], cohort["weight"])[place]
        return self.inner.broadcast(server, client) | {"label_weights": {"w": w}}

    def label_weights(self, server: Parts, ids: Tensor, weights: Tensor) -> Tensor:
        """w [C, K] of the clients `ids`, which have these weights [C] in the round."""
        target = torch.tensor(self.target, dtype=torch.float64)
        labels = rows(server, ids)["labels"]
        node = self.ratio == "node"
        w = node_ratios(labels, target) if node else ratios(labels, target, weights)
        if not w.any():  # by chance, in a small cohort, or because no client has a target's label
            check_reached(server["table"]["labels"], target)
        return w.clamp(max=self.clip)

    def client_update(
        self, message: Parts, state: Parts, data: ClientData, plans: Mapping[str, Plan]
    ) -> tuple[Parts, Parts]:
        # Index the last axis, because clients may be stacked: w [C, K] and y [C, n].
        w = message["label_weights"]["w"].to(data.w.dtype).gather(-1, data.y)
        rest = {k: v for k, v in message.items() if k != "label_weights"}
        return self.inner.client_update(rest, state, data._replace(w=data.w * w), plans)

    def is_elementwise(self) -> bool:
        return is_elementwise(self.inner.client_update)

    def reveals(self) -> Mapping[str, str]:
        return with_labels(self.inner.reveals())
