"""MADE, densities of vectors from masked dense layers, and a network to compare two."""

from __future__ import annotations

import math
from itertools import chain, pairwise
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from fedshift.errors import InputError, check_name
from fedshift.seeds import numpy_generator

Ints = NDArray[np.int64]
Ordering = Literal["natural", "random"]
# The least scale of a component of `MixtureMade`, for a range [low, high] of width 2: it spans a
# few grey values.
LEAST_SCALE = 0.02


def degrees(
    inputs: int, hidden: tuple[int, ...], ordering: Ordering = "natural", seed: int = 0
) -> tuple[Ints, ...]:
    """The degrees of the inputs, 1 to D in their order, and of the units of each hidden layer.

    A unit of degree m may depend on inputs of degree m or less. Hidden degrees are drawn from the
    smallest degree of the layer below, ..., D - 1. Germain et al. 2015, Section 4.2. `ordering`
    "natural" numbers the inputs as they come, "random" draws a permutation; both by `seed` alone.

    Raises InputError for another ordering, no inputs, and widths below 1.
    """
    check_name("ordering of MADE", ordering, ("natural", "random"))
    if inputs < 1 or any(width < 1 for width in hidden):
        raise InputError(
            f"{inputs} inputs and hidden widths {list(hidden)}; each must be 1 or more"
        )
    first = np.arange(inputs)
    if ordering == "random":
        first = numpy_generator(seed, "made", "order").permutation(inputs)
    layers = [(first + 1).astype(np.int64)]
    for depth, width in enumerate(hidden):
        # Keyed by depth, so that a further layer does not change the masks below it.
        rng = numpy_generator(seed, "made", "hidden", depth)
        # With one input there is no smaller degree; such units feed no output.
        low, high = int(layers[-1].min()), max(inputs - 1, 1)
        layers.append(rng.integers(low, high, size=width, endpoint=True))
    return tuple(layers)


def masks(layers: tuple[Ints, ...]) -> tuple[Tensor, ...]:
    """0/1 masks [outputs, inputs] of the weights between layers of these degrees, output last.

    A hidden unit k reads unit j below it iff m(k) >= m(j); output d reads unit k of the last layer
    iff d's degree > m(k). Germain et al. 2015, Equations 12 and 13.
    """
    hidden = [above[:, None] >= below[None, :] for below, above in pairwise(layers)]
    last = layers[0][:, None] > layers[-1][None, :]
    return tuple(torch.from_numpy(mask.astype(np.float32)) for mask in (*hidden, last))


class Masked(nn.Module):
    """x -> (W * mask) x + b; the mask [outputs, inputs] is no parameter and no buffer."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        # Not a buffer: buffers are sent and averaged, and an average of masks is no mask.
        self.mask = mask
        self.linear = nn.Linear(mask.shape[1], mask.shape[0])

    def forward(self, x: Tensor) -> Tensor:
        weight = self.linear.weight
        return F.linear(x, weight * self.mask.to(weight), self.linear.bias)


class Made(nn.Module):
    """q(u) = prod_d p_d^{u_d} (1 - p_d)^{1 - u_d}, p_d = sigmoid(z_d) a function of the u before d.

    u = clip((x - low) / (high - low), 0, 1), flattened to [n, D]; `binary` rounds it to 0 or 1 (1
    from a half on). log q(u) = sum_d u_d z_d - log(1 + e^{z_d}), in nats: the log probability of a
    binary u, and sum_d of minus the cross-entropy for grey values, which is no density of them.

    Hidden layers have ReLU; `hidden = ()` leaves logistic regressions, one per input. The masks
    follow from (shape, hidden, ordering, seed) alone. They are neither parameters nor buffers, so
    they are never sent or averaged, and the same seed gives the same masks. In FedDisk's authors'
    code every client draws masks of its own, and weights are averaged nevertheless.

    Outputs: logits z [n, D], log_density log q [n].

    Source: Germain, Gregor, Murray and Larochelle 2015, "MADE: masked autoencoder for distribution
    estimation", arXiv 1502.03509. Raises InputError as `degrees`, and unless low < high.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        hidden: tuple[int, ...] = (500,),
        *,
        seed: int = 0,
        ordering: Ordering = "natural",
        low: float = 0.0,
        high: float = 1.0,
        binary: bool = False,
    ) -> None:
        super().__init__()
        _check_range(low, high)
        self.degrees = degrees(math.prod(shape), hidden, ordering, seed)
        self.low, self.high, self.binary = low, high, binary
        self.body = _layers(tuple(map(Masked, masks(self.degrees))))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        u = self.unit(x)
        z = self.body(u)
        return {"logits": z, "log_density": (u * z - F.softplus(z)).sum(1)}

    def unit(self, x: Tensor) -> Tensor:
        """u in [0, 1], [n, D], of the floating type of the weights."""
        values = x.to(next(self.parameters()).dtype).flatten(1)
        u = ((values - self.low) / (self.high - self.low)).clamp(0.0, 1.0)
        # Not `round`, which takes 0.5 to 0. NaN must stay visible, so it is not compared.
        return torch.where(u.isnan(), u, (u >= 0.5).to(u)) if self.binary else u


class MixtureMade(nn.Module):
    """q(x) = prod_d sum_k pi_dk N(u_d; m_dk, s_dk^2) 2 / (high - low), all of the u before d.

    u = (2 x - low - high) / (high - low), flattened to [n, D], without clipping; a natural-scale
    input has u in about [-3, 3]. pi = softmax, s = LEAST_SCALE + softplus of the last layer's
    outputs, K = `components` of each for every input. log q(x) in nats is a log density of real x:

        log q(x) = sum_d logsumexp_k(log pi_dk - (u_d - m_dk)^2 / (2 s_dk^2) - log s_dk)
                   - D log(2 pi) / 2 - D log((high - low) / 2)

    Values that recur, such as a black background, have densities without bound: hence the least
    scale, which is ours. Layers, masks and their seed are those of `Made`.

    Outputs: log_density log q [n], logits [n, D], the conditional means sum_k pi_dk m_dk.

    Source: Uria, Murray and Larochelle 2013, "RNADE", arXiv 1306.0186, for the mixtures; masks
    as `Made`. Raises InputError as `degrees`, unless low < high, and for no components.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        hidden: tuple[int, ...] = (500,),
        *,
        seed: int = 0,
        ordering: Ordering = "natural",
        low: float = -1.0,
        high: float = 1.0,
        components: int = 5,
    ) -> None:
        super().__init__()
        _check_range(low, high)
        if components < 1:
            raise InputError(f"components = {components}; a mixture has 1 or more")
        self.degrees = degrees(math.prod(shape), hidden, ordering, seed)
        self.low, self.high, self.components = low, high, components
        *hidden_masks, last = masks(self.degrees)
        # Each input has 3 K outputs, one after the other, which read what its one output would.
        outputs = Masked(last.repeat_interleave(3 * components, 0))
        with torch.no_grad():
            # Spread over the range: components that start alike would stay alike.
            bias = outputs.linear.bias.view(-1, 3, components)
            bias[:, 1] += torch.linspace(-1.0, 1.0, components)
        self.body = _layers((*map(Masked, hidden_masks), outputs))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        half = (self.high - self.low) / 2
        u = (x.to(next(self.parameters()).dtype).flatten(1) - self.low) / half - 1.0
        mix, mean, raw = self.body(u).view(len(u), -1, 3, self.components).unbind(2)
        scale = LEAST_SCALE + F.softplus(raw)
        log_pi = mix.log_softmax(-1)
        away = ((u.unsqueeze(-1) - mean) / scale).square()
        each = (log_pi - away / 2 - scale.log()).logsumexp(-1)
        constant = math.log(2 * math.pi) / 2 + math.log(half)
        middle = (log_pi.exp() * mean).sum(-1)
        return {"logits": middle, "log_density": (each - constant).sum(1)}


def _layers(layers: tuple[Masked, ...]) -> nn.Sequential:
    """The layers with ReLU between them."""
    first, *others = layers
    return nn.Sequential(first, *chain.from_iterable((nn.ReLU(), layer) for layer in others))


def _check_range(low: float, high: float) -> None:
    if not -math.inf < low < high < math.inf:
        raise InputError(
            f"low = {low} and high = {high}: low must be below high, and both finite numbers"
        )


class Discriminator(nn.Module):
    """One logit for each vector: x [n, ..., D] -> logits [n, ...], D - `hidden` ReLU units - 1.

    The last layer starts at zero, so that before any training both origins are as likely.
    """

    def __init__(self, inputs: int, hidden: int = 100) -> None:
        super().__init__()
        self.body = nn.Linear(inputs, hidden)
        self.head = nn.Linear(hidden, 1)
        # Zero logits: log odds start at 0, whatever the hidden layer gives.
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        features = F.relu(self.body(x))
        return {"features": features, "logits": self.head(features).squeeze(-1)}
