"""The user's random change of training examples, which is drawn anew for each batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedshift.arguments import called
from fedshift.errors import InputError
from fedshift.seeds import generator
from fedshift.tasks.layout import Layout


@dataclass(frozen=True, eq=False)
class Transformed:
    """The user's transform(x, generator) as a model's `augment`: (x, seed) -> x of the same shape.

    The transform gets a batch as the network does. The seed is that of the training step.
    """

    transform: Callable[[Any, torch.Generator], Any]
    layout: Layout | None = None

    def __call__(self, x: Tensor, seed: int) -> Tensor:
        """x [B, ...] changed. Raises InputError for a result of another shape."""
        random = generator(seed, "transform")
        if self.layout is None:
            return _checked(self.transform(x, random), x)
        inputs = replace(self.layout, parts=self.layout.inputs, targets=False)
        out = self.transform(self.layout.unpack(x), random)
        if isinstance(out, Mapping):
            out = {part.name: out[part.name] for part in inputs.parts}
        changed = inputs.pack(out)
        return _checked(torch.cat([changed, x[:, inputs.width :]], dim=1), x)


def _checked(out: object, x: Tensor) -> Tensor:
    if not isinstance(out, Tensor) or out.shape != x.shape:
        what = tuple(out.shape) if isinstance(out, Tensor) else called(out)
        raise InputError(f"transform made {what} of examples {tuple(x.shape)}; keep their shape")
    return out.to(x.dtype)
