"""Scores of models, as counts that can be added: clients and batches are pooled exactly."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from fedshift.arguments import check_kind
from fedshift.data import Examples
from fedshift.errors import DivergedError, InputError
from fedshift.model import Model
from fedshift.randomness import undrawn
from fedshift.server.prior import Correction
from fedshift.sketch import sketched
from fedshift.tree import Params

# The most input values of a block: those of 1,000 colour images of 96 pixels. A ResNet-50 keeps
# some hundred bytes per value, so 1,000 images of 448 pixels would take tens of gigabytes.
LARGEST = 1000 * 3 * 96 * 96
# The confusion matrix of more classes would take more than 8 MB.
MOST_CLASSES = 1000


class Scored(ABC):
    """Base of all scores: a dataclass of sums, so that scores can be added.

    total  [K] examples by label
    """

    total: Tensor
    loss_sum: float

    def __add__(self, other: Self) -> Self:
        names = [one.name for one in fields(self)]  # type: ignore[arg-type]
        pairs = ((getattr(self, name), getattr(other, name)) for name in names)
        return type(self)(*(None if a is None or b is None else a + b for a, b in pairs))

    @property
    def n(self) -> int:
        """Examples scored."""
        return int(self.total.sum())

    @property
    def loss(self) -> float:
        """Mean loss; NaN without examples."""
        return self.loss_sum / self.n if self.n else float("nan")

    @property
    @abstractmethod
    def accuracy(self) -> float:
        """Fraction right; NaN without examples."""

    @property
    @abstractmethod
    def recall(self) -> list[float | None]:
        """Fraction right per label; None for a label without examples."""

    @property
    @abstractmethod
    def macro_f1(self) -> float:
        """The mean of F1 over the labels that occur; NaN without examples."""

    @property
    @abstractmethod
    def others(self) -> dict[str, float]:
        """Further numbers by name, which only some tasks have, such as an R^2."""


@sketched
@dataclass(frozen=True, eq=False)
class Score(Scored):
    """A model's right answers, label by label, and its summed cross-entropy. Scores can be added.

    correct    [K] int64: examples of label y that were predicted as y
    total      [K] int64: examples of label y
    predicted  [K] int64: examples predicted as y, whatever they are
    confusion  [K, K] int64: examples of label y (row) by what they were predicted as (column);
               None where it was not counted
    accuracy = sum_y correct_y / sum_y total_y; recall_y = correct_y / total_y.
    """

    correct: Tensor
    total: Tensor
    predicted: Tensor
    loss_sum: float
    confusion: Tensor | None = field(default=None, repr=False)

    @property
    def accuracy(self) -> float:
        """Fraction right; NaN without examples."""
        # A quotient of integers is exact, however many examples there are.
        return int(self.correct.sum()) / self.n if self.n else float("nan")

    @property
    def recall(self) -> list[float | None]:
        """Fraction right per label; None for a label without examples."""
        pairs = zip(self.correct.tolist(), self.total.tolist(), strict=True)
        return [c / n if n else None for c, n in pairs]

    @property
    def macro_f1(self) -> float:
        """The mean of F1_y = 2 correct_y / (total_y + predicted_y) over the labels y that occur.

        A label that is predicted but never true adds no term of its own; it lowers the terms of the
        labels that it was taken for. NaN without examples.

        Source: WILDS (Koh et al. 2021), "F1-macro_all": scikit-learn's f1_score with
        average="macro" and labels=unique(truth).
        """
        present = self.total > 0
        f1 = 2.0 * self.correct[present].double() / (self.total + self.predicted)[present]
        return float(f1.mean())

    @property
    def others(self) -> dict[str, float]:
        """None."""
        return {}


@sketched
class OwnScores(NamedTuple):
    """Scores that a client reports of the model that it serves. The model itself stays with it.

    validation, test: on its validation and its test examples. shared: of the server's model on the
    test examples, if that is a whole model. sent [M]: how many of the test examples the router
    sends to each client; None for a method without a router.
    """

    validation: Score
    test: Score
    shared: Score | None
    sent: Tensor | None


def score(
    model: Model,
    params: Params,
    buffers: Params,
    examples: Examples,
    classes: int,
    *,
    batch: int = 1000,
    confusion: bool = False,
    correction: Correction | None = None,
) -> Score:
    """Score one model on examples x [n, ...], y [n], in blocks of `batch`, fewer for large ones.

    confusion: also fill the confusion matrix. correction: of the logits, before they are scored.
    """
    check_kind("model", model, Model, "give Model(net)")
    if model.outputs is not None:
        raise InputError(
            "this network predicts no classes; score it by fedshift.evaluation.targets, on the "
            "server where clients are Flower's"
        )
    if len(examples) and not 0 <= int(examples.y.min()) <= int(examples.y.max()) < classes:
        raise InputError(f"labels must lie in 0..{classes - 1}")
    counted = confusion and classes <= MOST_CLASSES
    with undrawn(model.net):
        return _score(model, params, buffers, examples, classes, batch, counted, correction)


def _score(
    model: Model, params: Params, buffers: Params, examples: Examples, classes: int, batch: int,
    counted: bool, correction: Correction | None,
) -> Score:  # fmt: skip
    # Counts, not rates: they add up over blocks and clients exactly.
    correct, predicted = torch.zeros(2, classes, dtype=torch.int64)
    loss, confused = 0.0, confusion_of(examples.y[:0], examples.y[:0], classes) if counted else None
    for out, _, y in answered(model, params, buffers, examples, batch):
        logits = out if correction is None else torch.from_numpy(correction.of(out.cpu()))
        # NaN counts as the largest number in argmax: it would be an answer.
        if lost := int(logits.isnan().any(1).sum()):
            raise DivergedError(
                f"the model gives NaN for {lost} of {len(y)} examples that it is scored on: "
                "training diverged, or the network cannot take these inputs. Lower the learning "
                "rate, or look at their values"
            )
        given = logits.argmax(1)
        correct += torch.bincount(y[given == y], minlength=classes)
        predicted += torch.bincount(given, minlength=classes)
        confused = None if confused is None else confused + confusion_of(given, y, classes)
        # Summed in float64, so that the result hardly depends on the size of the blocks.
        loss += float(F.cross_entropy(logits.double(), y, reduction="sum"))
    total = torch.bincount(examples.y, minlength=classes)
    return Score(correct, total, predicted, loss, confused)


def confusion_of(given: Tensor, truth: Tensor, classes: int) -> Tensor:
    """The confusion matrix [K, K]: counts of true labels (rows) by predicted ones (columns)."""
    pairs = torch.bincount(truth * classes + given, minlength=classes * classes)
    return pairs.reshape(classes, classes)


def answered(
    model: Model, params: Params, buffers: Params, examples: Examples, batch: int = 1000
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield (outputs [b, K], x, y) block by block, without gradients."""
    size = min(batch, max(1, LARGEST // max(1, examples.x[:1].numel())))
    for start in range(0, len(examples), size):
        x, y = examples.x[start : start + size], examples.y[start : start + size]
        with torch.no_grad():
            out = model(params, buffers, x)["logits"]
        yield out, x, y
