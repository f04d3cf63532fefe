"""FedNova: clients that take more local steps do not get more influence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from fedshift.algorithms.fedavg import Extra, FedAvg, Training, one_phase
from fedshift.client.gradients import steps_taken
from fedshift.client.local import Local, Trained
from fedshift.errors import InputError
from fedshift.server.cap import cap_of, capped_sizes
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
class FedNova(Extra):
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

    def check(self, host: FedAvg) -> None:
        local = _phase(host)
        if local.optimizer != "sgd":
            raise InputError(
                "FedNova divides by how far unit gradients carry a client, which is known for SGD "
                f'and not for {local.optimizer}; give Local(optimizer="sgd")'
            )

    def after(self, host: FedAvg, training: Training, end: Trained) -> tuple[Parts, Parts]:
        # Count steps, not epochs: an epoch has more steps for a client with more examples.
        steps = steps_taken(training.plans["train0"])
        return {"normaliser": {"a": normaliser(steps, _phase(host).momentum)}}, {}

    def sums(self, host: FedAvg, server: Parts, cohort: Params) -> None:
        """Every reply is kept: each change is divided by its own number."""

    def gather(self, host: FedAvg, server: Parts, updates: Parts) -> Parts:
        cohort = updates["cohort"]
        weights, cap = cohort["weight"], cap_of(cohort)
        # clamp: the client reports this number, and a negative one would reverse others' changes.
        norm = updates["normaliser"]["a"].clamp(min=0)
        if cap < 1.0:  # do not trust reports: compute the number from the registered sizes
            norm = _implied_norm(_phase(host), server["table"]["n"][cohort["id"]]).to(norm.dtype)
        shares = weights * norm
        bounded = capped_sizes(shares, cap)
        # Not shares.sum() unless capped: this sum has the bits of runs without a cap.
        tau_eff = weights @ norm if bounded is shares else bounded.sum()
        # A client that took no step has a change of 0; divide it by 1, not by 0.
        scale = tau_eff / norm.where(norm > 0, 1.0)

        def scaled(v: Tensor) -> Tensor:
            return v * scale.to(v.dtype).view(-1, *[1] * (v.dim() - 1))

        return updates | {"delta": map_(scaled, updates["delta"])}

    def reveals(self, host: FedAvg) -> Mapping[str, str]:
        return {"normaliser": "how many steps it took, weighted"}


def _phase(host: FedAvg) -> Local:
    return one_phase(host, "FedNova counts the steps of one local phase")


def _implied_norm(local: Local, n: Tensor) -> Tensor:
    """||a_i||_1 [C] of clients that registered n [C] examples."""
    each = (n.double() / local.batch).ceil()
    fixed = local.steps
    steps = each * (local.epochs or 0) if fixed is None else fixed * (n > 0).double()
    return normaliser(steps, local.momentum)
