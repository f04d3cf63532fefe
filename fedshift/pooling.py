"""Rectifiers after the maximum over pixels instead of before it: the same numbers for less work.

relu(max_j z_j) = max_j relu(z_j), as relu is monotone. Both send a gradient to the first largest
z_j if it is above 0, and to none if it is not. A pool of 2 x 2 leaves a quarter of the entries.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from torch import nn

# The modules of an nn.Sequential by name, and the names of a rectifier and the pool after it.
Pair = tuple[dict[str, Any], str, str]


def rectified_pools(net: nn.Module) -> tuple[Pair, ...]:
    """Every `nn.ReLU` of the network that comes right before a max-pool in an `nn.Sequential`.

    Subclasses, whose forward may be another, are left out, and pools that tell where the largest
    were: with the rectifier before them, the first of several 0 is.
    """
    found: list[Pair] = []
    for module in net.modules():
        if type(module) is nn.Sequential:
            names = list(module._modules)
            found += [
                (module._modules, a, b)
                for a, b in pairwise(names)
                if type(module._modules[a]) is nn.ReLU and _is_pool(module._modules[b])
            ]
    return tuple(found)


def _is_pool(module: nn.Module | None) -> bool:
    kinds = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
    return type(module) in kinds and not getattr(module, "return_indices", False)


@contextlib.contextmanager
def pooled_first(pairs: tuple[Pair, ...]) -> Iterator[None]:
    """Each pair in the other order while the block runs; one that somebody looks into stays."""
    turned = [pair for pair in pairs if not any(map(_watched, (pair[0][n] for n in pair[1:])))]
    _turn(turned)
    try:
        yield
    finally:
        _turn(turned)


def _watched(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def _turn(pairs: list[Pair]) -> None:
    for modules, a, b in pairs:
        modules[a], modules[b] = modules[b], modules[a]
