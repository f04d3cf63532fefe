"""FedNova: clients that take more local steps do not get more influence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from fedshift.algorithms.base import rows
from fedshift.algorithms.defaults import SharedModel
from fedshift.algorithms.steps import fold, heard, revealed, server_state, update_of
from fedshift.arguments import check_fields
from fedshift.client.gradients import steps_taken
from fedshift.client.local import Local, train_locally
from fedshift.client.objectives import CrossEntropy, Term
from fedshift.data import ClientData, Plan
from fedshift.errors import InputError
from fedshift.model import Model
from fedshift.server.cap import cap_of, capped_sizes
from fedshift.server.combine import Combine, Mean
from fedshift.server.optimizers import ServerOptimizer, Sgd
from fedshift.tree import Params, Parts, map_


def normaliser(steps: Tensor, momentum: float) -> Tensor:
    """||a||_1 of `steps` local steps: how far unit gradients move a client, divided by eta; [].

    tau for plain SGD; (tau - rho (1 - rho^tau) / (1 - rho)) / (1 - rho) with momentum rho, because
    the gradient of step s is applied 1 + rho + ... + rho^(tau - s) times. Wang et al. 2020,
    Section 4.
    """
    if not momentum:
        return steps
    rest = 1.0 - momentum
    return (steps - momentum * (1.0 - momentum**steps) / rest) / rest


@dataclass(frozen=True)
class FedNova(SharedModel):
    """theta <- server(theta, tau_eff sum_i p_i (theta_i - theta) / ||a_i||_1).

    Wang et al. 2020, arXiv 2007.07481, Section 5, with tau_eff = sum_i p_i ||a_i||_1 over the
    cohort and ||a_i||_1 as in `normaliser`; p [C] are the weights of `combine`, n_i/n by default.
    FedAvg's fixed points are those of sum_i p_i ||a_i||_1 F_i instead of sum_i p_i F_i.

    As in the authors' code, weight decay is part of the gradient, local momentum starts at zero in
    each round, and the server's momentum (`server`) acts on the combined step. Here a proximal term
    is part of the gradient, too; in their code it changes a_i, together with momentum.

    Under a cap (our extension) ||a_i||_1 is computed from registered sizes, whatever a client
    reports, and in tau_eff no client has more than the cap's share, see `capped_sizes`. Raises
    InputError for several local phases, because their learning rates differ, and for Adam, because
    ||a_i||_1 is not defined if steps are not sums of gradients.
    """

    model: Model
    objective: Term = CrossEntropy()
    local: Local = Local()
    combine: Combine = Mean()
    server: ServerOptimizer = Sgd()

    def __post_init__(self) -> None:
        # Check before `check_fields`, whose message would only say that a tuple does not fit.
        if not isinstance(self.local, Local):
            raise InputError("FedNova counts the steps of one local phase; give one Local")
        check_fields(self)
        if self.local.optimizer != "sgd":
            raise InputError(
                "FedNova divides by how far unit gradients carry a client, which is known for SGD "
                f'and not for {self.local.optimizer}; give Local(optimizer="sgd")'
            )

    def init(self, params: Params, buffers: Params, table: Params) -> Parts:
        return server_state(self.model, self.server, params, buffers, table, self.combine.needs)

    def weigh(self, server: Parts, ids: Tensor) -> Tensor:
        return self.combine.weigh(rows(server, ids))

    def client_update(
        self, message: Parts, state: Parts, data: ClientData, plans: Mapping[str, Plan]
    ) -> tuple[Parts, Parts]:
        start, buffers = message["params"], message["buffers"]
        memory = heard(message, state)
        end, end_buffers, loss = train_locally(
            self.model, self.objective, self.phases(), start, buffers, memory, data, plans
        )
        # Count steps, not epochs: an epoch has more steps for a client with more examples.
        norm = normaliser(steps_taken(plans["train0"]), self.local.momentum)
        update = update_of(self.model, start, end, end_buffers, loss, data) | {
            "normaliser": {"a": norm}
        }
        return update, self.objective.remember(end, end_buffers, data)

    def server_update(self, server: Parts, updates: Parts, seed: int) -> Parts:
        cohort = updates["cohort"]
        weights, cap = cohort["weight"], cap_of(cohort)
        # clamp: the client reports this number, and a negative one would reverse others' changes.
        norm = updates["normaliser"]["a"].clamp(min=0)
        if cap < 1.0:  # do not trust reports: compute the number from the registered sizes
            norm = self._implied_norm(server["table"]["n"][cohort["id"]]).to(norm.dtype)
        shares = weights * norm
        bounded = capped_sizes(shares, cap)
        # Not shares.sum() unless capped: this sum has the bits of runs without a cap.
        tau_eff = weights @ norm if bounded is shares else bounded.sum()
        # A client that took no step has a change of 0; divide it by 1, not by 0.
        scale = tau_eff / norm.where(norm > 0, 1.0)

        def scaled(v: Tensor) -> Tensor:
            return v * scale.to(v.dtype).view(-1, *[1] * (v.dim() - 1))

        delta = self.combine(weights, map_(scaled, updates["delta"]), seed)
        return fold(server, updates, delta, self.server)

    def _implied_norm(self, n: Tensor) -> Tensor:
        """||a_i||_1 [C] of clients that registered n [C] examples."""
        each = (n.double() / self.local.batch).ceil()
        fixed = self.local.steps
        steps = each * (self.local.epochs or 0) if fixed is None else fixed * (n > 0).double()
        return normaliser(steps, self.local.momentum)

    def reveals(self) -> Mapping[str, str]:
        return revealed(self.combine.needs) | {"normaliser": "how many steps it took, weighted"}
