"""Evaluation on another device: inputs are copied there, and outputs come back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

import torch
from torch import Tensor

from fedshift.tree import Params

_PLACE: ContextVar[torch.device | None] = ContextVar("place", default=None)
Evaluate = Callable[[Params, Params, Tensor], Params]


@contextlib.contextmanager
def outputs_on(device: str | torch.device) -> Iterator[None]:
    """In this block, models in evaluation mode compute on `device`; everything else stays put.

    Weights and inputs are copied at each call and outputs are copied back, so that code that
    evaluates need not know about devices. Outputs differ from the processor's by rounding alone.

        with outputs_on("cuda"):
            model(params, buffers, x)["logits"].device  # that of x
    """
    before = _PLACE.set(torch.device(device))
    try:
        yield
    finally:
        _PLACE.reset(before)


def elsewhere(evaluate: Evaluate, params: Params, buffers: Params, x: Tensor) -> Params:
    """evaluate(params, buffers, x) on the device of `outputs_on`, or here outside such a block."""
    place = _PLACE.get()
    if place is None or x.device == place:
        return evaluate(params, buffers, x)
    weights, kept = ({k: v.to(place) for k, v in tree.items()} for tree in (params, buffers))
    out = evaluate(weights, kept, x.to(place))
    return {k: v.to(x.device) for k, v in out.items()}
