"""Checks of a network's outputs on a few inputs, before any training."""

from __future__ import annotations

import torch
from torch import Tensor

from fedshift.errors import InputError
from fedshift.model import Model
from fedshift.tree import Params


def dry_pass(model: Model, params: Params, buffers: Params, x: Tensor) -> Params:
    """The outputs of a trial pass in evaluation mode, which changes neither model nor generators.

    Raises InputError for a model without parameters and one that fails on x.
    """
    if not params:
        raise InputError("the model has no parameters; there is nothing to train")
    model.check(params, buffers)
    # Some networks write into buffers in evaluation mode, too.
    copies = {k: v.clone() for k, v in buffers.items()}
    try:
        with torch.no_grad():
            return model(params, copies, x)
    except Exception as e:  # a network may raise anything
        kind = next(iter(params.values())).dtype
        hint = f" (its parameters are {kind}: give it x.to({kind}))" if x.dtype != kind else ""
        raise InputError(f"the model fails on inputs {x.dtype} {tuple(x.shape)}: {e}{hint}") from e


def dry_logits(model: Model, params: Params, buffers: Params, x: Tensor) -> Tensor:
    """Logits [n, C] of `dry_pass`.

    Raises InputError as `dry_pass`, and for a model that returns anything but logits with a row
    per input.
    """
    out = dry_pass(model, params, buffers, x)
    if "logits" not in out:
        raise InputError(f'the model returns {sorted(out)}; it must return "logits" [n, K]')
    logits = out["logits"]
    if not isinstance(logits, Tensor):
        raise InputError(
            f"the model's logits are a {type(logits).__name__}; its forward must return a tensor "
            '[n, K], or a dictionary {"logits": ...}'
        )
    # A logit per example, or logits per pixel, could be broadcast by a loss without an error.
    if logits.ndim != 2 or len(logits) != len(x):
        raise InputError(
            f"the model gives logits {tuple(logits.shape)} for {len(x)} inputs; they must be "
            f"({len(x)}, K), a row per input and a column per class"
        )
    return logits


def check_classes(model: Model, x: Tensor, classes: int) -> None:
    """Raise InputError unless the model has as many outputs as the task needs."""
    check_columns(dry_logits(model, *model.init(), x), classes, model.outputs)


def check_columns(logits: Tensor, classes: int, outputs: int | None = None) -> None:
    """Raise InputError unless logits [n, C] have a column for each of K classes, and no other.

    outputs: the number of columns for a task that does not predict classes (`Model.outputs`).
    """
    n, columns = logits.shape
    due = outputs or classes
    if columns != due:
        what = f"has {classes} classes" if outputs is None else f"predicts {due} per row, no class"
        raise InputError(
            f"the model gives logits ({n}, {columns}) for {n} inputs; "
            f"the task {what}, so they must be ({n}, {due})"
        )
