"""Scores of models, as counts that can be added: clients and batches are pooled exactly."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import reduce
from operator import add
from typing import Any, NamedTuple, Self, TypeVar

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


Kind = TypeVar("Kind", bound=Scored)


def pooled(scores: Sequence[Kind]) -> Kind:
    """The sum of one or more scores of a kind, as by adding them in turn."""
    first = scores[0]
    if len(scores) == 1:
        return first
    sums = list[Any]()
    for name in (one.name for one in fields(first)):  # type: ignore[arg-type]
        values = [getattr(one, name) for one in scores]
        if any(v is None for v in values):
            sums.append(None)
        elif isinstance(values[0], Tensor):
            sums.append(torch.stack(values).sum(0))
        else:
            sums.append(reduce(add, values))
    return type(first)(*sums)


def score(
    model: Model,
    params: Params,
    buffers: Params,
    examples: Examples | Sequence[Examples],
    classes: int,
    *,
    batch: int = 1000,
    confusion: bool = False,
    correction: Correction | None = None,
) -> Score:
    """Score one model on examples x [n, ...], y [n], in blocks of `batch`, fewer for large ones.

    examples: several sets count as one. confusion: also fill the confusion matrix. correction: of
    the logits, before they are scored.
    """
    check_classes(model)
    counted = confusion and classes <= MOST_CLASSES
    with undrawn(model.net):
        rows = answered(model, params, buffers, examples, batch)
        return _counts(rows, [0], classes, correction, counted)[0]


def score_each(
    model: Model, params: Params, buffers: Params, sets: Sequence[Examples], classes: int
) -> list[Score]:
    """The score of one model on each set, by one joined pass over the rows of all sets."""
    check_classes(model)
    with undrawn(model.net):
        return _counts(answered(model, params, buffers, sets), sizes_of(sets), classes)


def check_classes(model: Model) -> None:
    """Raise InputError for a model that predicts no classes."""
    check_kind("model", model, Model, "give Model(net)")
    if model.outputs is not None:
        raise InputError(
            "this network predicts no classes; score it by fedshift.evaluation.targets, on the "
            "server where clients are Flower's"
        )


def score_logits(
    logits: Tensor, y: Tensor, classes: int, correction: Correction | None = None
) -> Score:
    """The score, with its confusion matrix, of logits z [n, K] that were computed before."""
    parts = torch.split(logits, 1000)
    blocks = zip(parts, parts, torch.split(y, 1000), strict=True)
    return _counts(blocks, [0], classes, correction, classes <= MOST_CLASSES)[0]


def _counts(
    blocks: Iterable[tuple[Tensor, Tensor, Tensor]], sizes: Sequence[int], classes: int,
    correction: Correction | None = None, confusion: bool = False,
) -> list[Score]:  # fmt: skip
    """The scores of consecutive sets of these sizes; a single set has all rows.

    blocks: (logits [b, K], x, labels [b]).
    """
    # Counts, not rates: they add up over blocks and clients exactly. The loss is summed in float64,
    # so that the result hardly depends on the size of the blocks.
    M = len(sizes)
    correct, total, predicted = counts = torch.zeros(3, M * classes, dtype=torch.int64)
    loss = torch.zeros(M, dtype=torch.float64)
    confused = torch.zeros(classes, classes, dtype=torch.int64) if confusion else None
    for (out, _, y), part in with_parts(blocks, sizes):
        if len(y) and not 0 <= int(y.min()) <= int(y.max()) < classes:
            raise InputError(f"labels must lie in 0..{classes - 1}")
        logits = out if correction is None else torch.from_numpy(correction.of(out.cpu()))
        # NaN counts as the largest number in argmax: it would be an answer.
        if lost := int(logits.isnan().any(1).sum()):
            raise DivergedError(
                f"the model gives NaN for {lost} of {len(y)} examples that it is scored on: "
                "training diverged, or the network cannot take these inputs. Lower the learning "
                "rate, or look at their values"
            )
        given = logits.argmax(1)
        cell, one = part * classes, torch.ones_like(y)
        correct.index_add_(0, (cell + y)[given == y], one[given == y])
        total.index_add_(0, cell + y, one)
        predicted.index_add_(0, cell + given, one)
        confused = None if confused is None else confused + confusion_of(given, y, classes)
        loss.index_add_(0, part, F.cross_entropy(logits.double(), y, reduction="none"))
    tables = (v.unbind() for v in counts.view(3, M, classes))
    rows = zip(*tables, loss.tolist(), strict=True)
    return [Score(c, n, p, summed, confused) for c, n, p, summed in rows]


def confusion_of(given: Tensor, truth: Tensor, classes: int) -> Tensor:
    """The confusion matrix [K, K]: counts of true labels (rows) by predicted ones (columns)."""
    pairs = torch.bincount(truth * classes + given, minlength=classes * classes)
    return pairs.reshape(classes, classes)


def sizes_of(sets: Sequence[Examples]) -> list[int]:
    """The number of rows of each set."""
    return [len(one.y) for one in sets]


def with_parts(
    blocks: Iterable[tuple[Tensor, Tensor, Tensor]], sizes: Sequence[int]
) -> Iterator[tuple[tuple[Tensor, Tensor, Tensor], Tensor]]:
    """Each block with the set [b] that its rows are from, for consecutive sets of these sizes.

    All rows are of a single set.
    """
    if len(sizes) == 1:
        yield from ((block, torch.zeros_like(block[2])) for block in blocks)
        return
    part, start = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes)), 0
    for block in blocks:
        n = len(block[2])
        yield block, part[start : start + n]
        start += n


def answered(
    model: Model,
    params: Params,
    buffers: Params,
    examples: Examples | Sequence[Examples],
    batch: int = 1000,
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield (outputs [b, K], x, y) block by block, without gradients.

    The rows of several sets are joined: a block goes on where one set ends and the next begins.
    """
    sets = [examples] if isinstance(examples, Examples) else examples
    row = sets[0].x[:1].numel() if sets else 1
    for x, y in _blocks(sets, min(batch, max(1, LARGEST // max(1, row)))):
        with torch.no_grad():
            out = model(params, buffers, x)["logits"]
        yield out, x, y


def _blocks(sets: Iterable[Examples], size: int) -> Iterator[tuple[Tensor, Tensor]]:
    xs, ys, count = list[Tensor](), list[Tensor](), 0
    for x, y in ((one.x, one.y) for one in sets):
        start, n = 0, len(y)
        while start < n:
            end = min(n, start + size - count)
            whole = end - start == n
            xs.append(x if whole else x[start:end])
            ys.append(y if whole else y[start:end])
            count, start = count + end - start, end
            if count == size:
                yield _joined(xs), _joined(ys)
                xs, ys, count = [], [], 0
    if count:
        yield _joined(xs), _joined(ys)


def _joined(parts: list[Tensor]) -> Tensor:
    # A single part may be mapped from disk: it is not copied.
    return parts[0] if len(parts) == 1 else torch.cat(parts)
