"""Correcting the models of a finished run for another target, without training."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fedshift.errors import InputError
from fedshift.experiments.folder.run_models import RunModels
from fedshift.fitting.predictor import CorrectionOf
from fedshift.recipes import traits_of
from fedshift.record.summary import Summary
from fedshift.server.prior import (
    Calibrator,
    Correction,
    calibrated_shift,
    prior_shift,
    shares_in_model,
)
from fedshift.tasks.target import Target, target_of

Floats = NDArray[np.float64]


def target_shares(given: object, summary: Summary) -> Target:
    """The target that a user gives as label shares or counts. Raises InputError for all else."""
    if summary.kind is not None:
        raise InputError(
            "for_target corrects a model's classes by their shares, and this run predicts "
            f"{'numbers' if summary.kind == 'regression' else 'several labels per row'}"
        )
    if isinstance(given, str):
        raise InputError(
            f'for_target("{given}"): give label shares or counts, a dict by class or one number '
            "per class; a client's data are another task"
        )
    return target_of(given, (), summary.classes)


def correction_for(summary: Summary, models: RunModels, shares: Sequence[float]) -> CorrectionOf:
    """A function from a client's place to the correction of its model; None: the server's model.

    A client's own model was trained under that client's label shares. The server's was trained
    under the mixture of these by the clients' weights, unless it was calibrated. If a method
    removes label shares in training, they count as even.
    """
    counts = np.array(summary.label_counts, dtype=np.float64)
    shared = _of_server(summary, np.array(shares), counts)

    def of(place: int | None) -> Correction | None:
        if place is None or not models.personal:
            return shared
        if not counts[place].any():
            raise InputError(
                "this client has no training examples: nothing says under which label shares its "
                "model was trained"
            )
        return prior_shift(shares, _in_model(summary, counts[place]))

    return of


def _in_model(summary: Summary, mixed: Floats) -> Floats:
    """The label shares [K] that a model has learned from labels with the shares `mixed`."""
    traits, sets = traits_of(summary.method), summary.label_sets
    private = sets is not None and sets.mode == "private"
    target = np.array(summary.target)
    return shares_in_model(mixed, target, even=traits.even or private, at_target=traits.at_target)


def _of_server(summary: Summary, target: Floats, counts: Floats) -> Correction:
    """The correction of the server's model, calibrated if the run was; counts: clients' [M, K]."""
    done = summary.corrected
    if done is None:  # clients that serve models of their own
        rows = counts / np.maximum(counts.sum(1, keepdims=True), 1.0)
        return prior_shift(target, _in_model(summary, np.array(summary.weights) @ rows))
    if done.calibrator_bias is None or done.prior is None:
        return prior_shift(target, done.trained_on)
    bias, prior = np.array(done.calibrator_bias), np.array(done.prior)
    calibrator = Calibrator(done.scale, bias, prior, np.array(done.counts))
    return calibrated_shift(calibrator, target)
