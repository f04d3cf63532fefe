"""A phase of SGD on a chain of linear layers, without autograd, for many clients at a time.

With a_0 = x, z_l = W_l a_(l-1) + b_l and a_l = relu(z_l), one column for each example, and softmax
cross-entropy at the end,

    delta_L = (softmax(z_L) - onehot(y)) diag(w / size)
    delta_(l-1) = (W_l^T delta_l) 1[a_(l-1) > 0]
    dW_l = delta_l a_(l-1)^T,   db_l = sum_b delta_l[:, b]

and each step adds -lr dW_l to W_l (`nets.py`). Clients are trained in groups whose parameters fit
in the processor's cache. The result is that of `client.local.Local` but for the order of sums.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fedshift.client.local import Local
from fedshift.client.objectives import CrossEntropy, Proximal, Sum, Term
from fedshift.client.oracles import Oracle, Shift
from fedshift.client.trainer import Trained
from fedshift.data import ClientData, Plan
from fedshift.engine.dense.chain import layers_of, not_dense
from fedshift.engine.dense.nets import Nets, Recipe
from fedshift.model import Model
from fedshift.tree import Params, Parts

# Bytes of the parameters that are trained together: they should stay in a core's caches. With fewer
# clients the calls cost more than the caches save. Measured on an MLP 784-200-10: processors with a
# second level of 1 MB were fastest with 4 MB (of 0.5 to 16), one of 2 MB with 8 to 32 (of 2 to 32).
TOGETHER = 4 << 20


class Drawn(NamedTuple):
    """Examples and plans of C clients: x [C, n, d], y and w [C, n], rows and weight [C, S, B],
    lr [C]."""

    x: Tensor
    y: Tensor
    w: Tensor
    rows: Tensor
    weight: Tensor
    lr: Tensor


def train(
    phase: Local, model: Model, objective: Term, params: Params, buffers: Params, context: Parts,
    data: ClientData, plan: Plan, *extra: Oracle,
) -> Trained:  # fmt: skip
    """Train a phase, as a `client.trainer.Trainer`. Raises UnfitError for anything but:

    networks that `chain.layers_of` takes; `CrossEntropy` alone or with `Proximal`;
    SGD with any momentum and weight decay, in float32; no oracle but `Shift`; inputs of the
    parameters' type.

    Stacked clients (plan.rows [C, S, B], everything else [C, ...]) are trained at once.
    """
    oracles, many = (*phase.oracles, *extra), plan.rows.dim() == 3
    layers = layers_of(model, data.x.dim() - many)
    mus = _proximal(objective)
    if phase.optimizer != "sgd":
        raise not_dense(f"the local optimizer is {phase.optimizer}")
    if phase.precision != "float32":
        raise not_dense(f"the local precision is {phase.precision}")
    if odd := [o for o in oracles if type(o) is not Shift]:
        raise not_dense(f"gradients go through {type(odd[0]).__name__}")
    if any(v.dtype != data.x.dtype for v in params.values()):
        raise not_dense(f"inputs are {data.x.dtype}, and not all parameters are")
    moving, _ = phase.parts(model, params)
    if not moving:
        phase.check(model, params)
    shifts = [o.by for o in oracles if isinstance(o, Shift)]
    pulled = {k: mu for k in moving if (mu := sum(m for m, free in mus if not k.startswith(free)))}
    recipe = Recipe(
        layers, tuple(moving), phase.momentum, phase.decay, pulled, tuple(moving) if shifts else ()
    )
    named = {f"at {k}": v for k, v in params.items()}
    named |= {f"anchor {k}": context["anchor"][k] for k in pulled}
    # A shift that is the same for all clients has no client axis: expand it.
    named |= {
        f"shift {k}": sum((by[k] for by in shifts[1:]), shifts[0][k]).expand(params[k].shape)
        for k in recipe.shifted
    }
    drawn = Drawn(data.x, data.y, data.w, plan.rows, plan.weight, plan.lr)
    if many:
        loss, moved = descend(recipe, drawn, named)
        return Trained(params | moved, buffers, loss)
    loss, *ends = _Phase.apply(recipe, tuple(named), *drawn, *named.values())  # type: ignore[no-untyped-call]
    return Trained(params | dict(zip(moving, ends, strict=True)), buffers, loss)


def _proximal(objective: Term) -> list[tuple[float, tuple[str, ...]]]:
    """(mu, free) of each proximal term; UnfitError for any term but these and one cross-entropy."""
    terms = objective.terms if type(objective) is Sum else (objective,)
    kinds = [type(term) for term in terms]
    if kinds.count(CrossEntropy) != 1 or set(kinds) - {CrossEntropy, Proximal}:
        names = " + ".join(kind.__name__ for kind in kinds)
        raise not_dense(f"the objective is {names}, not CrossEntropy, alone or with Proximal")
    return [(t.mu, t.free) for t in terms if isinstance(t, Proximal)]


class _Phase(torch.autograd.Function):
    """The phase as one autograd function: its `vmap` receives the tensors of all clients at once,
    where `torch.func.vmap` would otherwise map every small operation.
    """

    generate_vmap_rule = False

    @staticmethod
    def forward(recipe: Recipe, names: tuple[str, ...], *given: Tensor) -> tuple[Tensor, ...]:
        one = [v[None] for v in given]  # a stack of one client
        losses, ends = descend(recipe, Drawn(*one[:6]), dict(zip(names, one[6:], strict=True)))
        return losses[0], *(v[0] for v in ends.values())

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass  # nothing to save: there is no backward pass through a phase

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], recipe: Recipe, names: tuple[str, ...],
        *given: Tensor,
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:  # fmt: skip
        # `dim` is the client axis of each tensor; None means that all clients share the tensor.
        many = [
            v.expand(info.batch_size, *v.shape) if dim is None else v.movedim(dim, 0)
            for v, dim in zip(given, in_dims[2:], strict=True)
        ]
        named = dict(zip(names, many[6:], strict=True))
        losses, ends = descend(recipe, Drawn(*many[:6]), named)
        return (losses, *ends.values()), (0,) * (1 + len(ends))


class Steps(NamedTuple):
    """What S steps of c clients need, computed before the first step.

    rows [S, c, B]       indices of the batches among the examples of all clients
    labels [S, c, 1, B]
    share [S, c, 1, B]   weight of each example in the loss of its batch
    live [S, c, 1]       1 if the client has a batch in this step, else 0
    rates [S, c, 1, 1]   learning rates
    slope [S, c, 1, B]   derivative of the loss by the log-softmax of each label

    All deltas are linear in slope. So without momentum the factor -lr is multiplied into it once,
    instead of into the gradient of every layer.
    """

    rows: Tensor
    labels: Tensor
    share: Tensor
    live: Tensor
    rates: Tensor
    slope: Tensor

    @staticmethod
    @torch.inference_mode()
    def of(recipe: Recipe, drawn: Drawn) -> Steps:
        """The steps of all clients."""
        kind, (clients, n) = drawn.x.dtype, drawn.y.shape
        # Number rows across all clients, so that one look-up serves all of them.
        first = torch.arange(0, clients * n, n, device=drawn.rows.device)
        rows = (drawn.rows + first[:, None, None]).transpose(0, 1)
        weight = drawn.weight.transpose(0, 1)
        sizes = weight.sum(-1, keepdim=True)
        # Compute in the wider of the two types: for float64 inputs, 1 / size must not be rounded to
        # float32.
        finer = torch.promote_types(kind, drawn.w.dtype)
        share = weight.to(finer) * drawn.w.reshape(-1)[rows] / sizes.to(finer).clamp(min=1.0)
        share = share.to(kind)[..., None, :]
        live = (sizes > 0).to(kind)
        rates = (drawn.lr.to(kind)[:, None] * live)[..., None]
        slope = -share if recipe.momentum else share * rates
        labels = drawn.y.reshape(-1)[rows][..., None, :]
        return Steps(rows, labels, share, live, rates, slope)

    def mean(self, losses: Tensor) -> Tensor:
        """The mean [c] of the losses [S, c] over the steps that each client takes."""
        live = self.live[..., 0]
        return (losses * live).sum(0) / live.sum(0).clamp(min=1.0)


def descend(recipe: Recipe, drawn: Drawn, named: Mapping[str, Tensor]) -> tuple[Tensor, Params]:
    """Train C clients in groups: (mean losses [C], trained parameters [C, ...])."""
    clients, examples = len(drawn.lr), drawn.x.reshape(drawn.y.numel(), -1)
    ends = {k: named[f"at {k}"].new_empty(named[f"at {k}"].shape) for k in recipe.moving}
    # Memory of one client: its parameters, the velocity that momentum adds, and a batch.
    bytes_each = sum(v[0].nbytes for v in ends.values()) * (2 if recipe.momentum else 1)
    bytes_each += drawn.rows.shape[-1] * drawn.x[0, 0].nbytes
    fit = max(1, TOGETHER // max(1, bytes_each))
    # Groups of nearly equal size: if 5 of 12 clients fit, train 4 + 4 + 4, not 5 + 5 + 2.
    group = -(-clients // -(-clients // fit))
    steps, losses = Steps.of(recipe, drawn), []
    for start in range(0, clients, group):
        part = slice(start, start + group)
        here = {k: v[part] for k, v in named.items()}
        at = {k: here[f"at {k}"] for layer in recipe.layers for k in layer[:2] if k is not None}
        at |= {k: v[part] for k, v in ends.items()}
        net = Nets.of(recipe, at, here)
        losses.append(_take_steps(net, examples, Steps(*(v[:, part] for v in steps))))
    return torch.cat(losses), ends


# No gradient flows through a phase, so torch need not record anything.
@torch.inference_mode()
def _take_steps(net: Nets, examples: Tensor, steps: Steps) -> Tensor:
    """Take all steps with the networks of c clients; return their mean losses [c]."""
    count, clients, batch = steps.rows.shape
    if not count:
        return examples.new_zeros(clients)
    picked, pulled = [], []
    # Reuse one buffer for all batches: it stays in the processor's cache.
    buffer = examples.new_empty(clients * batch, examples.shape[1])
    # Unbind once: indexing in every step would cost as much as a small product.
    each = (v.unbind() for v in (steps.rows, steps.labels, steps.slope, steps.rates))
    for rows, labels, slope, rate in zip(*each, strict=True):
        x = torch.index_select(examples, 0, rows.reshape(-1), out=buffer)
        inputs, logits = net.forward(x.view(clients, batch, -1).transpose(1, 2))
        log = F.log_softmax(logits, -2)
        picked.append(log.gather(-2, labels))
        if net.recipe.pulled:
            pulled.append(net.pull())
        # The loss has slope `slope` by the log-softmax of the true label, and 0 by the others.
        delta = log.exp_().mul_(-slope).scatter_add_(-2, labels, slope)
        net.backward(inputs, delta, rate)
    losses = -(torch.stack(picked) * steps.share).sum((-1, -2))  # [S, c]
    return steps.mean(losses + torch.stack(pulled) if pulled else losses)
