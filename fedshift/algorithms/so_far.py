"""Any method with FedPALS weights that match the target over all rounds together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedshift.algorithms.method import Wrapper, rows
from fedshift.algorithms.steps import with_labels
from fedshift.arguments import check_fields
from fedshift.server.weights import Pals, check_rule, shares_of, weights_so_far
from fedshift.tree import Params, Parts


@dataclass(frozen=True)
class SoFar(Wrapper):
    """`inner`, with weights for the target plus what earlier rounds lacked: see `weights_so_far`.

    D <- D + T - S^T a after every round, where a are its weights. A cohort that lacks a label
    leaves a debt, which later cohorts pay back if they can. This is for rounds with some of the
    clients: if all take part in every round, the weights are those of the rule.

    rule  FedPALS' rule, with the squared distance

    The server's part "mixed" has the debt [K] and the number of rounds. Clients send no more than
    with `rule`. Raises InputError for a rule whose distance is not squared.
    """

    rule: Pals

    def __post_init__(self) -> None:
        check_fields(self)
        check_rule(self.rule)

    def init(self, params: Params, buffers: Params, table: Params) -> Parts:
        state = self.inner.init(params, buffers, table)
        mixed = {
            "debt": torch.zeros(len(self.rule.target), dtype=torch.float64),
            "rounds": torch.zeros((), dtype=torch.int64),
        }
        # `weigh` needs label counts, whatever columns `inner` keeps.
        return state | {"mixed": mixed, "table": state["table"] | {"labels": table["labels"]}}

    def weigh(self, server: Parts, ids: Tensor) -> Tensor:
        mixed = server["mixed"]
        debt, rounds = mixed["debt"].numpy(), int(mixed["rounds"])
        solved = weights_so_far(self.rule, rows(server, ids), debt, rounds)
        # Copy: the first round's array is cached, and a tensor that shares it could be written to.
        return torch.tensor(solved.weights.tolist(), dtype=torch.float64)

    def server_update(self, server: Parts, updates: Parts, seed: int) -> Parts:
        cohort = updates["cohort"]
        shares = shares_of(rows(server, cohort["id"]))
        mixture = torch.from_numpy(np.asarray(cohort["weight"].numpy() @ shares))
        target = torch.tensor(self.rule.target, dtype=torch.float64)
        mixed = {
            "debt": server["mixed"]["debt"] + target - mixture,
            "rounds": server["mixed"]["rounds"] + 1,
        }
        return self.inner.server_update(server, updates, seed) | {"mixed": mixed}

    def reveals(self) -> Mapping[str, str]:
        return with_labels(self.inner.reveals())
