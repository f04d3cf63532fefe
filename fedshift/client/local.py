"""Local training: phases of stochastic gradient descent, or Adam, over planned batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

import torch
from torch import Tensor

from fedshift.arguments import Counted, NotNegative, check_counted, check_fields, check_number
from fedshift.client.descent import Adam, HeavyBall
from fedshift.client.objectives import Term
from fedshift.client.oracles import GradFn as GradFn
from fedshift.client.oracles import Gradient as Gradient
from fedshift.client.oracles import Oracle as Oracle
from fedshift.client.oracles import Precision
from fedshift.client.oracles import gradient_of as gradient_of
from fedshift.client.sharing import check_prefixes
from fedshift.client.trainer import Trained as Trained
from fedshift.client.trainer import trainer
from fedshift.data import ClientData, Plan, batches, plan_phase
from fedshift.errors import FedshiftError, InputError, UnfitError, check_name
from fedshift.kernels.torch_private import within_vmap
from fedshift.model import Model
from fedshift.seeds import generator
from fedshift.tree import Params, Parts, map_, split

Schedule = Callable[[int], float]
Optimizer = Literal["sgd", "adam"]


@dataclass(frozen=True)
class Local:
    """SGD on one client: v <- momentum v + g + decay theta; theta <- theta - lr v. Or Adam.

    lr         a number, or a function of the round
    epochs     passes over the client's data, 1 unless `steps` are given; or
    steps      a fixed number of batches
    batch      batch size B; the last batch of an epoch may be smaller
    momentum   heavy-ball coefficient in [0, 1); the velocity starts at zero in every round
    decay      weight decay, added to the gradient, also for "adam" (so it is not AdamW)
    only       name prefixes of the parameters to train; () trains all
    oracles    wrappers of the gradient, applied in order
    frozen     name prefixes of parameters that keep their bits; they win over `only`
    optimizer  "adam" takes the step of `descent.Adam` instead; its moments start at zero in every
               round, as in the FedPALS authors' code, and momentum must be 0
    precision  "bfloat16" runs the network's matrix products and convolutions, forward and backward,
               in bfloat16 by `torch.autocast`; all else, the objective included, stays float32

    >>> fs.Local(lr=lambda t: 0.1 / t, steps=20, momentum=0.9).rate(2)
    0.05

    Raises InputError for values outside these ranges; `check` compares the prefixes with the
    network's names before round 1.
    """

    lr: float | Schedule = 0.1
    epochs: Annotated[int | None, check_counted] = None
    batch: Counted = 32
    steps: Annotated[int | None, check_counted] = None
    momentum: float = 0.0
    decay: NotNegative = 0.0
    only: tuple[str, ...] = ()
    oracles: tuple[Oracle, ...] = ()
    frozen: tuple[str, ...] = ()
    optimizer: Optimizer = "sgd"
    precision: Precision = "float32"

    def __post_init__(self) -> None:
        check_fields(self)
        if self.epochs is None and self.steps is None:
            # Normalise here, so that equivalent phases compare equal.
            object.__setattr__(self, "epochs", 1)
        if self.epochs is not None and self.steps is not None:
            raise InputError(
                f"give epochs or steps, not both, got epochs={self.epochs}, steps={self.steps}; "
                "set the other to None"
            )
        if not callable(self.lr) and not 0.0 < self.lr < float("inf"):
            raise InputError(f"lr must be a positive number, got {self.lr}")
        if not 0.0 <= self.momentum < 1.0:
            raise InputError(f"momentum must be in [0, 1), got {self.momentum}")
        check_name("local optimizer", self.optimizer, ("sgd", "adam"))
        if self.optimizer == "adam" and self.momentum:
            raise InputError(
                f"momentum {self.momentum} is SGD's; Adam has moments of its own: set momentum = 0"
            )
        check_name("local precision", self.precision, get_args(Precision))

    def rate(self, t: int) -> float:
        """The learning rate of round t. Raises InputError if the schedule gives no valid rate."""
        if not callable(self.lr):
            return self.lr
        try:
            rate = self.lr(t)
        except FedshiftError:  # one of our own schedules: its message needs no wrapping
            raise
        except Exception as e:
            raise InputError(
                f"the schedule of Local(lr=...) fails for round {t}: {e}; it must be a function of "
                "the round, 1 for the first one"
            ) from e
        check_number(f"the learning rate of round {t}", rate)
        if not 0.0 <= rate < float("inf"):
            cure = "; give max(0.0, ...) of it" if rate < 0.0 else ""
            raise InputError(
                f"the learning rate of round {t} must be 0 or more, and finite; the schedule of "
                f"Local(lr=...) gives {rate}{cure}"
            )
        return rate

    def plan(self, n: int, t: int, source: torch.Generator) -> Plan:
        """Draw this phase's batches for a client of n examples in round t."""
        return plan_phase(
            n,
            batch=self.batch,
            lr=self.rate(t),
            generator=source,
            epochs=self.epochs,
            steps=self.steps,
        )

    def leaves_one(self, n: Tensor) -> Tensor:
        """Whether a client of n [M] examples trains on a batch of one, [M] bool."""
        one = (n % self.batch == 1) | ((n > 0) & (self.batch == 1))
        # With steps, the rest of an epoch comes after its full batches.
        return one if self.steps is None else one & (self.steps * self.batch >= n)

    def parts(self, model: Model, params: Params) -> tuple[Params, Params]:
        """(parameters that this phase trains, all others, which include `model.fixed`)."""
        moving = model.trainable(params)
        moving = split(moving, self.only)[0] if self.only else moving
        moving = split(moving, self.frozen)[1] if self.frozen else moving
        return moving, {k: v for k, v in params.items() if k not in moving}

    def __call__(
        self, model: Model, objective: Term, params: Params, buffers: Params, context: Parts,
        data: ClientData, plan: Plan, *extra: Oracle,
    ) -> Trained:  # fmt: skip
        """Train from `params` along the plan. A padding step changes nothing, moments included.

        Inside `client.trainer.trained_by` the trainer given there does the work instead.
        """
        if (instead := trainer()) is not None:
            return instead(self, model, objective, params, buffers, context, data, plan, *extra)
        check_padding(model, plan)
        moving, frozen = self.parts(model, params)
        if not moving:
            self.check(model, params)  # always raises here; its message names the settings
        descent = Adam() if self.optimizer == "adam" else HeavyBall(self.momentum)
        moments, losses = descent.start(moving), list[Tensor]()
        kinds = {v.dtype for v in moving.values()}
        # SGD's rate is cast once, not in each step; Adam divides it by numbers near 0 in float64.
        once = len(kinds) == 1 and self.optimizer == "sgd"
        lr = plan.lr.to(kinds.pop()) if once else plan.lr
        stacked = plan.sizes is None or within_vmap(data.y)
        for s, batch in enumerate(batches(data, plan)):
            oracle = gradient_of(model, objective, frozen, buffers, batch, context, self.precision)
            # The method's wrappers are outermost: a control shift must correct the gradient that is
            # applied, after SAM or clipping.
            for wrap in (*self.oracles, *extra):
                oracle = wrap(oracle)
            grad, after, loss = oracle(moving)
            if self.decay:
                grad = map_(lambda g, p: g + self.decay * p, grad, moving)
            # The first step must not write into the caller's parameters.
            own = s > 0 and not stacked
            moved, then = descent(moving, grad, moments, lr, in_place=own)
            if plan.sizes is None:  # of stacked clients: this step may be padding for some
                live = plan.weight[s].sum() > 0
                moved, after = _where(live, moved, moving), _where(live, after, buffers)
                then = {part: _where(live, then[part], moments[part]) for part in then}
            moving, buffers, moments = moved, after, then
            losses.append(loss)  # a tensor: `float()` would wait for a GPU in every step
        return Trained(moving | frozen, buffers, _mean_loss(losses, plan, params))

    def check(self, model: Model, params: Params) -> None:
        """Raise InputError for a prefix that matches no parameter, or if nothing is trained."""
        check_prefixes("only", self.only, params)
        check_prefixes("frozen", self.frozen, params)
        odd = [f"{k} is {v.dtype}" for k, v in params.items() if v.dtype != torch.float32]
        if self.precision == "bfloat16" and odd:  # autocast would silently ignore float64
            raise UnfitError(
                f"precision bfloat16 is for float32 parameters, and {odd[0]}; use "
                'float32 parameters, or precision = "float32"'
            )
        if not self.parts(model, params)[0]:
            settings = [f"{k}={v}" for k, v in (("only", self.only), ("frozen", self.frozen)) if v]
            settings += ["requires_grad=False"] * bool(model.fixed)
            raise InputError(
                f"{' and '.join(settings)} leave no parameter of the model; there is nothing to "
                "train"
            )


def check_padding(model: Model, plan: Plan) -> None:
    """Raise InputError if a layer that mixes examples would see the padding of stacked clients."""
    if plan.sizes is None and model.mixes:
        raise InputError(
            "BatchNorm would see the padding of clients with batches of different sizes; give "
            "`steps` and a batch size that divides every client's examples, or do not stack"
        )


def _where(live: Tensor, new: Params, old: Params) -> Params:
    return map_(lambda a, b: torch.where(live, a, b), new, old)


def _mean_loss(losses: list[Tensor], plan: Plan, params: Params) -> Tensor:
    """The mean loss over the steps [], and 0, in the parameters' type, if there are none."""
    if not losses:
        return next(iter(params.values())).new_zeros(())
    if plan.sizes is not None:
        return torch.stack(losses).mean()
    # Mask padding steps: their loss is that of an empty batch, which a proximal term makes nonzero.
    live = (plan.weight.sum(-1) > 0).to(losses[0].dtype)
    return (torch.stack(losses) * live).sum() / live.sum().clamp(min=1.0)


def context_of(start: Params, buffers: Params, state: Parts, data: ClientData) -> Parts:
    """What terms may read besides model and batch: the client's state and id, and the anchor."""
    return {**state, "anchor": start, "anchor_buffers": buffers, "client": {"id": data.id}}


def train_locally(
    model: Model,
    objective: Term,
    phases: Mapping[str, Local],
    start: Params,
    buffers: Params,
    state: Parts,
    data: ClientData,
    plans: Mapping[str, Plan],
    *extra: Oracle,
) -> Trained:
    """Train all phases in turn from `start`, which is the anchor as well."""
    context = context_of(start, buffers, state, data)
    return train_phases(model, objective, phases, start, buffers, context, data, plans, *extra)


def train_phases(
    model: Model,
    objective: Term,
    phases: Mapping[str, Local],
    start: Params,
    buffers: Params,
    context: Parts,
    data: ClientData,
    plans: Mapping[str, Plan],
    *extra: Oracle,
) -> Trained:
    """Train all phases in turn from `start`; the anchor is the one in the caller's `context`."""
    end, after, losses = start, buffers, []
    for name, phase in phases.items():
        done = phase(model, objective, end, after, context, data, plans[name], *extra)
        end, after = done.params, done.buffers
        losses.append(done.loss)
    loss = losses[0] if len(losses) == 1 else torch.stack(losses).mean()
    return Trained(end, after, loss)


def plan_all(
    phases: Mapping[str, Local], data: ClientData, t: int, seed: int, client: int
) -> dict[str, Plan]:
    """The plans of all phases of client `client` in round t, each from its own stream.

    A stream is named by (seed, round, client, phase), so a client's batches depend neither on the
    other clients of the round nor on where it runs.
    """
    n = int(torch.count_nonzero(data.w))
    return {
        name: phase.plan(n, t, generator(seed, "batch", t, client, name))
        for name, phase in phases.items()
    }


def plan_many(
    phases: Mapping[str, Local], clients: Sequence[tuple[int, ClientData]], t: int, seed: int
) -> list[dict[str, Plan]]:
    """`plan_all` of several clients."""
    return [plan_all(phases, data, t, seed, client) for client, data in clients]
