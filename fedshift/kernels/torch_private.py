"""The two private names of torch that the package uses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def versions(tensors: Sequence[Tensor]) -> list[int | None]:
    """A counter of writes to each tensor; None for tensors of inference mode, which have none."""
    return [None if v.is_inference() else v._version for v in tensors]


def within_vmap(v: Tensor) -> bool:
    """Whether the tensor is batched by vmap over clients, so that its values cannot be read."""
    return torch._C._functorch.is_functorch_wrapped_tensor(v)
