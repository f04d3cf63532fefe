"""Terms of a user's own, tried on a few examples before the first round."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from fedshift.algorithms.method import Method
from fedshift.arguments import called
from fedshift.client.objectives import Term, View, check_value
from fedshift.data import Batch
from fedshift.engine.federation import Federation
from fedshift.engine.preflight.method import objectives_of
from fedshift.engine.preflight.network import BATCH, first_with_examples
from fedshift.errors import InputError
from fedshift.randomness import one_at_a_time, put_back, states


class _Outputs(dict[str, Tensor]):
    """A network's outputs, which remember what was asked for and is not among them."""

    lacking = ""

    def __missing__(self, name: str) -> Tensor:
        self.lacking = name
        raise KeyError(name)


@torch.inference_mode(False)
def check_terms(algorithm: Method, federation: Federation) -> None:
    """InputError for a term that trains nothing, writes labels, or reads outputs that are missing.

    Only for terms from outside the library that need no memory and no word of the server. Terms
    that fail otherwise are left to training: a trial has no context, and few examples.
    """
    data, first = first_with_examples(federation), algorithm.at(1)
    if data is None or first.trained_model() is not algorithm.model:
        return
    for term in [t for o in objectives_of(first) for t in o.summands() if _is_alone(t)]:
        # Two examples at least: BatchNorm takes no fewer.
        n = min(max(2, len(data.y)), BATCH)
        rows = torch.arange(n) % len(data.y)
        x, y, size = data.x[rows], data.y[rows], torch.tensor(float(n))
        batch = Batch(x, y.clone(), torch.ones(n), rows, size, even=True)
        with one_at_a_time():
            before = states()
            try:
                _try(term, algorithm, federation, batch, y)
            finally:
                put_back(before)


def _is_alone(term: Term) -> bool:
    """Whether it is a user's, and remembers and hears nothing."""
    kind = type(term)
    ours = kind.__module__.partition(".")[0] == "fedshift"
    return not ours and kind.remember is Term.remember and kind.hear is Term.hear


def _try(term: Term, algorithm: Method, federation: Federation, batch: Batch, y: Tensor) -> None:
    model, params = algorithm.model, federation.params
    moving = {k: v.detach().requires_grad_() for k, v in model.trainable(params).items()}
    buffers = {k: v.clone() for k, v in federation.buffers.items()}
    with torch.enable_grad():
        out = _Outputs(model(params | moving, buffers, batch.x))
        try:
            # A copy: a generator of its own must stand where it stood.
            value: Any = deepcopy(term)(View(model, params | moving, out, batch, {}))
        except Exception:
            if out.lacking:
                raise InputError(
                    f'{called(term)} reads "{out.lacking}", and the network returns {list(out)}; '
                    f'let its forward return {{"logits": ..., "{out.lacking}": ...}}'
                ) from None
            return
    check_value(value, term)
    # A value of 0 may be that of a batch without what the term looks for, or of a warm-up.
    if moving and not value.requires_grad and value.ne(0):
        raise InputError(
            f"the value of {called(term)} has no gradient by the network's parameters, so that it "
            "would change nothing; leave detach(), item(), argmax and no_grad() out of it"
        )
    if not batch.y.equal(y):
        raise InputError(f"{called(term)} writes into the labels of its batch; give it a copy")
