"""What a client knows of its own gradient: by one pass over its data, or by how far it came."""

from __future__ import annotations

import torch
from torch import Tensor

from fedshift.client.local import Local, gradient_of
from fedshift.client.objectives import Term
from fedshift.data import ClientData, Plan, take
from fedshift.model import Model
from fedshift.tree import Params, Parts, add, map_, split, zeros


def steps_taken(plan: Plan) -> Tensor:
    """Q, the steps of a plan that are not padding, a 0-d float64 tensor."""
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

    That is grad F_i(theta) over all n examples, in pieces that fit in memory; g_s is what the
    phase's oracles give. Parameters that do not move in the phase have gradient 0.
    """
    moving, frozen = split(params, phase.only) if phase.only else (params, {})
    sizes = plan.weight.double().sum(-1)
    total = zeros(moving)
    for s in range(plan.steps):
        oracle = gradient_of(model, objective, frozen, buffers, take(data, plan, s), context)
        for wrap in phase.oracles:
            oracle = wrap(oracle)
        share = sizes[s] / sizes.sum().clamp(min=1.0)
        total = add(total, oracle(moving).grad, share)
    if phase.decay:
        total = add(total, moving, phase.decay)
    return total | zeros(frozen)


def travelled_gradient(start: Params, end: Params, shift: Params, plan: Plan) -> Params:
    """(theta - y) / (eta Q) - shift: the mean of g over Q steps y <- y - eta (g(y) + shift).

    Exact for plain SGD, weight decay being a part of g. Without a step it is 0.
    """
    steps = steps_taken(plan)
    scale = plan.lr * steps.clamp(min=1.0)

    def mean(theta: Tensor, y: Tensor, by: Tensor) -> Tensor:
        found = (theta - y) / scale.to(y.dtype) - by
        return torch.where(steps > 0, found, torch.zeros_like(found))

    return map_(mean, start, end, shift)
