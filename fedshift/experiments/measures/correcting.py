"""Prior correction: the scores of a run's model once its label prior is moved to the target.

`training.prior` chooses the correction of the model that is kept:

"none"        no correction
"target"      add log T - log p to the logits; p are the label shares of the mixture that the model
              was trained on
"calibrated"  the same, after a calibration on the clients' validation examples

Even with "none" the results have the scores of "target", since they cost no message. If the
validation examples are in this process, all forms are scored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedshift.algorithms.method import Method
from fedshift.data import Examples, Task
from fedshift.engine.run import Round
from fedshift.errors import DivergedError, InputError
from fedshift.estimate import AccuracyEstimate, estimate_target_accuracy
from fedshift.evaluation.scores import Score, answered, pooled, score, score_logits
from fedshift.experiments.measures.round_weights import masses, registered
from fedshift.model import Model
from fedshift.randomness import undrawn
from fedshift.record import summary as record
from fedshift.server.prior import (
    Calibrator,
    Correction,
    calibrate,
    calibrated_shift,
    calibration_sums,
    prior_shift,
    shares_in_model,
)
from fedshift.tree import Params

Floats = NDArray[np.float64]
Pair = tuple[Params, Params]
Form = Literal["target", "calibrated"]
Prior = Literal["none", "target", "calibrated"]


@runtime_checkable
class Corrects(Protocol):
    """An engine whose clients hold the validation examples: they send it sums and counts."""

    def calibrator(self, current: Round) -> Calibrator:
        """A calibration of the round's model, from sums that its clients send."""

    def corrected_scores(self, current: Round, correction: Correction) -> Mapping[int, Score]:
        """Each client's score of the corrected model on its validation examples."""


@dataclass(frozen=True, eq=False)
class Corrected:
    """The correction of a model for the task's target, and the corrected model's scores.

    trained_on  [K] label shares of the mixture that the model was trained on
    calibrator  of form "calibrated", else None
    test        score on the test examples
    validation  score on validation examples that follow the target
    answers     by set of examples ("validation": those of all clients, if they are here; "target")
                the score of each form, and of the model as "trained"
    estimate    from the clients' validation examples, unless prior is "none"
    """

    form: Form
    correction: Correction
    trained_on: Floats
    calibrator: Calibrator | None
    test: Score
    validation: Score | None
    answers: Mapping[str, Mapping[str, Score]]
    estimate: AccuracyEstimate | None

    @property
    def validation_accuracy(self) -> float:
        """Accuracy on validation examples that follow the target; NaN if there are none."""
        return math.nan if self.validation is None else self.validation.accuracy

    def confusions(self) -> dict[str, dict[str, list[list[int]]]]:
        """Confusion matrices [K, K] by set and form, true labels by predicted ones.

        Empty with more than `MOST_CLASSES` classes.
        """
        return {
            name: {f: s.confusion.tolist() for f, s in of.items() if s.confusion is not None}
            for name, of in self.answers.items()
        }

    def described(self) -> record.Corrected:
        """The correction as summary.json has it."""
        of, by = self.correction, self.calibrator
        return record.Corrected(
            form=self.form,
            trained_on=tuple(self.trained_on.tolist()),
            scale=of.scale,
            bias=tuple(of.bias.tolist()),
            correctable=tuple(of.correctable.tolist()),
            calibrator_bias=None if by is None else tuple(by.bias.tolist()),
            prior=None if by is None else tuple(by.prior.tolist()),
            counts=None if by is None else tuple(by.counts.tolist()),
        )


@dataclass(frozen=True, eq=False)
class Correcting:
    """How to correct the models of an experiment.

    announced  T [K] as the server knows it
    even       True if training itself removes the label shares from the model: p is even then
    at_target  True if training itself moves the model to the target: p is T then
    """

    prior: Prior
    announced: Floats
    even: bool = False
    at_target: bool = False

    def of_round(self, algorithm: Method, t: int, rounds: int) -> Correcting:
        """How to correct the model of round t.

        Methods such as CCVR have a last stage that changes the prior. A model from before that
        stage was trained by the inner method alone, so `even` and `at_target` do not hold for it.
        """
        if type(algorithm.at(t)) is type(algorithm.at(rounds)):
            return self
        return replace(self, even=False, at_target=False)


def corrected(
    how: Correcting, algorithm: Method, current: Round, task: Task, table: Params,
    weights: Sequence[float], engine: object,
) -> Corrected | None:  # fmt: skip
    """The correction of a round's model, and its scores; None if no single model is for a target.

    weights: [M], those of the mixture that it was trained on. engine: one that `Corrects` asks the
    clients; otherwise their validation examples are in this process.
    """
    if not can_correct(task):
        return None
    pair: Pair = (current.server["params"], current.server["buffers"])
    model, target, classes = algorithm.model, how.announced, len(task.classes)
    trained_on = shares_of(how, algorithm, mixture(algorithm, weights, current, table))
    away = engine if isinstance(engine, Corrects) else None
    here = () if away or any(data.scorer for data in task.validation) else task.validation
    # The logits are computed once and kept, since calibration and every form read them.
    sets = {"validation": here, "target": (task.test,)}
    logits = {name: logits_of(model, pair, x, classes) for name, x in sets.items() if x}
    calibrator = None
    if away is not None and how.prior == "calibrated":
        calibrator = away.calibrator(current)
    elif how.prior != "target" and any(map(len, here)):
        calibrator = calibrate(partial(calibration_sums, *logits["validation"]), classes)
    forms = {"trained": None, "target": prior_shift(target, trained_on)}
    if calibrator is not None:
        forms["calibrated"] = _calibrated(how.prior, calibrator, target)
    # "target" for "none", since a run on machines has no calibration to report in that case.
    form: Form = "calibrated" if how.prior == "calibrated" else "target"
    correction = forms[form]
    assert correction is not None

    answers = {
        name: {f: score_logits(*of, classes, by) for f, by in forms.items()}
        for name, of in logits.items()
    }
    pooled = answers["validation"][form] if here else None
    if away is not None and how.prior != "none":
        pooled = _sum(away.corrected_scores(current, correction))
    follows = task.target_validation
    return Corrected(
        form, correction, trained_on, calibrator if form == "calibrated" else None,
        answers["target"][form],
        None if follows is None
        else score(model, *pair, follows, classes, confusion=True, correction=correction),
        answers,
        None if how.prior == "none" else _estimate(pooled, target),
    )  # fmt: skip


def _calibrated(prior: Prior, by: Calibrator, target: Floats) -> Correction:
    """`calibrated_shift`. Raises DivergedError if it is to be served and logits have no values."""
    if prior == "calibrated" and not np.isfinite([by.scale, *by.bias, *by.prior]).all():
        raise DivergedError(
            "the model's logits on the clients' validation rows are not finite, and cannot be "
            'calibrated: training diverged. Lower the learning rate; prior = "none" keeps the model'
        )
    return calibrated_shift(by, target)


def _sum(scores: Mapping[int, Score]) -> Score | None:
    return pooled([scores[i] for i in sorted(scores)]) if scores else None


def _estimate(pooled: Score | None, target: Floats) -> AccuracyEstimate | None:
    if pooled is None:
        return None
    return estimate_target_accuracy(pooled.correct, pooled.total, target)


def shares_of(how: Correcting, algorithm: Method, mixed: Floats) -> Floats:
    """The label shares p [K] that a model has learned, if its clients mix to `mixed` [K]."""
    rules = algorithm.label_rules()
    # With private label sets a client's softmax is over its own labels alone, so that the shares
    # of labels over clients leave no trace in the model.
    even = how.even or (rules is not None and rules["mode"] == "private")
    return shares_in_model(mixed, how.announced, even=even, at_target=how.at_target)


def can_correct(task: Task) -> bool:
    """Whether a single model predicts classes for a target, and its test examples are here."""
    return task.kind == "classification" and not task.tests and task.test.scorer is None


def check_prior(prior: Prior, task: Task) -> None:
    """Raise InputError for a correction that is not defined for this task."""
    if prior == "none":
        return
    given = f'training.prior = "{prior}"'
    if task.kind != "classification":
        raise InputError(
            f"{given} moves the shares of classes, and here {task.kind} is predicted; leave it out"
        )
    if task.tests:
        raise InputError(
            f"{given} moves one model to one target, and here each client serves a model on its "
            "examples; leave it out"
        )
    if prior == "calibrated" and not any(len(data) for data in task.validation):
        raise InputError(
            f"{given} needs validation examples at the clients, and none has any; raise "
            'data.validation, or take "target"'
        )


def mixture(algorithm: Method, weights: Sequence[float], current: Round, table: Params) -> Floats:
    """The label shares [K] that a model with client weights a [M] was trained on, S^T a.

    If the method weighs examples by their labels, these weights count. If clients have registered
    sizes alone, the labels are those that they were dealt. If no client with a weight has an
    example, all shares are equal.
    """
    counts = registered(current, table)["labels"].double()
    a, everyone = torch.tensor(weights, dtype=torch.float64), torch.arange(len(counts))
    weighed = masses(algorithm, current.server, everyone, a, counts)
    if weighed is not None:
        return weighed.sum(0).numpy()
    labels = counts.numpy()
    rows = labels / np.maximum(labels.sum(1, keepdims=True), 1.0)
    mixed: Floats = np.asarray(weights) @ rows
    total = mixed.sum()
    return mixed / total if total > 0 else np.full(len(mixed), 1.0 / len(mixed))


def logits_of(
    model: Model, pair: Pair, sets: Sequence[Examples], classes: int
) -> tuple[Tensor, Tensor]:
    """(logits [n, K], labels [n]) of all rows of the sets, on the CPU."""
    with undrawn(model.net):
        blocks = [(z.cpu(), y.cpu()) for z, _, y, _ in answered(model, *pair, sets)]
    if not blocks:
        return torch.zeros(0, classes), torch.zeros(0, dtype=torch.int64)
    z, y = zip(*blocks, strict=True)
    return torch.cat(z), torch.cat(y)


def single_answer(of: Corrected, classes: Sequence[str]) -> list[str]:
    """A sentence if the corrected model, and not the one as trained, gives all rows one answer."""
    said, plain = (s.predicted > 0 for s in (of.test, of.answers["target"]["trained"]))
    if int(said.sum()) != 1 or int(plain.sum()) <= 1 or int((of.test.total > 0).sum()) <= 1:
        return []
    name = classes[int(said.int().argmax())]
    return [
        f'The corrected model answers "{name}" for every test row: the correction outweighs what '
        "the model has learned. Train longer, or use it as trained."
    ]


def sentences(
    of: Corrected, plain: AccuracyEstimate, classes: Sequence[str], target: Sequence[float]
) -> list[str]:
    """Sentences on labels that no correction can help, and on a correction that does harm.

    plain: the estimate of the model as it was trained.
    """
    hard = [
        f'"{classes[y]}"'
        for y, (good, T) in enumerate(zip(of.correction.correctable, target, strict=True))
        if not good and T > 0
    ]
    seen, lines = "validates" if of.form == "calibrated" else "is trained on", []
    if hard:
        lines.append(
            f"The prior correction cannot help {', '.join(hard)}: hardly any client {seen} "
            "examples of it, so what the model says of it means little."
        )
    # This happens after few rounds, when the logits hardly tell the target's labels apart.
    if of.estimate and of.estimate.accuracy < plain.accuracy - plain.standard_error:
        lines.append(
            f"The corrected model is estimated at {of.estimate.accuracy:.1%} of the target, the "
            f'model as trained at {plain.accuracy:.1%}: train longer, or set prior = "none".'
        )
    return lines
