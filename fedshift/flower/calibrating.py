"""Fit a calibrator by messages: one question for each Newton step, answered with sums.

The server sends a model, a scale and K biases. Each client answers with `CalibrationSums` over its
validation examples; only their sum over clients is used.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from flwr.app import ArrayRecord, RecordDict
from numpy.typing import NDArray
from torch import Tensor

from fedshift.algorithms.method import Method
from fedshift.data import Examples
from fedshift.errors import InputError
from fedshift.evaluation.scores import answered
from fedshift.flower.records import fields_of, to_parts, to_record
from fedshift.flower.routing import MODEL
from fedshift.server.prior import LARGEST, CalibrationSums, Correction, calibration_sums
from fedshift.tree import Parts

Floats = NDArray[np.float64]
# The type of message, and the names of the records of a question and of its answer.
CALIBRATE, AT, SUMS = "calibrate", "calibrator", "sums"
FIELDS = ("loss", "gradient", "hessian", "counts")


def asked_at(scale: float, bias: Floats) -> dict[str, ArrayRecord]:
    """The record of a question for sums, or scores, at this scale and these biases."""
    at = {"scale": torch.tensor(scale, dtype=torch.float64), "bias": torch.from_numpy(bias)}
    return {AT: to_record(at)}


def correction_in(content: RecordDict) -> Correction | None:
    """The correction of the model to score, from the record of `asked_at`; None without one."""
    if AT not in content:
        return None
    at = to_parts(content.array_records, AT)[""]
    bias = at["bias"].numpy()
    return Correction(float(at["scale"]), bias, np.ones(len(bias), dtype=bool))


class Validating(Protocol):
    """A client with a method, and examples to validate on."""

    @property
    def algorithm(self) -> Method:
        """The run's method."""

    @property
    def validation(self) -> Examples | None:
        """Examples that are not used for training."""


@torch.inference_mode(False)
def sums_for(client: Validating, content: RecordDict) -> RecordDict:
    """A client's answer: sums over its validation examples; zeros if it has none."""
    at, sent = (to_parts(content.array_records, name) for name in (AT, MODEL))
    scale, bias = float(at[""]["scale"]), at[""]["bias"].numpy()
    stage, examples = (
        client.algorithm.at(int(fields_of(content, "run")["round"])),
        client.validation,
    )
    z, y = torch.zeros(0, len(bias)), torch.zeros(0, dtype=torch.int64)
    if examples is not None and len(examples):
        pair = sent["params"], sent["buffers"]
        z = torch.cat([out for out, *_ in answered(stage.model, *pair, examples)])
        y = examples.y
    sums = calibration_sums(z.double().numpy(), y.numpy(), scale, bias)
    tensors = {k: torch.as_tensor(getattr(sums, k), dtype=torch.float64) for k in FIELDS}
    return RecordDict({SUMS: to_record(tensors), "run": content["run"]})


def sums_in(parts: Parts, counts: Tensor | None, classes: int) -> CalibrationSums:
    """The inverse of `sums_for`. counts [K]: the client's examples by label, if the server knows.

    Raises InputError for sums that no examples can have (`possible`).
    """
    sent = parts.get(SUMS, {})
    wide = classes + 1
    shapes = {"loss": (), "gradient": (wide,), "hessian": (wide, wide), "counts": (classes,)}
    if {k: tuple(v.shape) for k, v in sent.items()} != shapes:
        raise InputError(f"its sums are none of {classes} classes")
    if not all(v.dtype == torch.float64 and bool(v.isfinite().all()) for v in sent.values()):
        raise InputError("its sums are not finite, or not of 64 bits")
    n = sent["counts"]
    if counts is not None and not torch.equal(n, counts.double()):
        raise InputError("its sums are not of the examples that it has")
    if not possible(**sent):
        raise InputError("it sent sums that no examples have")
    return CalibrationSums(float(sent["loss"]), *(sent[k].numpy() for k in FIELDS[1:]))


def possible(loss: Tensor, gradient: Tensor, hessian: Tensor, counts: Tensor) -> bool:
    """Whether some examples could have these sums.

    The gradient by the K biases is sum_x (p - 1_y), and the Hessian is that of a softmax.
    """
    if not bool((counts >= 0).all() and (counts == counts.round()).all() and loss >= 0):
        return False
    n, moved = float(counts.sum()), gradient[1:] + counts
    # Logits are at most LARGEST, which bounds their difference from a mean, and their variance.
    if abs(float(gradient[0])) > 2 * n * LARGEST or float(hessian[0, 0]) > n * LARGEST**2:
        return False
    near = 1e-9 * (1.0 + n)
    # For each label y, 0 <= sum_x p_y <= n; over all labels these sum to n.
    if not bool((moved >= -near).all() and (moved <= n + near).all()):
        return False
    if abs(float(moved.sum()) - n) > near:
        return False
    size = 1e-9 * (1.0 + float(hessian.diagonal().abs().sum()))
    symmetric = (hessian - hessian.T).abs().max() <= size
    # One example adds diag(p) - p p^T, whose rows sum to 0, with no diagonal entry above 1/4.
    inner = hessian[1:, 1:]
    bounded = (inner.diagonal() <= n / 4 + near).all() and (inner.sum(1).abs() <= size).all()
    return bool(symmetric and bounded and torch.linalg.eigvalsh(hessian).min() >= -size)
