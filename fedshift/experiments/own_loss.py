"""A loss of one's own in place of the cross-entropy, in whatever method is trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from torch import Tensor

from fedshift.algorithms.base import Algorithm
from fedshift.arguments import called
from fedshift.client.objectives import CrossEntropy, Term, View, batch_mean
from fedshift.errors import InputError
from fedshift.model import Model


@dataclass(frozen=True)
class PerExample(Term):
    """(1/B) sum_b w_b loss(z, y)_b, with logits z [B, K], labels y [B] and losses [B]."""

    loss: Callable[[Tensor, Tensor], Tensor]

    def __call__(self, view: View) -> Tensor:
        return batch_mean(self.loss(view.out["logits"], view.batch.y), view.batch)


def loss_term(loss: Term | Callable[[Tensor, Tensor], Tensor]) -> Term:
    """The term that a user's loss is. Raises InputError for what cannot be called."""
    if isinstance(loss, Term):
        return loss
    if isinstance(loss, type) or not callable(loss):
        raise InputError(
            f"loss is {called(loss)}; give a function loss(logits, y) -> one loss per example, or "
            "a Term of fedshift.client.objectives"
        )
    return PerExample(loss)


def check_loss(loss: Term | None, model: Model, x: Tensor, y: Tensor) -> None:
    """Raise InputError for a function that fails on a few examples, or gives not one loss each."""
    if not isinstance(loss, PerExample):
        return
    logits = model(*model.init(), x)["logits"]
    try:
        values = loss.loss(logits, y)
    except Exception as e:
        raise InputError(
            f"loss fails on logits {tuple(logits.shape)} and labels {tuple(y.shape)}: "
            f"{type(e).__name__}: {e}"
        ) from e
    if not isinstance(values, Tensor) or values.shape != y.shape:
        given = f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else called(values)
        raise InputError(
            f"loss gave {given} for {len(y)} examples; it must give one loss per example, as with "
            'reduction="none"'
        )


def with_loss(algorithm: Algorithm, loss: Term | None) -> Algorithm:
    """The method with `loss` for each cross-entropy in its fields; None changes nothing.

    Other terms stay, such as FedProx's. Raises InputError for a method that has no cross-entropy.
    """
    if loss is None:
        return algorithm
    changed: Algorithm = _changed(algorithm, loss)
    if changed is algorithm:
        raise InputError(
            f"loss: {type(algorithm).__name__} has a local loss of its own, which no other can "
            "take the place of; leave loss out, or choose a method such as fedavg"
        )
    return changed


def _changed(value: Any, loss: Term) -> Any:
    """The same object where nothing within it is a cross-entropy."""
    if type(value) is CrossEntropy:
        return loss
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        entries = tuple(_changed(one, loss) for one in value)
        return value if all(map(lambda a, b: a is b, entries, value)) else entries
    if not is_dataclass(value) or isinstance(value, type | Model):
        return value
    pairs = {f.name: getattr(value, f.name) for f in fields(value) if f.init}
    news = {k: new for k, v in pairs.items() if (new := _changed(v, loss)) is not v}
    return replace(value, **news) if news else value
