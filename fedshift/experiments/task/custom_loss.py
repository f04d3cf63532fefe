"""The user's own loss in place of the cross-entropy, in any method."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedshift.algorithms.method import Method
from fedshift.arguments import called
from fedshift.client.objectives import CrossEntropy, Term, View, batch_mean
from fedshift.client.targets import LabelEntropy, SquaredError, plain_outputs
from fedshift.data import Task, last_columns
from fedshift.engine.preflight.method import objectives_of
from fedshift.errors import InputError
from fedshift.experiments.config.user_code import file_of, raised
from fedshift.model import Model


@dataclass(frozen=True)
class PerExample(Term):
    """(1/B) sum_b w_b loss(z, y)_b, with logits z [B, K], labels y [B] and losses [B].

    outputs: the number L of outputs if the task has no classes; z and y are [B, L] then, or [B] for
    a single number.
    """

    loss: Callable[[Tensor, Tensor], Tensor]
    outputs: int | None = None

    def __call__(self, view: View) -> Tensor:
        pair = self.pair(view.out["logits"], view.batch.x, view.batch.y)
        return batch_mean(self.loss(*pair), view.batch)

    def pair(self, logits: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The two arguments of the loss: logits or outputs, and true answers."""
        if self.outputs is None:
            return logits, y
        return plain_outputs(logits), last_columns(x, self.outputs)


def loss_of(task: Task, loss: Term | None) -> Term | None:
    """The loss that a task is trained with; None means the methods' own cross-entropy.

    Without a loss of the user's it is squared error for numbers, and binary cross-entropy for
    several labels per example. These also replace a `CrossEntropy` inside the user's loss.
    """
    if isinstance(loss, PerExample):
        return replace(loss, outputs=len(task.outputs) or None)
    if not task.outputs:
        return loss
    usual = SquaredError() if task.kind == "regression" else LabelEntropy(len(task.outputs))
    changed: Term = usual if loss is None else _changed(loss, usual)
    return changed


def loss_term(loss: Term | Callable[[Tensor, Tensor], Tensor]) -> Term:
    """A user's loss as a Term. Raises InputError for an object that cannot be called."""
    if isinstance(loss, Term):
        return loss
    if isinstance(loss, type) or not callable(loss):
        raise InputError(
            f"loss is {called(loss)}; give a function loss(logits, y) -> one loss per example, or "
            "a Term of fedshift.client.objectives"
        )
    return PerExample(loss)


def check_loss(loss: Term | None, model: Model, x: Tensor, y: Tensor) -> None:
    """Raise InputError for a function that fails, or does not give one loss for each example.

    So for a loss without a gradient.
    """
    if not isinstance(loss, PerExample):
        return
    logits, due = loss.pair(model(*model.init(), x)["logits"], x, y)
    try:
        with torch.enable_grad():
            # Times 1, since a loss may write into logits, which is forbidden for leaves.
            values = loss.loss(logits.detach().requires_grad_() * 1, due)
    except Exception as e:
        raise InputError(
            f"loss fails on logits {tuple(logits.shape)} and labels {tuple(due.shape)}: "
            f"{raised(e, file_of(loss.loss))}"
        ) from e
    if not isinstance(values, Tensor) or values.shape != y.shape:
        given = f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else called(values)
        raise InputError(
            f"loss gave {given} for {len(y)} examples; it must give one loss per example, as with "
            'reduction="none"'
        )
    if not values.requires_grad:
        raise InputError(
            "loss has no gradient by its logits, so that nothing would be learned; leave detach(), "
            "argmax, numpy and no_grad() out of it"
        )


def with_loss(
    algorithm: Method, loss: Term | None, kind: str = "classification", name: str = ""
) -> Method:
    """The method with `loss` in place of each cross-entropy in its fields; None changes nothing.

    Other terms stay, such as FedProx's. kind: the task's; name: the method's. Raises InputError for
    a method without a cross-entropy, and for one that needs classes if the task has none.
    """
    if loss is None:
        return algorithm
    changed: Method = _changed(algorithm, loss)
    by_class = algorithm.needs_classes() or algorithm.trains_router() or changed is algorithm
    by_class = by_class or any(term.reads_classes() for term in objectives_of(algorithm))
    if kind != "classification" and by_class:
        raise InputError(
            f"{name or type(algorithm).__name__} works with classes (by their logits, their sets, "
            f"or without a CrossEntropy() to replace), and this "
            f'task is "{kind}"; take another, such as fedavg, fedpals, scaffold or ditto'
        )
    if changed is algorithm:
        raise InputError(
            f"loss: {type(algorithm).__name__} has a local loss of its own, which no other can "
            "take the place of; leave loss out, or choose a method such as fedavg"
        )
    return changed


def _changed(value: Any, loss: Term) -> Any:
    """A copy with each cross-entropy within replaced; the same object if there is none.

    That it is the same object shows `with_loss` that nothing was replaced.
    """
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
