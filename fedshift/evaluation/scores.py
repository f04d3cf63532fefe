"""Scores of models, as counts that can be added: clients and batches are pooled exactly."""

from __future__ import annotations

import math
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


# Outputs [b, K], inputs x, labels y [b], and the set [b] that each row is from.
Block = tuple[Tensor, Tensor, Tensor, Tensor]


class Scored(ABC):
    """Base of all scores: a dataclass of sums, so that scores can be added.

    total    [K] examples by label
    correct  [K] those of them that are predicted rightly
    """

    total: Tensor
    correct: Tensor
    loss_sum: float

    def __add__(self, other: Self) -> Self:
        return pooled([self, other])

    @property
    def n(self) -> int:
        """Examples scored."""
        return int(self.total.sum())

    @property
    def loss(self) -> float:
        """Mean loss; NaN without examples."""
        return self.loss_sum / self.n if self.n else math.nan

    @property
    def accuracy(self) -> float:
        """Fraction right; NaN without examples."""
        # A quotient of integers is exact, however many examples there are.
        return int(self.correct.sum()) / self.n if self.n else math.nan

    @property
    def recall(self) -> list[float | None]:
        """Fraction right per label; None for a label without examples."""
        pairs = zip(self.correct.tolist(), self.total.tolist(), strict=True)
        return [c / n if n else None for c, n in pairs]

    @property
    @abstractmethod
    def macro_f1(self) -> float:
        """The mean of F1 over the labels that occur; NaN without examples."""

    @property
    def others(self) -> dict[str, float]:
        """Further numbers by name, which only some tasks have, such as an R^2."""
        return {}


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
        return _counts(rows, 1, classes, correction, counted)[0]


def score_each(
    model: Model, params: Params, buffers: Params, sets: Sequence[Examples], classes: int
) -> list[Score]:
    """The score of one model on each set, by one joined pass over the rows of all sets."""
    check_classes(model)
    with undrawn(model.net):
        return _counts(answered(model, params, buffers, sets), len(sets), classes)


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
    pairs = zip(torch.split(logits, 1000), torch.split(y, 1000), strict=True)
    blocks = ((z, z, labels, labels) for z, labels in pairs)
    return _counts(blocks, 1, classes, correction, classes <= MOST_CLASSES)[0]


def _counts(
    blocks: Iterable[Block], sets: int, classes: int, correction: Correction | None = None,
    confusion: bool = False,
) -> list[Score]:  # fmt: skip
    """The scores of the sets; where there is one alone, it has all rows."""
    # Counts, not rates: they add up over blocks and clients exactly. The loss is summed in float64,
    # so that the result hardly depends on the size of the blocks.
    correct, total, predicted = counts = torch.zeros(3, sets * classes, dtype=torch.int64)
    loss = torch.zeros(sets, dtype=torch.float64)
    confused = torch.zeros(classes, classes, dtype=torch.int64) if confusion else None
    for out, _, y, where in blocks:
        part = where if sets > 1 else torch.zeros_like(y)
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
        given, one = logits.argmax(1), torch.ones_like(y)
        cell = part * classes
        correct.index_add_(0, cell + y, (given == y).long())
        total.index_add_(0, cell + y, one)
        predicted.index_add_(0, cell + given, one)
        confused = None if confused is None else confused + confusion_of(given, y, classes)
        loss.index_add_(0, part, F.cross_entropy(logits.double(), y, reduction="none"))
    tables = (v.unbind() for v in counts.view(3, sets, classes))
    rows = zip(*tables, loss.tolist(), strict=True)
    return [Score(c, n, p, summed, confused) for c, n, p, summed in rows]


def confusion_of(given: Tensor, truth: Tensor, classes: int) -> Tensor:
    """The confusion matrix [K, K]: counts of true labels (rows) by predicted ones (columns)."""
    pairs = torch.bincount(truth * classes + given, minlength=classes * classes)
    return pairs.reshape(classes, classes)


def answered(
    model: Model,
    params: Params,
    buffers: Params,
    examples: Examples | Sequence[Examples],
    batch: int = 1000,
) -> Iterator[Block]:
    """Yield (outputs [b, K], x, y, set [b] of each row) block by block, without gradients.

    The rows of several sets are joined: a block goes on where one set ends and the next begins.
    """
    sets = [examples] if isinstance(examples, Examples) else examples
    row = sets[0].x[:1].numel() if sets else 1
    for x, y, part in _blocks(sets, min(batch, max(1, LARGEST // max(1, row)))):
        with torch.no_grad():
            out = model(params, buffers, x)["logits"]
        yield out, x, y, part


def _blocks(sets: Sequence[Examples], size: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    pieces, free = list[tuple[Tensor, Tensor, int, int]](), size
    for i, one in enumerate(sets):
        start, n = 0, len(one.y)
        while start < n:
            end = min(n, start + free)
            # A slice of a set is no copy: it may be mapped from disk.
            whole = end - start == n
            x, y = (one.x, one.y) if whole else (one.x[start:end], one.y[start:end])
            pieces.append((x, y, i, end - start))
            free, start = free - (end - start), end
            if not free:
                yield _joined(pieces)
                pieces, free = [], size
    if pieces:
        yield _joined(pieces)


def _joined(pieces: Sequence[tuple[Tensor, Tensor, int, int]]) -> tuple[Tensor, Tensor, Tensor]:
    xs, ys, sets, counts = zip(*pieces, strict=True)
    part = torch.repeat_interleave(torch.tensor(sets), torch.tensor(counts))
    x, y = (v[0] if len(v) == 1 else torch.cat(v) for v in (xs, ys))
    return x, y, part
