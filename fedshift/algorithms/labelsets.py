"""Label sets: clients have different labels, and may hide from one another which ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Literal

import torch
from torch import Tensor

from fedshift.algorithms.ditto import Ditto
from fedshift.algorithms.fedavg import FedAvg
from fedshift.algorithms.method import LabelRules, Wrapper
from fedshift.algorithms.scaffold import Scaffold
from fedshift.algorithms.steps import fold
from fedshift.arguments import check_fields
from fedshift.client.slots import (
    OwnLabels,
    check_slots,
    cut_as,
    local_labels,
    padded,
    reordered,
    rows_of_client,
)
from fedshift.data import ClientData, Plan
from fedshift.errors import InputError, check_name
from fedshift.server.cap import cap_of
from fedshift.server.combine import Mean
from fedshift.server.rows import (
    by_label,
    head_rows,
    holder_shares,
    in_slots,
    keep_rows,
    local_numbers,
    only_labels,
    row_mean,
    slot_table,
    wire_labels,
)
from fedshift.tree import Params, Parts, add

Mode = Literal["private", "public", "holders"]


@dataclass(frozen=True)
class LabelSets(Wrapper):
    """`inner` for clients with different label sets: Y_i are the labels of client i's examples.

        private   i is sent the body and the rows of Y_i of the head; softmax over Y_i
        holders   i is sent the whole model; softmax over all labels
        public    the same, and the server averages as `inner` does: the standard method
        server    body: sum_i a_i delta_i;  row y of the head: sum_{i in A_y} a_i delta_i(y) /
                  sum_{i in A_y} a_i, A_y the clients of the cohort that hold y ("public": all)

    Breitholtz, Listo Zec and Johansson 2025, "Federated learning with heterogeneous and private
    label sets", arXiv 2508.18774. A label is absent from a round if no client of positive weight
    has it: `server["absent"]` says which labels are ("now" [K] bool) and in how many rounds they
    were so far ("rounds" [K]). Except in "public" mode, the row of an absent label keeps its bits,
    whatever the server's optimiser does (only its moments change). If every client has all labels,
    every mode is `inner`, bit for bit.

    In private mode rows are sent in L slots, in an order drawn for each client. Empty slots are
    sent as 0, masked in the softmax, and never trained. A client numbers its own labels 0, 1, ...
    in ascending order. The first message is independent of other clients; later ones depend on sums
    over them, which show how many clients have each label. The server knows all Y_i, and every
    client knows L. A client must never receive the whole head, not even to score it.

    inner   FedAvg (with any objective, and `Scaffold` or no extra), or Ditto around it. SCAFFOLD's
            controls have rows like the head, over the population: c(y) = sum_{i: y in Y_i} p_i
            c_i(y) / sum_{i: y in Y_i} p_i. Ditto's personal models have only the rows of Y_i
    head    name prefixes of the last linear layer
    slots   L; None for the size of the largest label set
    seed    for the orders; keep it secret, because it can undo them

    Our additions: empty A_y, SCAFFOLD, Ditto, slots. Raises InputError for other methods, for a
    `combine` that is no weighted mean, and for parameters kept private; before round 1 for heads
    without one row per label; and, in private mode, in a client's first round if it was registered
    with more or fewer labels than it has. (Only the number is compared: which labels they are is
    never sent.) In the other modes the table's sets are taken as they are.
    """

    inner: FedAvg | Ditto
    mode: Mode = "private"
    head: tuple[str, ...] = ("head.",)
    slots: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_name("mode of label sets", self.mode, ("private", "public", "holders"))
        if self.slots is not None and not isinstance(self.slots, Integral):
            raise InputError(f"slots must be a whole number or left out, got {self.slots!r}")
        if self.slots is not None and self.mode != "private":
            raise InputError(
                f'slots = {self.slots} and mode = "{self.mode}": whole models travel; drop slots'
            )
        # Before `check_fields`, whose message would not say which methods are allowed.
        method = self._shared
        check_fields(self)
        if not isinstance(method.combine, Mean):
            raise InputError(
                f"rows are averaged over clients that hold them: give a Mean, not {method.combine}"
            )
        if method.share.private:
            raise InputError(
                f"the server averages rows of the head, and {list(method.share.private)} stay on "
                "the clients; leave share out"
            )

    def init(self, params: Params, buffers: Params, table: Params) -> Parts:
        if "labels" not in table:
            raise InputError('label sets need the table\'s "labels" [N, K]; see data.register')
        label_sets = table["labels"] > 0
        classes = label_sets.shape[1]
        head_rows(params, self.head, classes)
        sets = {"held": label_sets}
        if self.mode == "private":
            sets["slot"] = slot_table(label_sets, self.slots, self.seed)
        never = {"now": torch.zeros(classes).bool(), "rounds": torch.zeros(classes).long()}
        return self.inner.init(params, buffers, table) | {"sets": sets, "absent": never}

    def init_client(self, params: Params, buffers: Params, data: ClientData) -> Parts:
        if self.mode != "private":
            return self.inner.init_client(params, buffers, data)
        # Cut first: `inner` must not store rows of labels that the client does not have.
        sliced = rows_of_client(params, self._head_names(params), data)
        data = data._replace(y=local_labels(data)[0])
        return {"client": {"id": data.id}, **self.inner.init_client(sliced, buffers, data)}

    def broadcast(self, server: Parts, client: int) -> Parts:
        message = self.inner.broadcast(server, client)
        if self.mode != "private":
            return message
        names, labels = self._head_names(server["params"]), server["sets"]["slot"][client]
        sliced = {
            part: {k: in_slots(v, labels) if k in names else v for k, v in tree.items()}
            for part, tree in message.items()
        }
        local = local_numbers(labels, server["sets"]["held"][client])
        return sliced | {"slots": {"local": local}}

    def client_update(
        self, message: Parts, state: Parts, data: ClientData, plans: Mapping[str, Plan]
    ) -> tuple[Parts, Parts]:
        if self.mode != "private":
            return self.inner.client_update(message, state, data, plans)
        names, local = self._head_names(message["params"]), message["slots"]["local"]
        y, labels = local_labels(data)
        check_slots(local, labels, data)
        # Sort rows into the client's own order, empty slots last. The update is sorted back below.
        order = torch.where(local < 0, len(local), local).argsort(stable=True)
        inner_message = reordered({k: v for k, v in message.items() if k != "slots"}, names, order)
        slots = {"slots": {"held": torch.arange(len(local), device=local.device) < labels}}
        inner_state = padded(state, names, len(local)) | slots
        update, changed = self._with_masked_losses().client_update(
            inner_message, inner_state, data._replace(y=y), plans
        )
        return reordered(update, names, order.argsort()), cut_as(changed, names, state)

    def server_update(self, server: Parts, updates: Parts, seed: int) -> Parts:
        ids, weight = updates["cohort"]["id"], updates["cohort"]["weight"]
        label_sets = server["sets"]["held"][ids]
        # A client of weight 0 contributes nothing, so its labels do not count as present.
        absent = ~label_sets[weight > 0].any(0)
        absences = {"absent": {"now": absent, "rounds": server["absent"]["rounds"] + absent}}
        if self.mode == "public":
            return self.inner.server_update(server, updates, seed) | absences
        names, old = self._head_names(server["params"]), server["params"]
        delta = self._by_label(server, ids, updates["delta"])
        shares = holder_shares(weight, label_sets, cap_of(updates["cohort"]))
        delta = row_mean(weight, shares, delta, names)
        changed = fold(server, updates, delta, self._shared.server)
        # Restore absent rows after the optimiser, whose momentum moves them even if their change
        # is 0.
        changed["params"] = keep_rows(old, changed["params"], absent, names)
        return changed | absences | self._control(server, updates)

    def model_for(self, server: Parts, state: Parts) -> tuple[Params, Params]:
        params, buffers = self.inner.model_for(server, state)
        if self.mode == "private":
            label_set = server["sets"]["held"][state["client"]["id"]]
            params = only_labels(params, self._head_names(params), label_set)
        return params, buffers

    def reveals(self) -> Mapping[str, str]:
        parts = dict(self.inner.reveals())
        # Also in public mode: the server needs the sets to know which labels are absent.
        parts["register"] += "; which labels it holds, once, to the server alone"
        if self.mode == "private":
            parts["delta"] = (
                "the change of the body and of the head's rows for its own labels, in slots; who "
                "reads it can name the labels (AUC 1.00); another client learns from the sums how "
                "many clients hold each label (among ten an AUC of 0.71 for who holds what) and "
                "cannot tell which of them (0.50), unless it knows who takes part (0.90)"
            )
        return parts

    def sums(self, server: Parts, cohort: Params) -> Mapping[str, Tensor]:
        """Those of `inner` in public mode; none otherwise, because rows are averaged one by one."""
        return super().sums(server, cohort) if self.mode == "public" else {}

    def needs_classes(self) -> bool:
        """True: rows of the head belong to labels."""
        return True

    def label_rules(self) -> LabelRules:
        """The mode."""
        return {"mode": self.mode, "tune": "none", "tune_over": None}

    def mixes_counts(self) -> bool:
        """True with SCAFFOLD: a row of its c is a mean over all clients that have the label."""
        return bool(self._shared.extras) or super().mixes_counts()

    @property
    def _shared(self) -> FedAvg:
        """The method that trains the shared model."""
        method = self.inner.inner if isinstance(self.inner, Ditto) else self.inner
        if not isinstance(method, FedAvg) or {*map(type, method.extras)} - {Scaffold}:
            name = type(method).__name__
            raise InputError(
                "label sets are for FedAvg, without extras or with Scaffold, and Ditto around it, "
                f"not {name}; leave other extras out"
            )
        return method

    def _head_names(self, params: Params) -> tuple[str, ...]:
        return tuple(k for k in params if k.startswith(self.head))

    def _with_masked_losses(self) -> FedAvg | Ditto:
        """`inner` with every loss over the client's own labels."""
        shared = self._shared
        masked = replace(shared, objective=OwnLabels(shared.objective))
        if not isinstance(self.inner, Ditto):
            return masked
        return replace(self.inner, inner=masked, objective=OwnLabels(self.inner.objective))

    def _by_label(self, server: Parts, ids: Tensor, stacked: Params) -> Params:
        """Entries of a cohort with the head's rows ordered by label, as on the server."""
        names, labels = self._head_names(stacked), wire_labels(server, ids)
        classes = server["sets"]["held"].shape[1]
        return {k: by_label(v, labels, classes) if k in names else v for k, v in stacked.items()}

    def _control(self, server: Parts, updates: Parts) -> Parts:
        """SCAFFOLD's c, row by row over the population's holders; nothing for other methods."""
        if "control" not in updates:
            return {}
        ids, everyone = updates["cohort"]["id"], server["population"]["weight"]
        # Shares over the population, so that a client that is not drawn keeps its part of c.
        shares = holder_shares(everyone, server["sets"]["held"])[ids]
        new = self._by_label(server, ids, updates["control"])
        moved = row_mean(everyone[ids], shares, new, self._head_names(new))
        return {"control": add(server["control"], moved)}
