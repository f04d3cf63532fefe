"""Forward pass, backward pass and step of chains of linear layers, for many clients at a time.

`phase.py` has the equations. Examples are columns: W a with W [h, d] and a [d, B] in memory is up
to twice as fast, in batches of 32, as a W^T with a [B, d].
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from fedshift.client.dense.chain import Layer
from fedshift.kernels.products import add_products, by_onednn, products
from fedshift.kernels.torch_private import relu_backward
from fedshift.tree import Params


@dataclass(frozen=True)
class Recipe:
    """What all clients share: the layers, which parameters are trained, the optimiser's numbers.

    moving   names of the trained parameters
    pulled   mu of the proximal term, by name
    shifted  names whose gradient gets a constant correction
    """

    layers: tuple[Layer, ...]
    moving: tuple[str, ...]
    momentum: float
    decay: float
    pulled: Mapping[str, float]
    shifted: tuple[str, ...]

    @cached_property
    def lowest(self) -> int:
        """The lowest layer that is trained: nothing below it needs a gradient."""
        return min(i for i, layer in enumerate(self.layers) if set(layer[:2]) & set(self.moving))


class Nets(NamedTuple):
    """The networks of c clients. `backward` and `move` change them in place, step by step.

    at        weights [c, h, d] and biases [c, h, 1], by name
    velocity  of the trained parameters; empty without momentum
    named     constants, shaped alike: "at NAME" (where clients start), "anchor NAME", "shift NAME"
    """

    recipe: Recipe
    at: Params
    velocity: Params
    named: Mapping[str, Tensor]

    @staticmethod
    def of(recipe: Recipe, at: Params, named: Mapping[str, Tensor]) -> Nets:
        """Networks that are views of `at`: training them changes the tensors in `at`."""

        def wide(v: Tensor) -> Tensor:
            # Biases get an axis for the examples, along which they are broadcast.
            return v if v.dim() == 3 else v[..., None]

        views = {k: wide(v) for k, v in at.items()}
        velocity = {k: torch.zeros_like(views[k]) for k in recipe.moving if recipe.momentum}
        return Nets(recipe, views, velocity, {k: wide(v) for k, v in named.items()})

    def product(self, layer: Layer, a: Tensor) -> Tensor:
        """W a + b, [c, h, B]."""
        bias = None if layer.bias is None else self.at[layer.bias]
        return products(self.at[layer.weight], a, bias)

    def forward(self, z: Tensor) -> tuple[list[Tensor], Tensor]:
        """(inputs of all layers but the first, logits [c, K, B]), from z of the first layer."""
        inputs, layers = list[Tensor](), self.recipe.layers
        for below, layer in itertools.pairwise(layers):
            # In place, because nothing else refers to z and the backward pass needs only relu(z).
            inputs.append(z.relu_() if below.relu else z)
            z = self.product(layer, inputs[-1])
        return inputs, z

    def backward(self, inputs: Sequence[Tensor], delta: Tensor, lr: Tensor) -> Tensor | None:
        """Step all layers but the first, from the last one down; return the first layer's delta.

        delta [c, K, B] is the gradient by the logits, without momentum already multiplied by -lr;
        lr [c, 1, 1] is 0 for a client without a batch. Returns None if the first layer is frozen.
        """
        layers, lowest = self.recipe.layers, self.recipe.lowest
        for i in range(len(layers) - 1, max(lowest, 1) - 1, -1):
            # Compute the delta below before this layer moves: it needs the old weights.
            below = delta
            if i > lowest:
                below = products(self.at[layers[i].weight].transpose(1, 2), delta)
                if layers[i - 1].relu:
                    below = relu_backward(below, inputs[i - 1])
            self.move(layers[i], delta, inputs[i - 1].transpose(1, 2), lr)
            delta = below
        return None if lowest else delta

    def move(self, layer: Layer, delta: Tensor, rows: Tensor, lr: Tensor) -> None:
        """Take one step with a layer, from delta [c, h, B] and the inputs, rows [c, B, d]."""
        weight, bias, _ = layer
        if weight in self.recipe.moving:
            into = self._accumulator(weight, lr)
            add_products(into, delta, rows)
            self._apply_step(weight, lr)
        if bias is not None and bias in self.recipe.moving:
            # delta includes each example's share of the loss, so its sum is the gradient.
            self._accumulator(bias, lr).add_(delta.sum(-1, keepdim=True))
            self._apply_step(bias, lr)

    def together(self, batch: int) -> int:
        """How many steps `FirstLayer` takes at once, with batches of `batch` examples: 1 or 2."""
        layer = self.recipe.layers[0]
        # Momentum, decay, pulls and shifts change the weights in ways that its sum does not cover.
        plain = all(self.plain(k) for k in layer[:2] if k is not None)
        return 2 if plain and by_onednn(self.at[layer.weight], batch) else 1

    def plain(self, name: str) -> bool:
        """Whether a step adds only -lr times the batch's gradient, so that steps can be summed."""
        free = not self.recipe.momentum and name in self.recipe.moving
        return free and not self._other_terms(name)

    def begin(self) -> None:
        """Set the trained parameters to where the clients start."""
        for k in self.recipe.moving:
            self.at[k].copy_(self.named[f"at {k}"])

    def _accumulator(self, name: str, lr: Tensor) -> Tensor:
        """The tensor to which the caller adds the batch's gradient; other terms are in it already.

        The velocity if there is momentum, else theta itself. Adding into it needs no temporary.
        """
        theta = self.at[name]
        if self.recipe.momentum:
            v = self.velocity[name].mul_(self.recipe.momentum)
            for c, u in self._other_terms(name):
                v.add_(u, alpha=c)
            return v
        for c, u in self._other_terms(name):
            theta.addcmul_(u, lr, value=-c)
        return theta

    def _apply_step(self, name: str, lr: Tensor) -> None:
        # Without momentum `delta` includes -lr, so adding it to theta was the step already.
        if self.recipe.momentum:
            self.at[name].addcmul_(self.velocity[name], lr, value=-1.0)

    def _other_terms(self, name: str) -> list[tuple[float, Tensor]]:
        """(c, v) of each term c v of the gradient besides the batch's: decay, pull, shift.

        The term with v = theta is first: the caller subtracts the terms from theta in turn, and
        this one needs theta as it was.
        """
        mu = self.recipe.pulled.get(name, 0.0)
        terms = [(self.recipe.decay + mu, self.at[name])] if self.recipe.decay + mu else []
        terms += [(-mu, self.named[f"anchor {name}"])] if mu else []
        return terms + ([(1.0, self.named[f"shift {name}"])] if name in self.recipe.shifted else [])

    def pull(self) -> Tensor:
        """sum_k mu_k / 2 ||theta_k - anchor_k||^2, [c]."""
        total = next(iter(self.at.values())).new_zeros(())
        for k, mu in self.recipe.pulled.items():
            distance = self.at[k] - self.named[f"anchor {k}"]
            total = total + mu / 2 * distance.square().sum((1, 2))
        return total.expand(len(next(iter(self.at.values()))))


@dataclass(eq=False)
class FirstLayer:
    """One or several steps of the first layer, with two large products in all.

    Let X_s [B, d] be the batch of step s, and D_s [h, B] be -lr times the gradient by the layer's
    outputs. Then the outputs at the weights that r < s steps have moved are

        z_s = W X_s^T + b + sum_(r<s) D_r (X_r X_s^T + 1)

    with W and b from before the first step. So one product gives W X_s^T for all steps, and one
    more moves the layer after them: W += sum_s D_s X_s, b += sum_s D_s 1. Without a bias there is
    no 1. Two steps at once are faster if oneDNN is called for each client. With more steps, or if
    MKL is called once for all clients, the products X_r X_s^T cost more than they save.

    rows has the batches, [c, S B, d]. Iterating yields z_s [c, h, B]. After each one the caller
    trains the other layers and gives D_s to `step`. The layer moves when the iteration ends.
    """

    net: Nets
    rows: Tensor
    batch: int
    deltas: list[Tensor] = field(default_factory=list, init=False)
    rate: Tensor | None = field(default=None, init=False)

    def __iter__(self) -> Iterator[Tensor]:
        layer = self.net.recipe.layers[0]
        batches = torch.split(self.rows, self.batch, 1)
        # One product for all steps, with the weights from before the first step.
        outputs = self.net.product(layer, self.rows.transpose(1, 2))
        for z, x in zip(torch.split(outputs, self.batch, -1), batches, strict=True):
            # Add the effect of the earlier steps, which are not in the weights yet.
            for delta, before in zip(self.deltas, batches, strict=False):
                z.baddbmm_(delta, _cross(before, x, layer.bias is not None))
            yield z
        if self.rate is not None:
            delta = self.deltas[0] if len(self.deltas) == 1 else torch.cat(self.deltas, -1)
            self.net.move(layer, delta, self.rows, self.rate)

    def step(self, delta: Tensor | None, rate: Tensor) -> None:
        """Record D_s for when the layer moves; None if this layer is frozen."""
        if delta is not None:
            self.deltas.append(delta)
            self.rate = rate


def _cross(before: Tensor, x: Tensor, bias: bool) -> Tensor:
    """X_r X_s^T, plus 1 if there is a bias: [c, B, B] for batches [c, B, d]."""
    product = torch.bmm(before, x.transpose(1, 2))
    return product.add_(1.0) if bias else product
