"""Macro F1, the metric of iWildCam."""

from __future__ import annotations

import torch
from torch import Tensor

from fedshift.errors import InputError
from fedshift.model import Model
from fedshift.tree import Params


def predictions(
    model: Model, params: Params, buffers: Params, x: Tensor, *, batch: int = 1000
) -> Tensor:
    """The label of the largest logit for inputs x [n, ...], in blocks of `batch`: int64 [n]."""
    with torch.no_grad():
        blocks = [
            model(params, buffers, part)["logits"].argmax(1) for part in torch.split(x, batch)
        ]
    return torch.cat(blocks)


def macro_f1(predicted: Tensor, truth: Tensor, classes: int) -> float:
    """The mean of F1_y = 2 tp_y / (n_y + p_y) over the labels y that `truth` has.

    tp_y counts samples of label y that were predicted as y, n_y all samples of label y, p_y all
    predictions of y. A label that is predicted but never true adds no term of its own; it lowers
    the terms of the labels that it was taken for. `predicted`, `truth` int64 [n] in 0..K-1.

    Source: WILDS (Koh et al. 2021), "F1-macro_all": scikit-learn's f1_score with average="macro"
    and labels=unique(truth). Raises InputError for unequal lengths, no samples, or other labels.
    """
    if predicted.shape != truth.shape or truth.ndim != 1 or not len(truth):
        raise InputError(
            f"predicted {list(predicted.shape)} and truth {list(truth.shape)} must be two vectors "
            "of one length, at least 1"
        )
    both = torch.cat([predicted, truth])
    if not 0 <= int(both.min()) <= int(both.max()) < classes:
        raise InputError(f"labels {int(both.min())}..{int(both.max())}; allowed: 0..{classes - 1}")
    right = torch.bincount(truth[predicted == truth], minlength=classes).double()
    n, p = (torch.bincount(v, minlength=classes).double() for v in (truth, predicted))
    return float((2 * right / (n + p))[n > 0].mean())
