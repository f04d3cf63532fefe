"""Class weights as users give them: how much an example of each class counts in training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedshift.arguments import called
from fedshift.errors import InputError, nearest, shown
from fedshift.tasks.building import Built
from fedshift.tasks.names import listed, text_of

Weights = str | Mapping[str, float] | Tensor | np.ndarray | tuple[float, ...] | list[float]


def weights_of(given: Weights | None, built: Built) -> Tensor | None:
    """Class weights [K]; "balanced" means n / (K n_y) over all clients.

    Other weights are given by name or in order. Raises InputError for a task without classes, for
    a wrong length, for unknown or missing classes, and for weights that are not positive.
    """
    if given is None:
        return None
    classes, kind = built.task.classes, built.task.kind
    if kind != "classification":
        raise InputError(
            f'class_weights are of classes, and this task is "{kind}"; weigh examples in a '
            "loss of your own: loss=f"
        )
    if isinstance(given, str):
        if given != "balanced":
            raise InputError(
                f'class_weights="{shown(given)}": give "balanced", a dict by class, or one weight '
                "per class"
            )
        return _balanced(built)
    if isinstance(given, Mapping) or hasattr(given, "to_dict"):  # a pandas Series by class
        given = _by_name(given if isinstance(given, Mapping) else given.to_dict(), classes)
    due = f"class_weights must be {len(classes)} numbers above 0, one per class"
    try:
        weights = torch.as_tensor(given, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"{due}, got {called(given)}: {shown(str(given))}") from None
    if weights.shape != (len(classes),) or not bool(((weights > 0) & weights.isfinite()).all()):
        raise InputError(f"{due}, got {shown(str(weights.tolist()))}")
    return weights


def _balanced(built: Built) -> Tensor:
    counts = built.task.table()["labels"].sum(0)
    present = counts > 0
    # A class without examples gets 1: by the formula its weight would be infinite.
    return torch.where(present, counts.sum() / (present.sum() * counts.clamp(min=1)), 1.0)


def _by_name(given: Mapping[Any, Any], classes: tuple[str, ...]) -> list[Any]:
    named = {text_of(name): weight for name, weight in given.items()}
    for name in named:
        if name not in classes:
            raise InputError(
                f'class_weights: there is no class "{shown(name)}".{nearest(name, classes)} The '
                f"classes are {listed(classes)}"
            )
    if lacking := [name for name in classes if name not in named]:
        raise InputError(
            f'class_weights: no weight for {listed(lacking)}; give each class one, or "balanced"'
        )
    return [named[name] for name in classes]
