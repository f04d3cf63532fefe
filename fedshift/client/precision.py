"""The numbers that a network's layers multiply in local training."""

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
    """The training pass of a model in this precision; of "float32" it is `model.train` itself."""
    return model.train if precision == "float32" else partial(_in_bfloat16, model)


def _in_bfloat16(
    model: Model, params: Params, buffers: Params, x: Tensor, seed: int = 0
) -> tuple[Params, Params]:
    """The pass under `torch.autocast`, its outputs [B, ...] in the parameters' type again.

    Autograd keeps the casts, so the backward pass multiplies in bfloat16 too, and gradients come
    out in the parameters' type. Buffers are written in their own. Raises UnfitError for parameters
    that are not float32: of float64 autocast would say nothing and change nothing.
    """
    if odd := [f"{k} is {v.dtype}" for k, v in params.items() if v.dtype != torch.float32]:
        raise UnfitError(
            f"precision bfloat16 is for float32 parameters, and {odd[0]}; use float32 parameters, "
            'or precision = "float32"'
        )
    # In the outputs' type for terms and losses: a softmax in bfloat16 has two or three digits.
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        out, after = model.train(params, buffers, x, seed)
    return {k: v.float() if v.is_floating_point() else v for k, v in out.items()}, after
