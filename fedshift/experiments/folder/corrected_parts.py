"""A corrected model in model.safetensors: what was done to it, and the layer as it was.

Part "correction" has scale [], bias [K] and correctable [K]. Where the last layer took them,
"params" are corrected, and part "uncorrected" has that layer as it was trained. Elsewhere `predict`
applies them.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

from fedshift.errors import DataError, InputError
from fedshift.evaluation.corrected import head_of, written
from fedshift.model import Model
from fedshift.server.prior import Correction
from fedshift.tree import Params, Parts

CORRECTION, UNCORRECTED = "correction", "uncorrected"


class Applied(NamedTuple):
    """A correction, and the last layer as it was: {} where the layer could not take it."""

    correction: Correction
    before: Params


def with_correction(
    parts: Parts, model: Model, correction: Correction, shape: tuple[int, ...]
) -> Parts:
    """The parts of a corrected model, for inputs of this shape.

    Raises InputError for one that is corrected already: the target would count twice.
    """
    if CORRECTION in parts:
        raise InputError(
            "this model is corrected for a target already, and a second correction would count the "
            'target twice; correct the model as it was trained (part "uncorrected")'
        )
    pair = parts["params"], parts["buffers"]
    numbers: Params = {
        "scale": torch.tensor(correction.scale, dtype=torch.float64),
        "bias": torch.as_tensor(correction.bias, dtype=torch.float64),
        # int64: `stored.read_parts` takes no other whole numbers.
        "correctable": torch.as_tensor(correction.correctable).long(),
    }
    head = head_of(model, *pair, shape)
    if head is None:
        return {**parts, CORRECTION: numbers}
    before = {name: pair[0][name] for name in head}
    return {
        **parts, "params": written(pair[0], head, correction), CORRECTION: numbers,
        UNCORRECTED: before,
    }  # fmt: skip


def correction_in(parts: Parts, path: Path) -> Applied | None:
    """What was done to the model; None for one as it was trained. Raises DataError."""
    if CORRECTION not in parts:
        return None
    numbers, before = parts[CORRECTION], parts.get(UNCORRECTED, {})
    shapes = {name: v.dim() for name, v in numbers.items()}
    params = parts["params"]
    alike = all(k in params and params[k].shape == v.shape for k, v in before.items())
    if shapes != {"scale": 0, "bias": 1, "correctable": 1} or not alike:
        raise DataError(f'{path}: damaged (part "{CORRECTION}" is none of this model)')
    bias, correctable = numbers["bias"].numpy(), numbers["correctable"].bool().numpy()
    return Applied(Correction(float(numbers["scale"]), bias, correctable), before)


def without_correction(parts: Parts) -> Parts:
    """The parts of the model as it was trained."""
    others = {k: v for k, v in parts.items() if k not in (CORRECTION, UNCORRECTED)}
    return others | {"params": parts["params"] | parts.get(UNCORRECTED, {})}
