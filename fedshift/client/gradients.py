"""A client's gradient over all its data: by a pass over them, or from how far training moved."""

from __future__ import annotations

import torch
from torch import Tensor

from fedshift.client.local import Local, check_padding
from fedshift.client.objectives import Term, View
from fedshift.client.oracles import gradient_of, slope
from fedshift.data import Batch, ClientData, Plan, take
from fedshift.model import Model
from fedshift.tree import Params, Parts, add, map_, zeros


def steps_taken(plan: Plan) -> Tensor:
    """Q, the number of steps of a plan that are not padding, a 0-d float64 tensor."""
    return (plan.weight.sum(-1) > 0).sum().double()


def pass_gradient(
    phase: Local,
    model: Model,
    objective: Term,
    params: Params,
    buffers: Params,
    context: Parts,
    data: ClientData,
    plan: Plan,
) -> Params:
    """sum_s (B_s / n) g_s(theta) + decay theta over the batches s of one epoch, B_s their sizes.

    This is grad F_i(theta) over all n examples, summed in pieces that fit in memory. g_s is what
    the phase's oracles give, in its precision. Parameters that the phase does not train have
    gradient 0.
    """
    check_padding(model, plan)
    moving, frozen = phase.parts(model, params)
    sizes = plan.weight.double().sum(-1)
    total = zeros(moving)
    for s in range(plan.steps):
        batch = take(data, plan, s)
        oracle = gradient_of(model, objective, frozen, buffers, batch, context, phase.precision)
        for wrap in phase.oracles:
            oracle = wrap(oracle)
        # Weighted by size, since the last batch of an epoch is smaller.
        share = sizes[s] / sizes.sum().clamp(min=1.0)
        total = add(total, oracle(moving).grad, share)
    if phase.decay:
        total = add(total, moving, phase.decay)
    return total | zeros(frozen)


def travelled_gradient(start: Params, end: Params, shift: Params, plan: Plan) -> Params:
    """(theta - y) / (eta Q) - shift: the mean of g over Q steps y <- y - eta (g(y) + shift).

    Exact for plain SGD, where g includes weight decay. Without a step it is 0.
    """
    steps = steps_taken(plan)
    # At least 1: `where` below also computes the branch that it drops, and must not meet 0 / 0.
    scale = plan.lr * steps.clamp(min=1.0)

    def mean(theta: Tensor, y: Tensor, by: Tensor) -> Tensor:
        average = (theta - y) / scale.to(y.dtype) - by
        return torch.where(steps > 0, average, torch.zeros_like(average))

    return map_(mean, start, end, shift)


def gradient_trace(
    model: Model,
    objective: Term,
    params: Params,
    buffers: Params,
    context: Parts,
    data: ClientData,
    plan: Plan,
) -> Tensor:
    """sum_s ||g_s(theta)||^2 over the batches s of one epoch, g_s their mean gradients, [] float64.

    In evaluation mode, over all parameters but `model.fixed`. For the negative log-likelihood and
    batches of one example it is n times the trace of the empirical Fisher information. In larger
    batches the examples' gradients partly cancel: the value then depends on the batch size, and
    grows with the number of batches. Yang, Huang and Ye 2024 (FedAS), CVPR, as in the authors'
    code (clientas.py).
    """
    total = torch.zeros((), dtype=torch.float64, device=data.w.device)
    moving = model.trainable(params)
    for s in range(plan.steps):
        batch = take(data, plan, s)

        def value(at: Params, batch: Batch = batch) -> tuple[Tensor, Params]:
            whole = params | at
            out = model(whole, buffers, batch.x)
            return objective(View(model, whole, out, batch, context)), {}

        grad = slope(value, moving, batch.rows).grad
        squares = [g.double().square().sum() for g in grad.values()]
        # `where`, not `if`: within vmap a step that is padding for one client is a batch for
        # another.
        live = plan.weight[s].sum() > 0
        total = total + torch.where(live, torch.stack(squares).sum(), total.new_zeros(()))
    return total
