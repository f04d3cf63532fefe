"""Agnostic federated learning: weights that follow the clients' losses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedshift.algorithms.fedavg import Extra, FedAvg, Training
from fedshift.algorithms.method import rows
from fedshift.arguments import NotNegative, check_positive
from fedshift.client.local import Local, context_of
from fedshift.client.objectives import CrossEntropy, Term, View
from fedshift.data import ClientData, Plan, take
from fedshift.errors import InputError
from fedshift.model import Model
from fedshift.server.cap import cap_of
from fedshift.server.combine import Mean
from fedshift.server.dual import NO_CAP, allocate
from fedshift.server.weights import BySize
from fedshift.sketch import sketched
from fedshift.tree import Params, Parts

# How losses are measured: in large batches, because no gradients are stored.
RISK = Local(epochs=1, batch=1000)


def project_simplex(v: Tensor, total: float = 1.0, most: Tensor | None = None) -> Tensor:
    """argmin_u ||u - v||^2 over 0 <= u <= most, sum u = total; v [D] -> u [D] in float64.

    most [D]; None for no limit. u = clip(v - tau, 0, most), where tau makes the sum right; computed
    exactly from the sorted entries in O(D log D). Raises InputError for an empty or non-finite v,
    or a total that is not positive.
    """
    if v.ndim != 1 or not len(v) or not bool(torch.isfinite(v).all()):
        raise InputError(f"a projection needs a vector of finite numbers, got {v}")
    check_positive("the simplex's total", total)
    # Scaled to a sum of 1, so that `allocate`, made for weights, can project.
    scores = v.double().numpy() / total
    ones = np.ones(len(scores))
    upper = NO_CAP * ones if most is None else most.double().numpy() / total
    # A common constant does not change the result; without the largest entry, digits are kept.
    return total * torch.from_numpy(allocate(scores - scores.max(), ones, upper))


def mean_risk(
    model: Model,
    risk: Term,
    params: Params,
    buffers: Params,
    context: Parts,
    data: ClientData,
    plan: Plan,
) -> Tensor:
    """F = (1/n) sum_j w_j l(theta; x_j, y_j) over all rows of the plan, a 0-d float64 tensor.

    In evaluation mode and without gradient, so that clients are compared on the same footing. The
    plan's batches cover every example once; padding steps have no weight.
    """
    total = torch.zeros((), dtype=torch.float64)
    with torch.no_grad():
        for s in range(plan.steps):
            batch = take(data, plan, s)
            out = model(params, buffers, batch.x)
            loss = risk(View(model, params, out, batch, context))
            total = total + plan.weight[s].sum().double() * loss.double()
    return total / plan.weight.sum().double().clamp(min=1.0)


@sketched
@dataclass(frozen=True)
class Afl(Extra):
    """min_theta max_lambda sum_d lambda_d F_d(theta), lambda on the simplex over D domains.

        theta <- server(theta, sum_i lambda_i (theta_i - theta))
        lambda <- P(lambda + gamma F(theta)),    lambda at first n_d / n

    Mohri, Sivek and Suresh 2019, "Agnostic federated learning", arXiv 1902.00146, with theta_i
    after local SGD in place of one gradient step. P projects on the simplex; F_d is the mean loss
    of the model *received*, over all local examples, in evaluation mode.

    gamma      step size of lambda, in 1/loss; 0 is FedAvg bit for bit
    domains    the domain of each client; by default every client is one. F_d is the mean over the
               domain's examples, and its clients share lambda_d in proportion to their sizes
    whole      what happens to lambda_d if clients of the domain are absent. False: their shares
               n_i / n_d of it are not used. True: it is divided among the clients present, in
               proportion to their sizes
    risk       the loss F that is reported; the objective may have regularising terms as well
    Raises InputError for a negative gamma, for domains that are not numbered 0..D-1, and for a host
    whose `combine` is not the default, which lambda replaces.

    The paper takes one gradient step at a time and returns the average of the iterates. Public
    codes: fair_flearn does the same from uniform lambda, FedTorch takes the last batch's loss. We
    keep the last iterate. With a sampled cohort S, weights are lambda restricted to S and
    renormalised, and P acts within S without changing the sum of lambda in S. (Losses are positive,
    so the unbiased estimate, M/|S| F_i for the sampled and 0 for the others, would favour the
    clients that were drawn.) Losses are only claims: under the round's cap, P projects on
    {lambda_d <= cap times the number of the domain's clients}.

    A client with lambda_i = 0 still reports its loss; otherwise its weight could never grow again.
    Its message has the (empty) part "idle", and it measures the loss without training.
    """

    gamma: NotNegative = 0.1
    domains: tuple[int, ...] | None = None
    whole: bool = False
    risk: Term = CrossEntropy()

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.risk.reads_data():
            raise InputError(f"risk {self.risk} reads no examples; give a loss, CrossEntropy()")
        # A gap would be a domain without clients, whose loss is never measured.
        numbers = set(self.domains or (0,))
        if numbers != set(range(len(numbers))):
            raise InputError(f"domains must be numbered 0..D-1 without gaps, got {sorted(numbers)}")

    def check(self, host: FedAvg) -> None:
        if host.combine != Mean() or host.share.private:
            raise InputError(
                "AFL's weights are its lambda, of losses of whole models; leave combine and share "
                "out"
            )

    def server(self, host: FedAvg, params: Params, buffers: Params, state: Parts) -> Parts:
        # Store n lambda, not lambda: it starts at the exact sizes, so that gamma = 0 is FedAvg.
        table = state["table"]
        mass = self._sum_by_domain(table["n"], torch.arange(len(table["n"])), table)
        return {"mixture": {"mass": mass}}

    def phases(self, host: FedAvg) -> Mapping[str, Local]:
        return {"risk": RISK}

    def mixture(self, server: Parts) -> Tensor:
        """lambda over the domains, [D] float64 on the simplex."""
        mass = server["mixture"]["mass"]
        return mass / mass.sum()

    def weigh(self, host: FedAvg, server: Parts, ids: Tensor) -> Tensor:
        # `whole` divides a domain's mass among the clients present only.
        mass = self._client_mass(server, ids if self.whole else None)[ids]
        # If all clients of the cohort are idle, nothing changes, and any weights will do.
        return BySize()({"n": mass} if bool(mass.any()) else rows(server, ids))

    def trains_all(self, host: FedAvg) -> bool:
        """True: idle clients report their loss, too."""
        return True

    def send(self, host: FedAvg, server: Parts, client: int) -> Parts:
        # A client without mass need not train, but must still report its loss.
        return {} if bool(self._client_mass(server)[client]) else {"idle": {}}

    def before(self, host: FedAvg, training: Training) -> Training:
        # Measure before training: the received model is the same for all clients.
        context = context_of(*training.received, training.memory, training.data)
        frame = (*training.received, context, training.data, training.plans["risk"])
        risk = mean_risk(host.model, self.risk, *frame)
        idle = risk if "idle" in training.message else None
        return replace(training, sent={**training.sent, "risk": {"loss": risk}}, idle=idle)

    def fold(
        self, host: FedAvg, server: Parts, updates: Parts, delta: Params
    ) -> tuple[Params, Parts]:
        return delta, {"mixture": {"mass": self._ascend(server, updates)}}

    def reveals(self, host: FedAvg) -> Mapping[str, str]:
        risk = "the mean loss of the model received, over the client's examples (sets its weight)"
        return {"risk": risk}

    def mixes_counts(self, host: FedAvg) -> bool:
        """True: lambda starts at shares of all clients' examples."""
        return True

    def _domain_of_clients(self, clients: int) -> Tensor:
        """The domain of each client, [M]."""
        if self.domains is None:
            return torch.arange(clients)
        if len(self.domains) != clients:
            raise InputError(
                f"domains names {len(self.domains)} clients, the federation has {clients}; "
                "give one number per client, in order of their ids"
            )
        return torch.tensor(self.domains)

    def _sum_by_domain(self, values: Tensor, ids: Tensor, table: Params) -> Tensor:
        """Sums over the domains of values [C] that belong to the clients `ids`, [D]."""
        index = self._domain_of_clients(len(table["n"]))
        return values.new_zeros(int(index.max()) + 1).index_add(0, index[ids], values)

    def _client_mass(self, server: Parts, among: Tensor | None = None) -> Tensor:
        """n lambda_i [M]: the mass of each domain, divided among its clients by their sizes.

        It is divided among the clients with the ids `among`, or among all clients for None.
        """
        table = server["table"]
        n, index = table["n"], self._domain_of_clients(len(table["n"]))
        ids = torch.arange(len(n)) if among is None else among
        sizes = self._sum_by_domain(n[ids], ids, table)
        # Multiply first: n_d n_i / n_d is then exactly n_i, so that gamma = 0 is exactly FedAvg.
        return server["mixture"]["mass"][index] * n / sizes[index].clamp(min=1.0)

    def _ascend(self, server: Parts, updates: Parts) -> Tensor:
        """n lambda [D] after the step; it changes in domains of which the cohort has examples."""
        mass, table, ids = server["mixture"]["mass"], server["table"], updates["cohort"]["id"]
        n = table["n"][ids]
        sizes = self._sum_by_domain(n, ids, table)
        present = sizes > 0
        total = float(mass[present].sum())
        # gamma = 0 must not change a bit of lambda; a cohort without mass has nothing to move.
        if not self.gamma or not total:
            return mass
        losses = (
            self._sum_by_domain(n * updates["risk"]["loss"], ids, table)[present] / sizes[present]
        )
        new_mass = mass.clone()
        # `mass` is N lambda, with N the examples of all clients, so multiply the step by N, too.
        step = self.gamma * float(table["n"].sum())
        most = self._largest_shares(updates["cohort"], n > 0, table)
        most = None if most is None else total * most[present]
        new_mass[present] = project_simplex(mass[present] + step * losses, total, most)
        return new_mass

    def _largest_shares(self, cohort: Params, able: Tensor, table: Params) -> Tensor | None:
        """The largest share of each domain [D], cap times its clients with examples; or None."""
        cap = cap_of(cohort)
        if cap >= 1.0:
            return None
        return max(cap, 1.0 / int(able.sum())) * self._sum_by_domain(
            able.double(), cohort["id"], table
        )
