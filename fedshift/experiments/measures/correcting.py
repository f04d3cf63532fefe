"""Prior correction of a run's model: what the target would get with the prior moved to it.

`training.prior` chooses the correction of the model that is kept: "none", "target" (add log T - log
p to the logits, p being the label shares of the mixture that it was trained on), or "calibrated"
(the same, after a calibration on the clients' validation examples). With "none", too, results have
the numbers of "target", which cost no message. Where the validation examples are in this process,
all forms are scored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from fedshift.algorithms.base import Algorithm, Capabilities, ask
from fedshift.data import Examples, Task
from fedshift.engine.run import Round
from fedshift.errors import InputError
from fedshift.estimate import AccuracyEstimate, estimate_target_accuracy
from fedshift.evaluation.scores import Score, answered, score
from fedshift.experiments.measures.round_weights import masses, registered
from fedshift.model import Model
from fedshift.record import summary as record
from fedshift.server.prior import (
    CalibrationSums,
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
    """An engine whose clients hold their validation examples: it asks them for sums and counts."""

    def calibrator(self, current: Round) -> Calibrator:
        """Of the round's model, from the sums of its clients."""

    def corrected_scores(self, current: Round, correction: Correction) -> Mapping[int, Score]:
        """Each client's score of the corrected model on its validation examples."""


@dataclass(frozen=True, eq=False)
class Corrected:
    """A model's correction for the task's target, and what it does.

    trained_on  [K] label shares of the mixture that the model was trained on
    calibrator  of form "calibrated"
    test        on the test examples; validation: on those that follow the target
    answers     "validation" of all clients (empty where these are elsewhere) and "target": the
                score of each form, and of the model as "trained"
    estimate    from the clients' validation examples, where the prior is set
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
        """NaN without examples that follow the target."""
        return math.nan if self.validation is None else self.validation.accuracy

    def confusions(self) -> dict[str, dict[str, list[list[int]]]]:
        """By set and form, with at most `MOST_CLASSES`: which label [K] is taken for which [K]."""
        return {
            name: {f: s.confusion.tolist() for f, s in of.items() if s.confusion is not None}
            for name, of in self.answers.items()
        }

    def described(self) -> record.Corrected:
        """For the run folder."""
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

    announced  T [K], as the server has it
    even       whether training already takes the label shares out: p is even then
    at_target  whether training already moves the model to the target: p is T then
    """

    prior: Prior
    announced: Floats
    even: bool = False
    at_target: bool = False

    def of_round(self, algorithm: Algorithm, t: int, rounds: int) -> Correcting:
        """For the model of round t: before a last stage, as CCVR's, the inner method trains it."""
        if type(algorithm.at(t)) is type(algorithm.at(rounds)):
            return self
        return replace(self, even=False, at_target=False)


def corrected(
    how: Correcting, algorithm: Algorithm, current: Round, task: Task, table: Params,
    weights: Sequence[float], engine: object,
) -> Corrected | None:  # fmt: skip
    """The correction of a round's model, and its scores; None where no model answers for a target.

    weights: [M], of the mixture that it was trained on. engine: asks the clients, where it
    `Corrects`; their validation examples are here otherwise.
    """
    if not can_correct(task):
        return None
    pair: Pair = (current.server["params"], current.server["buffers"])
    model, target, classes = algorithm.model, how.announced, len(task.classes)
    trained_on = shares_of(how, algorithm, mixture(algorithm, weights, current, table))
    away = engine if isinstance(engine, Corrects) else None
    here = () if away or any(data.scorer for data in task.validation) else task.validation
    calibrator = None
    if away is not None and how.prior == "calibrated":
        calibrator = away.calibrator(current)
    elif how.prior != "target" and any(map(len, here)):
        calibrator = calibrate(sums_of(model, pair, here, classes), classes)
    forms = {"trained": None, "target": prior_shift(target, trained_on)}
    if calibrator is not None:
        forms["calibrated"] = calibrated_shift(calibrator, target)
    # Of a run on machines and of one in this process, the same form stands beside the model.
    form: Form = "calibrated" if how.prior == "calibrated" else "target"
    correction = forms[form]
    assert correction is not None

    def rate(*parts: Examples, by: Correction | None = correction) -> Score:
        scores = (score(model, *pair, x, classes, confusion=True, correction=by) for x in parts)
        return reduce(add, scores)

    sets = {"validation": here, "target": (task.test,)}
    answers = {k: {f: rate(*x, by=by) for f, by in forms.items()} for k, x in sets.items() if x}
    pooled = answers["validation"][form] if here else None
    if away is not None and how.prior != "none":
        pooled = _sum(away.corrected_scores(current, correction))
    follows = task.target_validation
    return Corrected(
        form, correction, trained_on, calibrator if form == "calibrated" else None,
        answers["target"][form],
        None if follows is None else rate(follows), answers,
        None if how.prior == "none" else _estimate(pooled, target),
    )  # fmt: skip


def _sum(scores: Mapping[int, Score]) -> Score | None:
    return reduce(add, (scores[i] for i in sorted(scores))) if scores else None


def _estimate(pooled: Score | None, target: Floats) -> AccuracyEstimate | None:
    if pooled is None:
        return None
    return estimate_target_accuracy(pooled.correct, pooled.total, target)


def shares_of(how: Correcting, algorithm: Algorithm, mixed: Floats) -> Floats:
    """[K]: the label shares in a model whose clients mix to `mixed`, by its training."""
    rules = ask(algorithm, Capabilities.label_rules)
    # With private label sets a client's softmax runs over its own labels alone.
    even = how.even or (rules is not None and rules["mode"] == "private")
    return shares_in_model(mixed, how.announced, even=even, at_target=how.at_target)


def can_correct(task: Task) -> bool:
    """Whether one model predicts classes for a target whose test examples are here."""
    return task.kind == "classification" and not task.tests and task.test.scorer is None


def check_prior(prior: Prior, task: Task) -> None:
    """Raise InputError for a correction that this task leaves no room for."""
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


def mixture(
    algorithm: Algorithm, weights: Sequence[float], current: Round, table: Params
) -> Floats:
    """[K]: the label shares that a model with these weights [M] was trained on, S^T a.

    Where the method weighs examples by their labels, shares of these weights. Where clients have
    registered sizes alone, the labels are those that they were dealt. All shares are equal where no
    client with weight has an example.
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


def sums_of(
    model: Model, pair: Pair, parts: Sequence[Examples], classes: int
) -> Callable[[float, Floats], CalibrationSums]:
    """The clients' calibration sums, added in their order. Each example is run once."""
    kept = []
    for examples in parts:
        outputs = [out.cpu() for out, _, _ in answered(model, *pair, examples)]
        z = torch.cat(outputs) if outputs else torch.zeros(0, classes)
        kept.append((z.double().numpy(), examples.y.cpu().numpy()))

    def ask(scale: float, bias: Floats) -> CalibrationSums:
        return reduce(add, (calibration_sums(z, y, scale, bias) for z, y in kept))

    return ask


def sentences(
    of: Corrected, plain: AccuracyEstimate, classes: Sequence[str], target: Sequence[float]
) -> list[str]:
    """On labels of the target that no correction can help, and one that does harm.

    plain: the estimate of the model as trained.
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
    # Seen with models of few rounds, whose logits hardly tell the target's labels apart.
    if of.estimate and of.estimate.accuracy < plain.accuracy - plain.standard_error:
        lines.append(
            f"The corrected model is estimated at {of.estimate.accuracy:.1%} of the target, the "
            f'model as trained at {plain.accuracy:.1%}: train longer, or set prior = "none".'
        )
    return lines
