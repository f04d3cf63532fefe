"""A calibrator by messages: one question for each Newton step, which clients answer with sums.

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

from fedshift.algorithms.base import Algorithm
from fedshift.data import Examples
from fedshift.errors import InputError
from fedshift.evaluation.scores import answered
from fedshift.flower.records import fields_of, to_parts, to_record
from fedshift.flower.routing import MODEL
from fedshift.server.prior import LARGEST, CalibrationSums, Correction, calibration_sums
from fedshift.tree import Parts

Floats = NDArray[np.float64]
# The kind of message, and names of records: of the question, and of the answer.
CALIBRATE, AT, SUMS = "calibrate", "calibrator", "sums"
FIELDS = ("loss", "gradient", "hessian", "counts")


def asked_at(scale: float, bias: Floats) -> dict[str, ArrayRecord]:
    """The record of a question: sums, or scores, at this scale and these biases."""
    at = {"scale": torch.tensor(scale, dtype=torch.float64), "bias": torch.from_numpy(bias)}
    return {AT: to_record(at)}


def correction_in(content: RecordDict) -> Correction | None:
    """Of the model to score, as `asked_at` has it; None where it is scored as it is."""
    if AT not in content:
        return None
    at = to_parts(content.array_records, AT)[""]
    bias = at["bias"].numpy()
    return Correction(float(at["scale"]), bias, np.ones(len(bias), dtype=bool))


class Validating(Protocol):
    """A client with a method, and examples to validate on."""

    @property
    def algorithm(self) -> Algorithm:
        """Of the run."""

    @property
    def validation(self) -> Examples | None:
        """Not trained on."""


@torch.inference_mode(False)
def sums_for(client: Validating, content: RecordDict) -> RecordDict:
    """A client's answer: sums over its validation examples, zeros without any."""
    at, sent = (to_parts(content.array_records, name) for name in (AT, MODEL))
    scale, bias = float(at[""]["scale"]), at[""]["bias"].numpy()
    stage, examples = (
        client.algorithm.at(int(fields_of(content, "run")["round"])),
        client.validation,
    )
    z, y = torch.zeros(0, len(bias)), torch.zeros(0, dtype=torch.int64)
    if examples is not None and len(examples):
        pair = sent["params"], sent["buffers"]
        z = torch.cat([out for out, _, _ in answered(stage.model, *pair, examples)])
        y = examples.y
    sums = calibration_sums(z.double().numpy(), y.numpy(), scale, bias)
    tensors = {k: torch.as_tensor(getattr(sums, k), dtype=torch.float64) for k in FIELDS}
    return RecordDict({SUMS: to_record(tensors), "run": content["run"]})


def sums_in(parts: Parts, counts: Tensor | None, classes: int) -> CalibrationSums:
    """The inverse of `sums_for`. counts [K]: of the client's examples, where the server has them.

    Raises InputError for sums that no examples have: the gradient of K biases is sum_x p - 1_y, and
    the Hessian is that of a softmax.
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
    """Whether some examples could have these sums."""
    if not bool((counts >= 0).all() and (counts == counts.round()).all() and loss >= 0):
        return False
    n, moved = float(counts.sum()), gradient[1:] + counts
    # Of logits up to LARGEST: their difference from a mean of them, and their variance.
    if abs(float(gradient[0])) > 2 * n * LARGEST or float(hessian[0, 0]) > n * LARGEST**2:
        return False
    near = 1e-9 * (1.0 + n)
    # sum_x p_y lies between 0 and n, and over the labels they are n.
    if not bool((moved >= -near).all() and (moved <= n + near).all()):
        return False
    if abs(float(moved.sum()) - n) > near:
        return False
    size = 1e-9 * (1.0 + float(hessian.diagonal().abs().sum()))
    symmetric = (hessian - hessian.T).abs().max() <= size
    # Of one example diag(p) - p p^T: rows of 0 sum, and no diagonal above 1/4.
    inner = hessian[1:, 1:]
    bounded = (inner.diagonal() <= n / 4 + near).all() and (inner.sum(1).abs() <= size).all()
    return bool(symmetric and bounded and torch.linalg.eigvalsh(hessian).min() >= -size)
