"""Prior correction: adapt a trained model's logits to the label shares of the target.

Under label shift p(x | y) is the same everywhere. So a model of p(y | x) under label shares p
becomes one for the target by adding log T_y - log p_y to its logits. That needs no training and no
message, and one model serves any number of targets.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import logsumexp

from fedshift.errors import InputError
from fedshift.real import check_labels
from fedshift.server.shares import label_shares
from fedshift.sketch import sketched

Floats = NDArray[np.float64]

# Replaces a share of 0 in a logarithm; a label with this share is practically never predicted.
NO_SHARE = 1e-12
# A model has seen too little of a label with a smaller share for its logit to mean anything.
FLOOR = 1e-3
# Pulls the scale to 1 and the bias to 0 with the force of a thousandth of an example. It decides
# what the examples leave open: a constant in the bias, labels without examples, examples that are
# all predicted with certainty.
RIDGE = 1e-3
STEPS, HALVINGS, NEAR = 50, 20, 1e-9
# Limit for scale and biases, far above any minimum because of the ridge. Without it, wrong sums
# from one client could move them to where the other clients' sums overflow.
LARGEST = 1e6


@sketched
@dataclass(frozen=True, eq=False)
class Correction:
    """The correction scale z + bias of a model's logits z [..., K].

    bias         [K]
    correctable  [K] bool: False for labels that the model was hardly trained on. Only log T_y is
                 added to these: dividing by a share near 0 would promote a meaningless logit
    """

    scale: float
    bias: Floats
    correctable: NDArray[np.bool_]

    def of(self, logits: ArrayLike) -> Floats:
        """The corrected logits, in float64. Raises InputError unless there is one per label."""
        z = _logits(logits)
        if z.shape[-1:] != self.bias.shape:  # a single logit would be broadcast to all labels
            raise InputError(
                f"logits of shape {z.shape}, and the correction is of {len(self.bias)} labels; "
                "give one logit per label in the last dimension"
            )
        return self.scale * z + self.bias


def prior_shift(target: ArrayLike, trained_on: ArrayLike, floor: float = FLOOR) -> Correction:
    """log T_y - log p_y, for a model trained on the label shares p.

    target      T [K], shares of the labels at the target
    trained_on  p [K], label shares of the mixture that the model was trained on, S^T a
    floor       labels with a smaller p_y get log T_y only, and are not `correctable`

    >>> fs.prior_shift([0.9, 0.1], [0.5, 0.5]).bias.round(3).tolist()
    [0.588, -1.609]

    With T = p the bias is 0. Source: Saerens, Latinne and Decaestecker 2002; Menon et al. 2021
    (logit adjustment). Raises InputError unless both are shares of the same number of labels.
    """
    check_labels(target=target, trained_on=trained_on)
    T, p = label_shares(target), label_shares(trained_on, "trained_on")
    if len(T) != len(p):
        raise InputError(f"target has {len(T)} labels, and trained_on has {len(p)}")
    correctable = p >= floor
    return Correction(1.0, _log_ratio(T, p, correctable), correctable)


def shares_in_model(
    mixed: Floats, target: Floats, *, even: bool = False, at_target: bool = False
) -> Floats:
    """The label shares [K] that a model has learned if its clients' labels mix to `mixed`.

    even       training balances the labels: shares are equal over all labels in the mixture
    at_target  training replaces the shares by T, the `target`
    """
    if even:
        return (mixed > 0) / np.count_nonzero(mixed)
    return target if at_target else mixed / mixed.sum()


@dataclass(frozen=True, eq=False)
class CalibrationSums:
    """Sums over a client's validation examples at softmax(scale z + bias). Clients' sums add up.

    loss      summed cross-entropy
    gradient  [K + 1], of the loss by (scale, bias)
    hessian   [K + 1, K + 1]
    counts    [K], examples of each label
    """

    loss: float
    gradient: Floats
    hessian: Floats
    counts: Floats

    def __add__(self, other: CalibrationSums) -> CalibrationSums:
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return CalibrationSums(*(a + b for a, b in pairs))


def calibration_sums(
    logits: ArrayLike, y: ArrayLike, scale: float, bias: ArrayLike
) -> CalibrationSums:
    """The sums over examples with logits z [n, K] and labels y [n].

    With q = softmax(scale z + bias): d loss / d scale = sum_x (q - e_y) . z, d loss / d bias =
    sum_x (q - e_y); the Hessian is sum_x J^T (diag q - q q^T) J with J = [z, I]. Raises InputError
    for logits, labels or biases of other shapes, and labels that are no whole numbers below K.
    """
    z, labels, bias = _checked(logits, y, bias)
    n, classes = z.shape
    shifted = scale * z + bias
    top = logsumexp(shifted, axis=1, keepdims=True) if n else np.zeros((0, 1))
    q, at = np.exp(shifted - top), np.arange(n)
    off = q.copy()
    off[at, labels] -= 1.0
    mean = (q * z).sum(1, keepdims=True)
    cross = (q * (z - mean)).sum(0)
    hessian = np.empty((classes + 1, classes + 1))
    hessian[0, 0] = float((q * (z - mean) ** 2).sum())
    hessian[0, 1:] = hessian[1:, 0] = cross
    hessian[1:, 1:] = np.diag(q.sum(0)) - q.T @ q
    return CalibrationSums(
        float((top[:, 0] - shifted[at, labels]).sum()),
        np.concatenate([[float((off * z).sum())], off.sum(0)]),
        hessian,
        np.bincount(labels, minlength=classes).astype(np.float64),
    )


@sketched
@dataclass(frozen=True, eq=False)
class Calibrator:
    """softmax(scale z + bias), fitted to validation examples.

    prior   [K], its mean over these examples
    counts  [K], the examples of each label
    """

    scale: float
    bias: Floats
    prior: Floats
    counts: Floats


def calibrate(ask: Callable[[float, Floats], CalibrationSums], classes: int) -> Calibrator:
    """Bias-corrected temperature scaling from sums: argmin over (scale, bias) of the summed loss.

        sum_x -log softmax(scale z + bias)_y + RIDGE/2 ((scale - 1)^2 + |bias|^2),  scale >= 0

    ask      returns the sums of all clients at (scale, bias); each Newton step calls it once or
             more
    classes  K

    The loss is convex, and halved steps reduce it, so the result does not depend on the start. A
    model whose logits point the wrong way gets scale 0, so that they are ignored.

    Source: Alexandari, Kundaje and Shrikumar 2020 (bias-corrected temperature scaling). They fit
    pooled logits with a general optimiser; here only sums leave a client. Raises InputError if
    there are no validation examples.
    """
    centre = np.concatenate([[1.0], np.zeros(classes)])
    at, here = centre, ask(1.0, np.zeros(classes))
    n = float(here.counts.sum())
    if n == 0:
        raise InputError(
            "no client has validation examples to calibrate the model on; raise data.validation, "
            'or take prior = "target"'
        )
    if here.loss > n * math.log(classes):
        # Large, wrong logits are worse than none. The loss is nearly linear there, so that Newton
        # steps would be far too long: start without logits instead.
        at = np.zeros(classes + 1)
        here = ask(0.0, at[1:])
    for _ in range(STEPS):
        gradient = here.gradient + RIDGE * (at - centre)
        hessian = here.hessian + RIDGE * np.eye(classes + 1)
        # If the scale is 0 and the step would make it negative, keep it there.
        free = np.ones(classes + 1, dtype=bool)
        free[0] = not (at[0] == 0.0 and gradient[0] > 0)
        if np.abs(gradient[free]).max() <= NEAR * n:
            break
        step = np.zeros(classes + 1)
        step[free] = np.linalg.solve(hessian[np.ix_(free, free)], -gradient[free])
        after = _descend(ask, here, at, step, gradient, centre)
        if after is None:  # no step reduces the loss: the rest is rounding
            break
        at, here = after
    prior = (here.counts + here.gradient[1:]) / n
    return Calibrator(float(at[0]), at[1:], prior, here.counts)


def calibrated_shift(calibrator: Calibrator, target: ArrayLike, floor: float = FLOOR) -> Correction:
    """scale z + bias + log T_y - log p_y, where p is the calibrator's prior.

    Labels with p_y below `floor` get log T_y only. Raises InputError unless the target is shares
    of the calibrator's labels.
    """
    T = label_shares(target)
    if len(T) != len(calibrator.prior):
        raise InputError(
            f"target has {len(T)} labels, and the calibrator has {len(calibrator.prior)}"
        )
    correctable = calibrator.prior >= floor
    bias = np.where(correctable, calibrator.bias, 0.0) + _log_ratio(
        T, calibrator.prior, correctable
    )
    return Correction(calibrator.scale, bias, correctable)


def _descend(
    ask: Callable[[float, Floats], CalibrationSums], here: CalibrationSums, at: Floats,
    step: Floats, gradient: Floats, centre: Floats,
) -> tuple[Floats, CalibrationSums] | None:  # fmt: skip
    """(new point, its sums) after the longest of step, step / 2, ... that reduces the loss enough.

    None if none of them does.
    """
    loss = _penalised_loss(here, at, centre)
    for halving in range(HALVINGS):
        there = np.clip(at + 0.5**halving * step, -LARGEST, LARGEST)
        there[0] = max(0.0, there[0])
        sums = ask(float(there[0]), there[1:])
        if _penalised_loss(sums, there, centre) <= loss + 1e-4 * float(gradient @ (there - at)):
            return there, sums
    return None


def _penalised_loss(sums: CalibrationSums, at: Floats, centre: Floats) -> float:
    return sums.loss + 0.5 * RIDGE * float((at - centre) @ (at - centre))


def _log_ratio(T: Floats, p: Floats, correctable: NDArray[np.bool_]) -> Floats:
    log_p = np.log(np.where(correctable, p, 1.0))
    result: Floats = np.log(np.maximum(T, NO_SHARE)) - log_p
    return result


def _logits(given: ArrayLike) -> Floats:
    """Logits as float64. Raises InputError for what is no array of numbers."""
    try:
        return np.asarray(given, dtype=np.float64)
    except (TypeError, ValueError, RuntimeError) as e:
        raise InputError(f"logits must be numbers in rows of one length: {e}") from e


def _checked(
    logits: ArrayLike, y: ArrayLike, bias: ArrayLike
) -> tuple[Floats, NDArray[np.int64], Floats]:
    """Logits [n, K], labels [n] below K and biases [K], or one for all. Raises InputError."""
    z, labels, b = _logits(logits), np.asarray(y), np.asarray(bias, dtype=np.float64)
    if z.ndim != 2 or labels.shape != z.shape[:1] or b.shape not in ((), z.shape[1:]):
        raise InputError(
            f"logits {z.shape}, y {labels.shape} and bias {b.shape}; they must be [n, K], [n] and "
            "[K], and labels numbers of classes"
        )
    if len(labels) and labels.dtype.kind not in "iu":
        raise InputError(f"y is {labels.dtype}; labels are whole numbers, 0 to {z.shape[1] - 1}")
    if len(labels) and not 0 <= labels.min() <= labels.max() < z.shape[1]:
        odd = labels[(labels < 0) | (labels >= z.shape[1])][0]
        raise InputError(
            f"y holds {odd}; with {z.shape[1]} logits labels are 0 to {z.shape[1] - 1}"
        )
    return z, labels.astype(np.int64, copy=False), b
