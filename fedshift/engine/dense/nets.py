"""Forward pass, backward pass and step of chains of linear layers, for many clients at a time.

`phase.py` has the equations. Examples are columns: W a with W [h, d] and a [d, B] in memory is up
to twice as fast, in batches of 32, as a W^T with a [B, d].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from fedshift.engine.dense.chain import Layer
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
    """The networks of c clients. `backward` changes them in place, step by step.

    at        weights [c, h, d] and biases [c, h, 1], by name
    velocity  of the trained parameters; empty without momentum
    named     constants, shaped alike: "at NAME" (where clients start), "anchor NAME", "shift NAME"
    """

    recipe: Recipe
    at: Params
    velocity: Params
    named: Mapping[str, Tensor]

    @staticmethod
    @torch.no_grad()
    def of(recipe: Recipe, at: Params, named: Mapping[str, Tensor]) -> Nets:
        """Networks that are views of `at`, whose trained parameters are set to their start."""

        def wide(v: Tensor) -> Tensor:
            # Biases get an axis for the examples, along which they are broadcast.
            return v if v.dim() == 3 else v[..., None]

        views = {k: wide(v) for k, v in at.items()}
        named = {k: wide(v) for k, v in named.items()}
        for k in recipe.moving:
            views[k].copy_(named[f"at {k}"])
        velocity = {k: torch.zeros_like(views[k]) for k in recipe.moving if recipe.momentum}
        return Nets(recipe, views, velocity, named)

    def forward(self, a: Tensor) -> tuple[list[Tensor], Tensor]:
        """(inputs of all layers, logits [c, K, B]), from examples [c, d, B]."""
        inputs = list[Tensor]()
        for layer in self.recipe.layers:
            inputs.append(a)
            weight = self.at[layer.weight]
            a = (
                torch.bmm(weight, a)
                if layer.bias is None
                else torch.baddbmm(self.at[layer.bias], weight, a)
            )
            # In place: nothing else refers to z, and the backward pass needs only relu(z).
            a = a.relu_() if layer.relu else a
        return inputs, a

    def backward(self, inputs: Sequence[Tensor], delta: Tensor, lr: Tensor) -> None:
        """Step all trained layers, from the last one down.

        delta [c, K, B] is the gradient by the logits, without momentum already multiplied by -lr;
        lr [c, 1, 1] is 0 for a client without a batch.
        """
        layers = self.recipe.layers
        for i in range(len(layers) - 1, self.recipe.lowest - 1, -1):
            # Compute the delta below before this layer moves: it needs the old weights.
            below = delta
            if i > self.recipe.lowest:
                below = torch.bmm(self.at[layers[i].weight].transpose(1, 2), delta)
                if layers[i - 1].relu:
                    below.masked_fill_(inputs[i] <= 0, 0.0)
            weight, bias, _ = layers[i]
            if weight in self.recipe.moving:
                self._accumulator(weight, lr).baddbmm_(delta, inputs[i].transpose(1, 2))
                self._apply_step(weight, lr)
            if bias is not None and bias in self.recipe.moving:
                # delta includes each example's share of the loss, so its sum is the gradient.
                self._accumulator(bias, lr).add_(delta.sum(-1, keepdim=True))
                self._apply_step(bias, lr)
            delta = below

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
