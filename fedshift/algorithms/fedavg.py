"""FedAvg, the methods that its fields describe, and what other methods do in addition."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedshift.algorithms.method import Method, numbered, rows
from fedshift.algorithms.steps import averaged, fold, heard, revealed, server_state, update_of
from fedshift.arguments import check_choices, check_fields
from fedshift.client.local import Local, Oracle, Trained, train_locally
from fedshift.client.objectives import CrossEntropy, Term
from fedshift.client.sharing import Share
from fedshift.data import ClientData, Plan
from fedshift.errors import InputError
from fedshift.model import Model
from fedshift.server.combine import Combine, Mean, combined
from fedshift.server.optimizers import ServerOptimizer, Sgd
from fedshift.tree import Params, Parts


@dataclass(frozen=True)
class Training:
    """One client's training: what it was given, and what `Extra.before` made of that.

    received   the whole model as received, with the client's private part; (parameters, buffers)
    start      the model to train from
    memory     what terms may read beside the model: the state, and the message without the model
    sent, kept parts that are added to the update and to the changed state
    idle       the loss [] to report if nothing is to be trained; None trains
    """

    message: Parts
    state: Parts
    data: ClientData
    plans: Mapping[str, Plan]
    received: tuple[Params, Params]
    start: tuple[Params, Params]
    memory: Parts
    objective: Term
    oracles: tuple[Oracle, ...] = ()
    sent: Parts = field(default_factory=dict)
    kept: Parts = field(default_factory=dict)
    idle: Tensor | None = None


@dataclass(frozen=True)
class Extra:
    """What a method does beside FedAvg: hooks that add to what `FedAvg` does; by default nothing.

    `host` is the `FedAvg` that has the extra. Hooks are pure, as all of `Method`. Parts that a hook
    returns replace those of the same name. Fields are checked by their annotations when it is made.
    """

    def __post_init__(self) -> None:
        check_fields(self)
        check_choices(self)

    def check(self, host: FedAvg) -> None:
        """Raise InputError for a host whose fields do not fit."""

    def server(self, host: FedAvg, params: Params, buffers: Params, state: Parts) -> Parts:
        """Further parts of the server's first `state`."""
        return {}

    def client(self, host: FedAvg, params: Params, buffers: Params, data: ClientData) -> Parts:
        """Further parts of a client's first state."""
        return {}

    def phases(self, host: FedAvg) -> Mapping[str, Local]:
        """Further phases to draw plans for; `before` and `after` take the passes."""
        return {}

    def weigh(self, host: FedAvg, server: Parts, ids: Tensor) -> Tensor | None:
        """Weights [C] in place of those of `host.combine`; None leaves these."""
        return None

    def trains_all(self, host: FedAvg) -> bool:
        """Whether clients of weight 0 are contacted, too."""
        return False

    def send(self, host: FedAvg, server: Parts, client: int) -> Parts:
        """Further parts of the message."""
        return {}

    def before(self, host: FedAvg, training: Training) -> Training:
        """What to change before a client trains: where it starts, its objective, oracles."""
        return training

    def after(self, host: FedAvg, training: Training, end: Trained) -> tuple[Parts, Parts]:
        """(further parts of the update, further parts of the client's state)."""
        return {}, {}

    def sums(self, host: FedAvg, server: Parts, cohort: Params) -> Mapping[str, Tensor] | None:
        """Further parts that need only be summed, as `Method.sums`; None keeps every reply."""
        return {}

    def gather(self, host: FedAvg, server: Parts, updates: Parts) -> Parts:
        """The replies as `host.combine` is to have them."""
        return updates

    def fold(
        self, host: FedAvg, server: Parts, updates: Parts, delta: Params
    ) -> tuple[Params, Parts]:
        """(the change to apply, from the combined one, further changed parts of the server)."""
        return delta, {}

    def model_for(self, host: FedAvg, server: Parts, state: Parts) -> tuple[Params, Params] | None:
        """The model that a client serves, where it is not the host's."""
        return None

    def reveals(self, host: FedAvg) -> Mapping[str, str]:
        """What further parts of the update are."""
        return {}

    def needs_classes(self, host: FedAvg) -> bool:
        """As `Method.needs_classes`."""
        return False

    def mixes_counts(self, host: FedAvg) -> bool:
        """As `Method.mixes_counts`."""
        return False


@dataclass(frozen=True)
class FedAvg(Method):
    """theta <- server(theta, sum_i a_i (theta_i - theta)), where theta_i is client i's local model.

    McMahan et al. 2017, Algorithm 1, with a_i = n_i / n over the cohort by default. Its fields are
    the axes along which most published methods differ from it:

    objective  local loss; `CrossEntropy() + Proximal(mu)` is FedProx
    local      one phase of local SGD, or several in turn
    share      which parameters stay on the client
    combine    how changes are combined, by which weights; `Mean(Pals(T, ess=0.5))` is FedPALS
    server     the server's optimiser
    extras     what else a method does: `Scaffold()`, `FedNova()`, `FedPac()`, ...

    >>> import torch
    >>> from fedshift.client.objectives import CrossEntropy, Proximal
    >>> model = fs.Model(torch.nn.Linear(4, 3))
    >>> fedprox = fs.FedAvg(model, CrossEntropy() + Proximal(0.1), fs.Local(lr=0.05, epochs=2))

    Floating buffers are averaged with the same weights, as values, not as changes (so that
    variances stay non-negative). Counters take the largest value among clients of positive weight;
    published codes average them as floats.
    """

    model: Model
    objective: Term = CrossEntropy()
    local: Local | tuple[Local, ...] = Local()
    share: Share = Share()
    combine: Combine = Mean()
    server: ServerOptimizer = Sgd()
    extras: tuple[Extra, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)
        for extra in self.extras:
            extra.check(self)

    def init(self, params: Params, buffers: Params, table: Params) -> Parts:
        # Check before round 1: a misspelt prefix would silently share everything.
        self.share.check([*params, *buffers])
        shared = self.share.shared(params), self.share.shared(buffers)
        state = server_state(self.model, self.server, *shared, table, self.combine.needs)
        for extra in self.extras:
            state = state | extra.server(self, params, buffers, state)
        return state

    def init_client(self, params: Params, buffers: Params, data: ClientData) -> Parts:
        state = self._kept(params, buffers, data)
        for extra in self.extras:
            state = state | extra.client(self, params, buffers, data)
        return state

    def phases(self) -> Mapping[str, Local]:
        phases = numbered(self.local)
        for extra in self.extras:
            phases = phases | dict(extra.phases(self))
        return phases

    def weigh(self, server: Parts, ids: Tensor) -> Tensor:
        for extra in self.extras:
            if (weights := extra.weigh(self, server, ids)) is not None:
                return weights
        return self.combine.weigh(rows(server, ids))

    def trains(self, weights: Tensor) -> Tensor:
        # A private part must be trained even if the client has weight 0 in the shared part.
        every = bool(self.share.private) or any(e.trains_all(self) for e in self.extras)
        return torch.ones_like(weights, dtype=torch.bool) if every else weights > 0

    def broadcast(self, server: Parts, client: int) -> Parts:
        message = super().broadcast(server, client) | self.objective.hear(server)
        for extra in self.extras:
            message = message | extra.send(self, server, client)
        return message

    def client_update(
        self, message: Parts, state: Parts, data: ClientData, plans: Mapping[str, Plan]
    ) -> tuple[Parts, Parts]:
        model = message["params"] | state["private"], message["buffers"] | state["private_buffers"]
        memory = heard(message, state)
        training = Training(message, state, data, plans, model, model, memory, self.objective)
        for extra in self.extras:
            training = extra.before(self, training)
        if training.idle is not None:
            idle = training.idle.to(data.w.dtype)
            # A change of exactly 0, so that the reply has the same form as the others.
            return self._update(training, Trained(*training.received, idle)), {}
        end = train_locally(
            self.model, training.objective, numbered(self.local), *training.start,
            training.memory, data, plans, *training.oracles,
        )  # fmt: skip
        update = self._update(training, end)
        changed = {**training.kept, **self._kept(end.params, end.buffers, data)}
        for extra in self.extras:
            sent, kept = extra.after(self, training, end)
            update, changed = update | sent, changed | kept
        return update, changed

    def is_elementwise(self) -> bool:
        return not self.extras

    def sums(self, server: Parts, cohort: Params) -> Mapping[str, Tensor]:
        """Changes and buffers, unless `combine` needs each client's, as a median does."""
        parts = averaged(cohort) if isinstance(self.combine, Mean) else {}
        for extra in self.extras:
            further = extra.sums(self, server, cohort)
            if further is None:
                return {}
            parts = parts | dict(further)
        return parts

    def server_update(self, server: Parts, updates: Parts, seed: int) -> Parts:
        for extra in self.extras:
            updates = extra.gather(self, server, updates)
        delta, changed = combined(self.combine, updates, seed), dict[str, Params]()
        for extra in self.extras:
            delta, parts = extra.fold(self, server, updates, delta)
            changed |= parts
        return fold(server, updates, delta, self.server) | changed

    def model_for(self, server: Parts, state: Parts) -> tuple[Params, Params]:
        for extra in self.extras:
            if (model := extra.model_for(self, server, state)) is not None:
                return model
        return server["params"] | state["private"], server["buffers"] | state["private_buffers"]

    def reveals(self) -> Mapping[str, str]:
        parts = revealed(self.combine.needs)
        for extra in self.extras:
            parts = parts | dict(extra.reveals(self))
        return parts

    def trains_router(self) -> bool:
        """Whether the objective does."""
        return self.objective.trains_router()

    def needs_classes(self) -> bool:
        """Whether an extra does."""
        return any(extra.needs_classes(self) for extra in self.extras)

    def mixes_counts(self) -> bool:
        """Whether an extra does."""
        return any(extra.mixes_counts(self) for extra in self.extras)

    def _kept(self, params: Params, buffers: Params, data: ClientData) -> Parts:
        """What stays on the client of a model: its private part, and what the objective needs."""
        return {
            "private": self.share.kept(params),
            "private_buffers": self.share.kept(buffers),
            **self.objective.remember(params, buffers, data),
        }

    def _update(self, training: Training, end: Trained) -> Parts:
        """What leaves the client: of what the server sent, how it has changed."""
        start, sent_buffers = training.message["params"], training.message["buffers"]
        ends = {k: end.params[k] for k in start}, {k: end.buffers[k] for k in sent_buffers}
        return update_of(self.model, start, *ends, end.loss, training.data) | training.sent


def one_phase(host: FedAvg, why: str) -> Local:
    """The host's local phase. Raises InputError for several; `why` says what needs one alone."""
    if not isinstance(host.local, Local):
        raise InputError(f"{why}; give one Local")
    return host.local


def whole_pass(host: FedAvg) -> Local:
    """One epoch in batches of the host's last phase, for a pass that trains nothing."""
    phases = tuple(numbered(host.local).values())
    return replace(phases[-1], epochs=1, steps=None)
