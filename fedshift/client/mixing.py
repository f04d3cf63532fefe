"""FedALA's mixture of a client's old model and the one received, learned entry by entry."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedshift.arguments import Counted, Positive, called, check_fields
from fedshift.client.objectives import Term
from fedshift.client.oracles import gradient_of
from fedshift.data import ClientData, Plan, take
from fedshift.errors import InputError
from fedshift.model import Model
from fedshift.tree import Params, Parts, map_

Layers = int | Literal["all"]


def top(model: Model, layers: Layers, head: tuple[str, ...]) -> tuple[str, ...]:
    """Names of the parameters of the last `layers` modules with parameters, in declaration order.

    Counting ends at the last module with a name that starts with a prefix of `head`: a router that
    the network declares after its classifier does not classify. If no name matches, counting ends
    at the last module. Raises InputError for more layers than there are.
    """
    names_by_layer = [
        tuple(f"{path}.{name}" if path else name for name, _ in module.named_parameters("", False))
        for path, module in model.net.named_modules()
    ]
    layer_names = [names for names in names_by_layer if names]
    ends = [
        i for i, names in enumerate(layer_names) if any(name.startswith(head) for name in names)
    ]
    layer_names = layer_names[: ends[-1] + 1] if ends else layer_names
    count = len(layer_names) if layers == "all" else layers
    if count > len(layer_names):
        raise InputError(
            f"layers={layers}; the model has {len(layer_names)} layers with parameters"
        )
    return tuple(name for names in layer_names[len(layer_names) - count :] for name in names)


def mixed(old: Params, new: Params, mixing: Params) -> Params:
    """old + (new - old) * W, entry by entry; exactly new where W = 1 and old where W = 0."""
    # lerp is exact at both ends; a + (b - a) w need not be.
    return map_(lambda a, b, w: torch.lerp(a, b, w), old, new, mixing)


def leading(plan: Plan, share: float) -> Plan:
    """The first floor(share n) rows, at least one, of a plan of one epoch over n rows."""
    # Mask instead of cutting: within vmap clients have different numbers of examples, and shapes
    # must agree.
    wanted = torch.floor(share * plan.weight.sum().double()).clamp(min=1.0)
    before = (plan.weight.flatten().cumsum(0) - plan.weight.flatten()).reshape(plan.weight.shape)
    weight = plan.weight * (before < wanted)
    if plan.sizes is None:
        return plan._replace(weight=weight)
    # A plan with sizes may not have padding steps (`Local.along`), so cut off the masked steps.
    remaining = max(1, math.floor(share * sum(plan.sizes)))
    sizes: tuple[int, ...] = ()
    for size in plan.sizes:
        if remaining > 0:
            sizes = (*sizes, min(size, remaining))
            remaining -= size
    steps = len(sizes)
    return plan._replace(rows=plan.rows[:steps], weight=weight[:steps], sizes=sizes)


@dataclass(frozen=True)
class Mix:
    """How W is learned: W <- clip(W - lr (new - old) * grad CE(theta^), 0, 1), batch by batch.

    theta^ = `mixed`(old, new, W) is formed anew after each batch; old and new stay. Zhang et al.
    2023 (FedALA), arXiv 2212.01197, Algorithm 1. The first time, a client goes on for at most `cap`
    epochs, until the losses of the last batches of its last `window` epochs have a standard
    deviation below `threshold`; after that it takes one epoch per round.

    lr      step of W, without unit: the gradient is taken with respect to W
    layers  how many modules with parameters are mixed, counted from the end: "all" or 1, 2, ...;
            below them the received model is taken
    share   part of the client's examples on which W is learned, drawn anew each round
    cap     the authors' code has none, and never ends if losses keep moving or are NaN

    Raises InputError for values outside these ranges.
    """

    lr: Positive = 1.0
    layers: Layers = 1
    share: float = 0.8
    threshold: Positive = 0.1
    window: Counted = 10
    cap: Counted = 50

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0.0 < self.share <= 1.0:
            raise InputError(f"FedALA's share of examples must be in (0, 1], got {self.share}")
        if isinstance(self.layers, str) and self.layers != "all":
            raise InputError(
                f'FedALA layers must be a whole number or "all", got {called(self.layers)}'
            )
        if self.layers != "all" and self.layers < 1:
            raise InputError(
                f'FedALA layers must be 1 or more, or "all", got {self.layers} (in the authors\' '
                'code 0 means all: write "all")'
            )

    def __call__(
        self,
        model: Model,
        objective: Term,
        old: Params,
        new: Params,
        below: Params,
        mixing: Params,
        buffers: Params,
        context: Parts,
        data: ClientData,
        plan: Plan,
        epochs: int,
    ) -> Params:
        """W after at most `epochs` over the plan; old, new and W of the top, `below` the rest."""
        losses: list[Tensor] = []
        # The loop ends by a value, so this phase cannot be vectorised over clients.
        for _ in range(epochs):
            last = torch.zeros(())
            for s in range(plan.steps):
                batch = take(data, plan, s)
                gradient = gradient_of(model, objective, below, buffers, batch, context)
                result = gradient(mixed(old, new, mixing))
                # A padding step must change neither W nor the loss that decides when to stop.
                live = plan.weight[s].sum() > 0
                mixing = self._step_mixing(mixing, result.grad, old, new, live)
                last = torch.where(live, result.loss, last.to(result.loss.dtype))
            losses.append(last)
            if self.settled(losses):
                break
        return mixing

    def settled(self, losses: list[Tensor]) -> bool:
        """Whether the last `window` losses hardly differ; False until there are more than that."""
        if len(losses) <= self.window:
            return False
        # correction=0 divides by the window, as numpy's `std` in the authors' code does.
        latest = torch.stack(losses[-self.window :]).double()
        return float(latest.std(correction=0)) < self.threshold

    def _step_mixing(
        self, mixing: Params, grad: Params, old: Params, new: Params, live: Tensor
    ) -> Params:
        """W after one batch, unchanged if the batch is padding."""

        def step(w: Tensor, g: Tensor, a: Tensor, b: Tensor) -> Tensor:
            return torch.where(live, (w - self.lr * (b - a) * g).clamp(0.0, 1.0), w)

        return map_(step, mixing, grad, old, new)
