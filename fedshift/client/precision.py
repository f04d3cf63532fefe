"""The precision in which a network's layers multiply in local training."""

from __future__ import annotations

from functools import partial
from typing import Literal, Protocol

import torch
from torch import Tensor

from fedshift.errors import UnfitError
from fedshift.model import Model
from fedshift.tree import Params

Precision = Literal["float32", "bfloat16"]


class Forward(Protocol):
    """`Model.train`: (parameters, buffers, x, seed) -> (outputs, buffers after the pass)."""

    def __call__(
        self, params: Params, buffers: Params, x: Tensor, seed: int = 0
    ) -> tuple[Params, Params]: ...


def forward_of(model: Model, precision: Precision) -> Forward:
    """The training pass of a model in this precision; for "float32" it is `model.train` itself."""
    return model.train if precision == "float32" else partial(_in_bfloat16, model)


def _in_bfloat16(
    model: Model, params: Params, buffers: Params, x: Tensor, seed: int = 0
) -> tuple[Params, Params]:
    """The pass under `torch.autocast`, with outputs [B, ...] cast back to the parameters' type.

    Autograd records the casts, so the backward pass multiplies in bfloat16 too, and gradients have
    the parameters' type. Buffers keep their own type. Raises UnfitError for parameters that are not
    float32, because autocast silently ignores float64.
    """
    if odd := [f"{k} is {v.dtype}" for k, v in params.items() if v.dtype != torch.float32]:
        raise UnfitError(
            f"precision bfloat16 is for float32 parameters, and {odd[0]}; use float32 parameters, "
            'or precision = "float32"'
        )
    # Cast the outputs back before losses are computed: a softmax in bfloat16 has two or three
    # digits.
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        out, after = model.train(params, buffers, x, seed)
    return {k: v.float() if v.is_floating_point() else v for k, v in out.items()}, after
