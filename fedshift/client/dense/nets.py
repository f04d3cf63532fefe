"""Chains of linear layers, those of many clients at a time, forward, backward and one step on.

`phase.py` has the equations. Examples are columns: with the memory layouts of W [h, d] and
a [d, B], W a is up to twice as fast in batches of 32 as a W^T with a [B, d].
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from fedshift.client.dense.chain import Layer
from fedshift.kernels.products import add_products, by_onednn, products
from fedshift.kernels.torch_private import relu_backward
from fedshift.tree import Params


@dataclass(frozen=True)
class Recipe:
    """What is the same for all clients: layers, the names that move, and the optimiser's numbers.

    pulled  names with a proximal term, and its mu; shifted: names with a constant correction
    """

    layers: tuple[Layer, ...]
    moving: tuple[str, ...]
    momentum: float
    decay: float
    pulled: Mapping[str, float]
    shifted: tuple[str, ...]


class Nets(NamedTuple):
    """The networks of c clients in one step after the other.

    at      weights [c, h, d], biases [c, h, 1]; velocity: where momentum
    named   "anchor ..." and "shift ...", as biases are
    """

    recipe: Recipe
    at: Params
    velocity: Params
    named: Mapping[str, Tensor]

    @staticmethod
    def of(recipe: Recipe, at: Params, named: Mapping[str, Tensor]) -> Nets:
        """Views of `at`, whose entries move with them."""

        def wide(v: Tensor) -> Tensor:
            return v if v.dim() == 3 else v[..., None]

        views = {k: wide(v) for k, v in at.items()}
        velocity = {k: torch.zeros_like(views[k]) for k in recipe.moving if recipe.momentum}
        return Nets(recipe, views, velocity, {k: wide(v) for k, v in named.items()})

    def product(self, layer: Layer, a: Tensor) -> Tensor:
        """W a + b, [c, h, B]."""
        bias = None if layer.bias is None else self.at[layer.bias]
        return products(self.at[layer.weight], a, bias)

    def forward(self, z: Tensor) -> tuple[list[Tensor], Tensor]:
        """(what each layer but the first is given, the logits [c, K, B]); z of `FirstLayer`."""
        inputs, layers = list[Tensor](), self.recipe.layers
        for below, layer in itertools.pairwise(layers):
            # In place: z is a new product, and its unrectified values are not needed again.
            inputs.append(z.relu_() if below.relu else z)
            z = self.product(layer, inputs[-1])
        return inputs, z

    def backward(self, inputs: Sequence[Tensor], delta: Tensor, lr: Tensor) -> Tensor | None:
        """One step of all layers but the first, the last one first; that one's delta, if it moves.

        delta [c, K, B] is that of the logits, lr [c, 1, 1]. Without momentum, delta contains the
        factor -lr. lr is 0 where a client has no batch left.
        """
        layers, moving = self.recipe.layers, self.recipe.moving
        # Below the lowest layer that moves no gradient is needed.
        lowest = min(i for i, layer in enumerate(layers) if set(layer[:2]) & set(moving))
        for i in range(len(layers) - 1, max(lowest, 1) - 1, -1):
            # Before this layer moves: the gradient below it is taken at the old weights.
            below = delta
            if i > lowest:
                below = products(self.at[layers[i].weight].transpose(1, 2), delta)
                if layers[i - 1].relu:
                    below = relu_backward(below, inputs[i - 1])
            self.move(layers[i], delta, inputs[i - 1].transpose(1, 2), lr)
            delta = below
        return None if lowest else delta

    def move(self, layer: Layer, delta: Tensor, rows: Tensor, lr: Tensor) -> None:
        """One step of a layer; delta [c, h, B] of what it gave for rows [c, B, d]."""
        weight, bias, _ = layer
        if weight in self.recipe.moving:
            into = self._start_of_sum(weight, lr)
            add_products(into, delta, rows)
            self._apply_step(weight, lr)
        if bias is not None and bias in self.recipe.moving:
            # delta already has each example's share of the loss, so its sum is the gradient.
            self._start_of_sum(bias, lr).add_(delta.sum(-1, keepdim=True))
            self._apply_step(bias, lr)

    def together(self, batch: int) -> int:
        """How many steps `FirstLayer` takes at once, in batches of `batch` examples."""
        layer = self.recipe.layers[0]
        plain = all(self.plain(k) for k in layer[:2] if k is not None)
        return 2 if plain and by_onednn(self.at[layer.weight], batch) else 1

    def plain(self, name: str) -> bool:
        """Whether each step adds -lr times the batch's gradient, and nothing else."""
        free = not self.recipe.momentum and name in self.recipe.moving
        return free and not self._other_terms(name)

    def begin(self) -> None:
        """Set the parameters that move to where the clients start."""
        for k in self.recipe.moving:
            self.at[k].copy_(self.named[f"at {k}"])

    def _start_of_sum(self, name: str, lr: Tensor) -> Tensor:
        """What the gradient is added to: the velocity, or theta, moved by all else already."""
        theta = self.at[name]
        # The batch's gradient is added by one call into this tensor, without a temporary for it.
        if self.recipe.momentum:
            v = self.velocity[name].mul_(self.recipe.momentum)
            for c, u in self._other_terms(name):
                v.add_(u, alpha=c)
            return v
        for c, u in self._other_terms(name):
            theta.addcmul_(u, lr, value=-c)
        return theta

    def _apply_step(self, name: str, lr: Tensor) -> None:
        # Without momentum `delta` contains -lr, so the sum was the step already.
        if self.recipe.momentum:
            self.at[name].addcmul_(self.velocity[name], lr, value=-1.0)

    def _other_terms(self, name: str) -> list[tuple[float, Tensor]]:
        """c, v of the terms c v that the gradient has besides the batch's: decay, pull, shift.

        That of theta itself first, because the others change it.
        """
        mu = self.recipe.pulled.get(name, 0.0)
        terms = [(self.recipe.decay + mu, self.at[name])] if self.recipe.decay + mu else []
        terms += [(-mu, self.named[f"anchor {name}"])] if mu else []
        return terms + ([(1.0, self.named[f"shift {name}"])] if name in self.recipe.shifted else [])

    def pull(self) -> Tensor:
        """sum_k mu_k / 2 ||theta_k - anchor_k||^2, [c]."""
        total = next(iter(self.at.values())).new_zeros(())
        for k, mu in self.recipe.pulled.items():
            apart = self.at[k] - self.named[f"anchor {k}"]
            total = total + mu / 2 * apart.square().sum((1, 2))
        return total.expand(len(next(iter(self.at.values()))))


@dataclass(eq=False)
class FirstLayer:
    """The first layer in one step, or in several steps at once, whose batches are given.

    With X_s [B, d] the batch of step s, and D_s [h, B] the step of the layer's outputs for it (-lr
    times their gradient),

        z_s = W X_s^T + b + sum_(r<s) D_r (X_r X_s^T + 1)

    so that one product serves all steps, and another one after them: W += sum_s D_s X_s, b +=
    sum_s D_s 1. Without a bias there is no 1. Two steps at once are faster where oneDNN is called
    for each client. With more steps, or where MKL is called once for all clients, the products
    X_r X_s^T cost more than that saves.

    rows: the batches, [c, S B, d]. Iterating gives z_s [c, h, B]; the caller calls `step` after
    each, once all other layers have given what D_s needs. The end moves the layer.
    """

    net: Nets
    rows: Tensor
    batch: int
    deltas: list[Tensor] = field(default_factory=list, init=False)
    rate: Tensor | None = field(default=None, init=False)

    def __iter__(self) -> Iterator[Tensor]:
        layer = self.net.recipe.layers[0]
        batches = torch.split(self.rows, self.batch, 1)
        # One product for all steps, at the weights before the first of them.
        outputs = self.net.product(layer, self.rows.transpose(1, 2))
        for z, x in zip(torch.split(outputs, self.batch, -1), batches, strict=True):
            # What the steps before this one would have added to the weights.
            for delta, before in zip(self.deltas, batches, strict=False):
                z.baddbmm_(delta, _cross(before, x, layer.bias is not None))
            yield z
        if self.rate is not None:
            delta = self.deltas[0] if len(self.deltas) == 1 else torch.cat(self.deltas, -1)
            self.net.move(layer, delta, self.rows, self.rate)

    def step(self, delta: Tensor | None, rate: Tensor) -> None:
        """Records the gradient of the outputs; None if this layer is frozen."""
        if delta is not None:
            self.deltas.append(delta)
            self.rate = rate


def _cross(before: Tensor, x: Tensor, bias: bool) -> Tensor:
    """X_r X_s^T, or one more for a bias; [c, B, B] of batches [c, B, d]."""
    product = torch.bmm(before, x.transpose(1, 2))
    return product.add_(1.0) if bias else product
