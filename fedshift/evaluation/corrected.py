"""Corrected models: a `Correction` written into the network's last layer, or wrapped around it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedshift.model import Model
from fedshift.server.prior import Correction
from fedshift.tree import Params

# How many random inputs a layer is tried on.
TRIED = 4


class Head(NamedTuple):
    """The names of the last layer's parameters: weight [K, ...] and bias [K]."""

    weight: str
    bias: str


def shifted(logits: Tensor, correction: Correction) -> Tensor:
    """Logits z [n, K] with the correction applied: scale z + bias, in the type of z."""
    scaled = logits if correction.scale == 1.0 else logits * correction.scale
    return scaled + torch.as_tensor(correction.bias).to(logits)


def head_of(model: Model, params: Params, buffers: Params, shape: tuple[int, ...]) -> Head | None:
    """The layer that a correction can be written into; None if the network has none.

    It is tried on inputs of this shape, not assumed from names: scaling the layer's weight and
    bias, and shifting the bias, must scale and shift the logits. A layer without bias, tied
    weights, and what follows the layer (a norm, a temperature) fail that.
    """
    # Numbers in [0, 1) are valid inputs also for networks that expect pixels, or whole numbers.
    x = torch.rand(TRIED, *shape, generator=torch.Generator().manual_seed(0))
    z = model(params, buffers, x)["logits"].detach()
    classes = z.shape[1]
    # Scale 2 and whole numbers add no rounding of their own to that of the network.
    trial = Correction(
        2.0, torch.arange(classes).double().numpy(), torch.ones(classes).bool().numpy()
    )
    wanted = shifted(z, trial)
    near = 1e-4 * (1.0 + float(wanted.abs().max()))
    for name in reversed([k.removesuffix("bias") for k in params if k.endswith("bias")]):
        head = Head(f"{name}weight", f"{name}bias")
        weight = params.get(head.weight)
        if (
            weight is None
            or weight.dim() < 2
            or {len(weight), *params[head.bias].shape} != {classes}
        ):
            continue
        tried = model(written(params, head, trial), buffers, x)["logits"].detach()
        if torch.allclose(tried, wanted, rtol=0.0, atol=near):
            return head
    return None


def written(params: Params, head: Head, correction: Correction) -> Params:
    """The parameters whose head gives scale (W h + b) + bias: weight scale W, bias scale b + bias.

    The logits equal those of `shifted` up to the rounding of one sum. With scale 1 the weight stays
    the same tensor.
    """
    weight, bias = params[head.weight], params[head.bias]
    shift = torch.as_tensor(correction.bias)
    # Computed in float64, so that the bias is rounded only once, at the end.
    moved = (bias.double() * correction.scale + shift.to(bias.device)).to(bias.dtype)
    scaled = weight if correction.scale == 1.0 else weight * correction.scale
    return params | {head.weight: scaled, head.bias: moved}


class Shifted(nn.Module):
    """A network with scaled and shifted logits, for a correction that no layer can take in."""

    bias: Tensor

    def __init__(self, net: nn.Module, correction: Correction) -> None:
        super().__init__()
        self.net, self.scale = net, float(correction.scale)
        self.register_buffer("bias", torch.as_tensor(correction.bias))

    def forward(self, *x: Tensor) -> Any:
        """The network's outputs, with corrected logits."""
        out: Any = self.net(*x)
        z = out["logits"] if isinstance(out, dict) else out
        moved = (z if self.scale == 1.0 else z * self.scale) + self.bias.to(z)
        return {**out, "logits": moved} if isinstance(out, dict) else moved
